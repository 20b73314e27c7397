"""Model FLOPs of all known types against torch's own count of real models, and a share by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3Config,
    LlamaConfig,
    PreTrainedConfig,
)
from transformers.masking_utils import eager_mask

from hydraflow.models.config import ModelConfig
from hydraflow.models.flops import MLP_MATRICES, LayerFlops, layer_flops
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto
from hydraflow.workers import utilization
from hydraflow.workers.utilization import ModelWork, Utilization

SIZES: dict[str, Any] = dict(
    vocab_size=50,
    hidden_size=32,
    n_embd=32,
    intermediate_size=40,
    num_hidden_layers=3,
    n_layer=3,
    num_attention_heads=4,
    n_head=4,
    num_key_value_heads=2,
    head_dim=12,
    rotary_dim=4,
    layer_types=["full_attention", "sliding_attention", "full_attention"],
    sliding_window=5,
    use_sliding_window=True,
    num_experts=5,
    num_local_experts=5,
    n_routed_experts=5,
    num_experts_per_tok=2,
    moe_intermediate_size=14,
    n_shared_experts=2,
    shared_expert_intermediate_size=18,
    mlp_only_layers=[0],
    first_k_dense_replace=1,
    mlp_layer_types=["dense", "sparse", "sparse"],
    n_group=1,
    topk_group=1,
    pad_token_id=0,
)
LATENT: dict[str, Any] = dict(
    num_key_value_heads=4,
    head_dim=8,
    q_lora_rank=14,
    kv_lora_rank=18,
    qk_nope_head_dim=6,
    qk_rope_head_dim=8,
    v_head_dim=10,
)
"""Of keys and values that are made of one narrow vector."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in MLP_MATRICES},
    "no window": ("mistral", dict(sliding_window=None)),
    "a given width": ("gpt2", dict(n_inner=40)),
    "experts in every second layer": ("qwen3_moe", dict(decoder_sparse_step=2, mlp_only_layers=[])),
    "queries of full rank": ("deepseek_v3", dict(q_lora_rank=None)),
}
TOKENS = 11


def config_of(kind: str, **more: Any) -> PreTrainedConfig:
    """A tiny configuration, with the sizes that this type has."""
    of_type = CONFIG_MAPPING[kind]
    known = vars(of_type())
    sizes = SIZES | LATENT if "kv_lora_rank" in known else SIZES
    return of_type(**{name: size for name, size in sizes.items() if name in known} | more)


class Attention:
    """Attention of all queries with all keys; `unseen`: the FLOPs of the pairs that the mask takes out."""

    def __init__(self) -> None:
        self.unseen = 0
        AttentionInterface.register("counted", self)
        AttentionMaskInterface.register("counted", eager_mask)

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **others: Any
    ) -> tuple[Tensor, None]:
        heads = query.shape[1]
        key, value = (each.repeat_interleave(heads // each.shape[1], dim=1) for each in (key, value))
        self.unseen += 2 * heads * (query.shape[-1] + value.shape[-1]) * int((mask[0, 0] < 0).sum())
        return ((query @ key.mT + mask).softmax(-1) @ value).transpose(1, 2), None


@pytest.mark.parametrize(("kind", "more"), VARIANTS.values(), ids=VARIANTS)
def test_operations_are_those_that_torch_counts(kind: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Of a real model, in a forward and a backward pass, but for pairs of a query with a key that it does not
    see: later tokens, and those outside of a window."""
    config = config_of(kind, **more)
    config.save_pretrained(tmp_path)
    attention = Attention()
    lm = AutoModelForCausalLM.from_config(
        config, attn_implementation="counted", experts_implementation="eager"
    )
    embedded = torch.randn(1, TOKENS, config.hidden_size, requires_grad=True)
    # the last of twelve tokens is not read, and all others are asked for their next one
    rows = torch.tensor([1]), torch.tensor([TOKENS])
    for frozen in (False, True):
        work = ModelWork.of(ModelConfig(path=str(tmp_path), lora_rank=int(frozen)), "policy", "model")
        assert work is not None
        lm.requires_grad_(not frozen)
        attention.unseen = 0
        with FlopCounterMode(display=False) as counter:
            logits = lm(inputs_embeds=embedded, use_cache=False).logits
            assert work.forward(*rows) == counter.get_total_flops() - attention.unseen
            logits.sum().backward()
        assert work.update(*rows) == counter.get_total_flops() - 3 * attention.unseen


def test_the_share_is_of_the_peak_of_all_devices_that_have_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utilization, "peak_flops", lambda device, dtype: 1e6)
    work = ModelWork(LayerFlops(per_token=100, per_pair={None: 10}), head=20, frozen=False)
    rows = {"prompts": [3, 2], "responses": [4, 1]}
    batch = DataProto.from_dict(
        {
            name: ragged.from_rows([torch.ones(n, dtype=torch.int64) for n in each])
            for name, each in rows.items()
        }
    )
    lengths = torch.tensor([3, 2]), torch.tensor([4, 1])
    assert work.forward(*lengths) == 100 * (6 + 2) + 20 * (4 + 1) + 10 * (21 + 3)
    of = Utilization(work, torch.device("cpu"), torch.float32, devices=4)
    of.note("actor_infer", batch, 1.0)
    of.note("actor_infer", batch, 5.0)
    of.note("actor", batch, 2.0, updates=3)
    found = of.metrics()
    assert found["perf/mfu/actor"].value == pytest.approx(3 * work.update(*lengths) / (2.0 * 1e6 * 4))
    assert found["perf/mfu/actor_infer"].value == pytest.approx(work.forward(*lengths) / (5.0 * 1e6 * 4))
    assert of.metrics() == {}, "reported once"


def test_what_is_not_known_has_no_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.for_model("mamba", num_hidden_layers=1, hidden_size=8, vocab_size=9)
    config.save_pretrained(tmp_path)
    assert ModelWork.of(ModelConfig(path=str(tmp_path)), "policy", "model") is None
    of_none = Utilization(None, torch.device("cpu"), torch.float32, devices=1)
    batch = DataProto.from_dict({"prompts": ragged.from_rows([torch.ones(2, dtype=torch.int64)])})
    of_none.note("actor_infer", batch, 1.0)
    of_none.note("actor", batch, 1.0, updates=1)
    assert of_none.metrics() == {}


class OwnConfig(LlamaConfig):  # type: ignore[misc]
    """A model's own code under a known name."""


def test_own_code_is_not_known() -> None:
    assert layer_flops(config_of("llama")) is not None
    assert layer_flops(OwnConfig()) is None


def test_a_critic_has_one_output(tmp_path: Path) -> None:
    config_of("llama").save_pretrained(tmp_path)
    critic = ModelWork.of(ModelConfig(path=str(tmp_path), lora_rank=2), "value", "critic.model")
    assert critic is not None and (critic.head, critic.frozen) == (2 * 32, True)


def test_the_language_model_of_a_multimodal_one_is_counted(tmp_path: Path) -> None:
    text = config_of("gemma3_text")
    Gemma3Config(text_config=text).save_pretrained(tmp_path)
    work = ModelWork.of(ModelConfig(path=str(tmp_path)), "policy", "model")
    assert work is not None and work.layers == layer_flops(text)
