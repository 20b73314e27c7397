"""Distributed checkpoints written and read by Megatron-Core itself, on real ranks; in a file of its own so
that spawned processes can import it.

The model is Megatron-Core's own GPTModel in its local layers. Its weights are those of the Megatron engine,
which other tests compare with transformers."""

from __future__ import annotations

import copy
import multiprocessing
import queue
import runpy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine.megatron_jobs import restart
from engine.megatron_models import sizes

from hydraflow.engine.config import MegatronConfig
from hydraflow.engine.megatron.architecture import Latent
from hydraflow.engine.megatron.engine import MegatronEngine
from hydraflow.engine.megatron.names import vocabulary_share
from hydraflow.errors import ConfigError
from hydraflow.models.config import ModelConfig
from hydraflow.models.loading import persistent_buffers

STACKED: dict[str, Any] = {}
SEPARATE = {"non_homogeneous_layers": True}
SINGLE = {"singleton_local_shards": True}
"""How Megatron-Core saves layers: all in one tensor, each in its own, or experts and halves, too."""
CASES: dict[str, tuple[str, dict[str, Any], Mapping[str, Any]]] = {
    "llama": ("llama", sizes(2, 2), STACKED),
    "mistral": ("mistral", sizes(1, 2), SINGLE),
    "qwen2": ("qwen2", sizes(2, 2), SEPARATE),
    "qwen3": ("qwen3", sizes(2, 1), STACKED),
    "bf16": ("qwen3", sizes(1, 1, dtype="bf16"), STACKED),
    "qwen3_moe": ("qwen3_moe", sizes(2, 2), STACKED),
    "experts": ("qwen3_moe", sizes(2, 1, expert_model_parallel_size=2), STACKED),
    "mixed": ("mixed", sizes(1, 2), STACKED),
    "mixtral": ("mixtral", sizes(2, 1), SINGLE),
    "deepseek_v3": ("deepseek_v3", sizes(2, 2), STACKED),
    "deepseek_v2": ("deepseek_v2", sizes(1, 1, expert_model_parallel_size=2), SINGLE),
    "qwen2_moe": ("qwen2_moe", sizes(2, 1), STACKED),
    "glm4_moe": ("glm4_moe", sizes(1, 2), STACKED),
}
"""Case -> family, sizes of the engine, how layers are saved."""
OTHERS: dict[str, dict[str, Any]] = {
    "llama": sizes(1, 2),
    "mistral": sizes(2, 1),
    "qwen2": sizes(2, 1),
    "qwen3": sizes(2, 2),
    "bf16": sizes(2, 1, dtype="bf16"),
    "qwen3_moe": sizes(1, 2, expert_model_parallel_size=2),
    "experts": sizes(2, 2, expert_tensor_parallel_size=1),
    "mixed": sizes(2, 1, expert_model_parallel_size=2),
    "mixtral": sizes(1, 2),
    "deepseek_v3": sizes(2, 1, expert_model_parallel_size=2),
    "deepseek_v2": sizes(2, 2),
    "qwen2_moe": sizes(2, 2),
    "glm4_moe": sizes(2, 1, expert_tensor_parallel_size=1),
}
"""Case -> sizes of the engine that loads what was saved with others."""


def make_engine(path: str, sizes: Mapping[str, Any]) -> MegatronEngine:
    """An engine without an optimizer; the groups of ranks are those of its sizes."""
    options: dict[str, Any] = {"dtype": "fp32", "use_distributed_optimizer": False, **sizes}
    settings = MegatronConfig(**options, sequence_parallel=sizes["tensor_model_parallel_size"] > 1)
    restart(settings)
    return MegatronEngine(ModelConfig(path=path), settings, None, head="policy", device=torch.device("cpu"))


