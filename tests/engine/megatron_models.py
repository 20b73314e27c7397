"""Small models of every family that the Megatron engine builds, and what transformers says of rows: in
float64, one row at a time, without packing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from engine import rank_jobs
from engine.megatron_jobs import TEMPERATURE
from engine.ulysses_jobs import make_rows
from safetensors.torch import load_file, save_file

from hydraflow.engine.base import ModelOutput, columns_of
from hydraflow.models.loading import persistent_buffers
from hydraflow.models.tiny import make_tokenizer
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto

SIZES: dict[str, Any] = dict(vocab_size=19, hidden_size=32, intermediate_size=48, num_attention_heads=4)
SIZES |= dict(
    num_hidden_layers=2, max_position_embeddings=128, bos_token_id=0, eos_token_id=1, pad_token_id=7
)
"""No number of ranks divides the vocabulary. Rows contain the padding token, whose embedding transformers
does not train."""
GROUPED = SIZES | dict(num_key_value_heads=2)
SCALED: dict[str, Any] = dict(rope_type="llama3", rope_theta=100.0, factor=4.0)
SCALED |= dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
FAMILIES: dict[str, Any] = {
    "llama": transformers.LlamaConfig(
        **SIZES | dict(num_hidden_layers=4),
        num_key_value_heads=4,
        tie_word_embeddings=False,
        rope_parameters=SCALED,
    ),
    "mistral": transformers.MistralConfig(**GROUPED, sliding_window=None),
    "qwen2": transformers.Qwen2Config(**GROUPED, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**GROUPED, head_dim=16, tie_word_embeddings=False),
}
"""Heads of keys as many as of queries or fewer, layers four or two, embeddings tied or not, biases, norms of
heads that are wider than the model, and scaled frequencies."""
SCORE = "score.weight"
QWEN: dict[str, Any] = GROUPED | dict(head_dim=16, moe_intermediate_size=24)
QWEN |= dict(num_experts=4, num_experts_per_tok=2)
LATENT: dict[str, Any] = SIZES | dict(kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
LATENT |= dict(moe_intermediate_size=16, n_routed_experts=8, num_experts_per_tok=4, first_k_dense_replace=1)
MIXTURES: dict[str, Any] = {
    "mixtral": transformers.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=3),
    "qwen2_moe": transformers.Qwen2MoeConfig(
        **GROUPED,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=20,
        num_experts=4,
        num_experts_per_tok=2,
    ),
    "glm4_moe": transformers.Glm4MoeConfig(
        **GROUPED | dict(head_dim=16),
        attention_bias=True,
        use_qk_norm=True,
        moe_intermediate_size=24,
        n_routed_experts=4,
        num_experts_per_tok=2,
    ),
}
"""Mixtures of experts that several tests have."""


def sizes(tensor: int = 1, stages: int = 1, **others: Any) -> dict[str, Any]:
    """Settings of the engine."""
    return {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": stages, **others}


def of_mixtures(
    tensor: int = 1, stages: int = 1, experts: int = 1, slices: int | None = None, **others: Any
) -> dict[str, Any]:
    """As `sizes`, with ranks that share experts, or the rows and columns of each."""
    shared = {"expert_model_parallel_size": experts, "expert_tensor_parallel_size": slices}
    return sizes(tensor, stages, **shared, **others)


def save_families(folder: Path) -> Path:
    """A model of each family below the folder."""
    for name, config in FAMILIES.items():
        save_model(config, folder / name)
    return folder


def save_model(config: Any, folder: Path) -> None:
    """A model all of whose weights matter, with a value head and a tokenizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lm = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in lm.parameters():
            wide = parameter.ndim > 1
            parameter.data = torch.randn_like(parameter) * 0.2 + (0 if wide else parameter.data)
        for _, buffer in persistent_buffers(lm):
            buffer.normal_(std=0.2)
        score = torch.randn(1, config.hidden_size)
    lm.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file({**load_file(file), SCORE: score}, file, {"format": "pt"})


def stored(path: str | Path) -> dict[str, torch.Tensor]:
    """What is in the files, the value head left out."""
    return {name: t for name, t in load_file(Path(path) / "model.safetensors").items() if name != SCORE}


def plain_numbers(path: str, head: str, kind: str) -> dict[str, Any]:
    """What transformers' own model says, and the gradient of the loss, by name."""
    lm = transformers.AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.float64,
        experts_implementation="eager",  # the others have no float64
    )
    parameters: dict[str, torch.Tensor] = dict(lm.named_parameters())
    if head == "value":
        score = load_file(Path(path) / "model.safetensors")[SCORE].double().requires_grad_()
        parameters = {name: p for name, p in parameters.items() if name != "lm_head.weight"} | {SCORE: score}
    data = make_rows(kind)
    said: dict[str, list[torch.Tensor]] = {}
    for prompt, response in zip(ragged.rows(data.get("prompts")), ragged.rows(data.get("responses"))):
        ids, asked = torch.cat([prompt, response])[None], slice(len(prompt) - 1, -1)
        if head == "value":
            hidden = lm.model(input_ids=ids, use_cache=False).last_hidden_state[0, asked]
            said.setdefault("values", []).append(hidden @ parameters[SCORE][0])
            continue
        logits = lm(input_ids=ids, use_cache=False).logits[0, asked] / TEMPERATURE
        full = logits.log_softmax(-1)
        said.setdefault("log_probs", []).append(full.gather(-1, response[:, None])[:, 0])
        said.setdefault("entropys", []).append(-(full.exp() * full).sum(-1))
        said.setdefault("greedy_match", []).append((logits.argmax(-1) == response).double())
    return learned(data, said, parameters)


def learned(
    data: DataProto, said: Mapping[str, list[torch.Tensor]], parameters: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """What a model said of each of these rows, the loss, and its gradient by name."""
    width = int(ragged.lengths(data.get("responses")).max())
    columns = columns_of(data, width, rank_jobs.CPU)
    mask = columns["response_mask"]
    dense = {name: torch.nn.utils.rnn.pad_sequence(rows, True) * mask for name, rows in said.items()}
    main, entropies, values = map(dense.get, ("log_probs", "entropys", "values"))
    loss, _ = rank_jobs.loss_of(ModelOutput(log_probs=main, entropy=entropies, values=values), columns)
    found = torch.autograd.grad(loss, list(parameters.values()))
    return {
        "said": {name: torch.cat(rows).detach() for name, rows in said.items()},
        "loss": loss.item(),
        "gradient": dict(zip(parameters, found, strict=True)),
    }