def make_core(engine: MegatronEngine) -> Any:
    """Megatron-Core's model of the engine's sizes and type."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.identity_op import IdentityOp

    names = engine._built.names
    config = copy.copy(engine._built.trunk.config)
    if names.shape.latent:
        config = _with_latent(config, names.shape.latent)
    config.sequence_parallel = False  # torch's norms have none
    config.gradient_accumulation_fusion = False
    config.normalization = "RMSNorm"
    if names.shape.mixture:
        config.moe_layer_freq = [int(has) for has in names.shape.mixture.layers]
        if all(config.moe_layer_freq):
            config.moe_layer_freq = 1
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs if names.shape.latent else ():
        # has no weights; only Transformer Engine's has the sizes of such heads
        layer.submodules.self_attention.submodules.core_attention = IdentityOp
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=vocabulary_share(names.shape.vocabulary, names.ranks) * names.ranks,
        max_sequence_length=128,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=names.shape.tied,
        position_embedding_type="rope",
        parallel_output=True,
    ).to(config.params_dtype)


class Nothing:
    """What no layer is an instance of."""


def _with_latent(config: Any, latent: Latent) -> Any:
    """The same configuration with Megatron-Core's own latent attention, which needs Transformer Engine by
    name only."""
    from megatron.core.transformer import multi_latent_attention as module
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    vars(module).update(
        dict.fromkeys(("TELinear", "TEColumnParallelLinear", "Linear"), Nothing), HAVE_TE=False
    )
    given = {one.name: getattr(config, one.name) for one in fields(config) if one.init}
    given |= dict(multi_latent_attention=True, qk_layernorm=True, q_lora_rank=latent.q_lora_rank)
    given |= dict(kv_lora_rank=latent.kv_lora_rank, v_head_dim=latent.v_head_dim)
    given |= dict(qk_head_dim=latent.qk_nope_head_dim, qk_pos_emb_head_dim=latent.qk_rope_head_dim)
    return MLATransformerConfig(**given)


LATENT = {
    "q_proj": "linear_q_proj",
    "q_a_proj": "linear_q_down_proj",
    "q_a_layernorm": "q_layernorm",
    "q_b_proj": "linear_q_up_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_a_layernorm": "kv_layernorm",
    "kv_b_proj": "linear_kv_up_proj",
    "o_proj": "linear_proj",
}
"""Parts of latent attention in the engine and in Megatron-Core, by mbridge's table of DeepSeek-V3."""


def pairs(engine: MegatronEngine, core: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parameters of Megatron-Core's model, and biases of routers, and what they hold in the engine's."""
    for name, buffer in persistent_buffers(engine._built.trunk):
        yield core.get_buffer(name), buffer
    for name, parameter in engine._built.trunk.named_parameters():
        if ".experts." not in name:
            *front, part, kind = name.split(".")
            theirs = core.get_parameter(".".join((*front, LATENT.get(part, part), kind)))
            whole = parameter.shape == theirs.shape
            yield (
                theirs,
                parameter if whole else parameter.chunk(engine._place.tensor_size)[engine._place.tensor],
            )
            continue
        front, kind = name.rsplit(".", 1)
        matrix = {"gate_up": "linear_fc1", "down": "linear_fc2"}[kind]
        for number, expert in enumerate(parameter):
            yield core.get_parameter(f"{front}.local_experts.{number}.{matrix}.weight"), expert


@torch.no_grad()
def save(path: str, folder: str, case: str) -> None:
    """A checkpoint of the model in `path`."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # The process that writes reads what was written, unless another does both. Megatron-Core would start one
    # that has the queue, which takes a second of imports and outlives a rank that is terminated.
    filesystem_async._results_queue = queue.Queue()
    _, sizes, metadata = CASES[case]
    engine = make_engine(path, sizes)
    core = make_core(engine)
    for theirs, ours in pairs(engine, core):
        theirs.copy_(ours)
    Path(folder).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    state = {"model": core.sharded_state_dict(metadata=dict(metadata)), "iteration": 10}
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # files are written by children
    dist_checkpointing.save(state, folder, content_metadata=dict(metadata))


def load_into_engine(path: str, folder: str, sizes: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The weights of an engine that starts from a checkpoint; `path` holds its configuration."""
    stored = dict(use_dist_checkpointing=True, dist_checkpointing_path=folder)
    return {name: tensor.clone() for name, tensor in make_engine(path, {**sizes, **stored}).weights()}


def refused_without(path: str, folder: str, rank: int) -> str:
    """What every rank raises when one of them has no checkpoint."""
    mine = folder if dist.get_rank() != rank else f"{folder}-of-another-machine"
    try:
        load_into_engine(path, mine, sizes(2, 2))
    except ConfigError as error:
        return str(error)
    return ""


@torch.no_grad()
def load(path: str, folder: str, sizes: Mapping[str, Any], metadata: Mapping[str, Any]) -> list[str]:
    """Loads a checkpoint into Megatron-Core's model; the names of what is not as in `path`."""
    from megatron.core import dist_checkpointing

    engine = make_engine(path, sizes)
    core = make_core(engine)
    for tensor in (*core.parameters(), *(buffer for _, buffer in persistent_buffers(core))):
        tensor.fill_(torch.nan)
    state = dist_checkpointing.load({"model": core.sharded_state_dict(metadata=dict(metadata))}, folder)
    core.load_state_dict(state["model"])
    names = {id(tensor): name for name, tensor in core.state_dict(keep_vars=True).items()}
    return [names[id(theirs)] for theirs, ours in pairs(engine, core) if not torch.equal(theirs, ours)]


def run_script(*words: str) -> None:
    """`python words`."""
    sys.argv = [*words]
    runpy.run_path(words[0], run_name="__main__")
