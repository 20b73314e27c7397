"""What evens out the load of experts trains as its formula says: a loss of each row, against float64, and
biases of routers, against counts of transformers' own choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine import megatron_moe_jobs as jobs
from engine import rank_jobs
from engine.megatron_jobs import assembled, read_checkpoint, write_checkpoint
from engine.megatron_models import LATENT, QWEN, sizes
from engine.megatron_ways import TOLERANCE, assert_near
from engine.pool import Ranks
from engine.ulysses_jobs import make_rows
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3MoeConfig

from hydraflow import metrics
from hydraflow.protocol import ragged

FAMILIES: dict[str, Any] = {
    "qwen3_moe": Qwen3MoeConfig(**QWEN | dict(num_hidden_layers=4), norm_topk_prob=True, mlp_only_layers=[2]),
    "deepseek_v3": DeepseekV3Config(**LATENT, q_lora_rank=20, n_group=4, topk_group=2, n_shared_experts=1),
}
GROUP_SIZES = (1, 2, 4)
KIND, UNTRAINED = "samples", slice(5, 6)
CHOSEN = {"qwen3_moe": 2, "deepseek_v3": 4}


def mixtures(lm: Any) -> list[Any]:
    """The layers of experts."""
    return [layer.mlp for layer in lm.model.layers if hasattr(layer.mlp, "gate")]


def rows() -> Iterator[tuple[torch.Tensor, bool]]:
    """The tokens of each row that a model reads, and whether the row is trained."""
    data = rank_jobs.untrained(make_rows(KIND), UNTRAINED)
    columns = [ragged.rows(data.get(name)) for name in ("prompts", "responses", "response_mask")]
    for prompt, response, mask in zip(*columns, strict=True):
        yield torch.cat([prompt, response[:-1]]), bool(mask.any())


@pytest.fixture(scope="module")
def oracle(models: Path) -> Callable[[str], tuple[float, dict[str, torch.Tensor]]]:
    """By family: the mean of the rows' and layers' losses, and the gradient of BALANCE times their sum over
    layers and mean over rows, by name, in float64: one row at a time, from the formula."""
    known: dict[str, Any] = {}

    def numbers(family: str) -> tuple[float, dict[str, torch.Tensor]]:
        if family not in known:
            known[family] = balance_in_float64(str(models / family), family)
        return known[family]

    return numbers


def balance_in_float64(path: str, family: str) -> tuple[float, dict[str, torch.Tensor]]:
    lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    seen: list[torch.Tensor] = []
    for mixture in mixtures(lm):
        mixture.gate.register_forward_hook(
            lambda gate, args, output: seen.append(F.linear(args[0].flatten(0, -2), gate.weight))
        )
    total, count = torch.zeros((), dtype=torch.float64), 0
    for tokens, is_trained in rows():
        if not is_trained:
            continue
        seen.clear()
        lm(input_ids=tokens[None], use_cache=False)
        count += 1
        for logits in seen:  # (T, E)
            scores = logits.softmax(-1) if family == "qwen3_moe" else logits.sigmoid()
            scores = scores / scores.sum(-1, keepdim=True)
            length, experts = scores.shape
            chosen = torch.zeros(experts, dtype=torch.float64)
            for token in scores:
                chosen[token.topk(CHOSEN[family]).indices] += 1
            fraction = chosen * experts / (CHOSEN[family] * length)
            total = total + (fraction * scores.mean(0)).sum()
    (total * jobs.BALANCE / count).backward()
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in lm.named_parameters()}
    return float(total.detach()) / count / len(mixtures(lm)), found


PARTS = {"virtual_pipeline_model_parallel_size": 2}
EP = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
PADDED, KEPT = {"use_remove_padding": False}, {"enable_gradient_checkpointing": False}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any], int, dict[str, Any]]] = {
    "alone": ("qwen3_moe", 1, sizes(), 8, {}),
    "alone, row by row": ("qwen3_moe", 1, sizes(), 1, KEPT),
    "alone, padded": ("qwen3_moe", 1, sizes(), 3, PADDED),
    "sigmoids": ("deepseek_v3", 1, sizes(), 3, {}),
    "data 2": ("qwen3_moe", 2, sizes(**EP), 2, {}),
    "tp 2": ("qwen3_moe", 2, sizes(2, **EP), 3, {}),
    "tp 2, padded": ("deepseek_v3", 2, sizes(2), 3, PADDED),
    "pp 2": ("deepseek_v3", 2, sizes(1, 2), 3, {}),
    "pp 2, two parts, filled up": ("qwen3_moe", 2, sizes(1, 2, **PARTS), 3, {}),
    "context 2": ("qwen3_moe", 2, sizes(context_parallel_size=2), 3, {}),
    "tp 2, context 2": ("qwen3_moe", 4, sizes(2, context_parallel_size=2), 3, KEPT),
    "tp 2, data 2": ("deepseek_v3", 4, sizes(2, **EP), 2, {}),
}
"""Family, ranks, settings, rows of a micro-batch, settings of the model."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_of_the_load_trains_as_its_formula_says(
    pools: dict[int, Ranks], models: Path, oracle: Any, layout: str
) -> None:
    family, ranks, settings, of_micro_batch, model = LAYOUTS[layout]
    options = {"megatron": settings, "model": model}
    path = str(models / family)
    found = pools[ranks].run(jobs.balanced, path, options, KIND, UNTRAINED, of_micro_batch)
    mean, gradient = oracle(family)
    without, once, again = (assembled([rank[number][0] for rank in found]) for number in range(3))
    assert_near(once, {name: value.double() + gradient[name] for name, value in without.items()})
    assert_near(again, once)
    for rank in found:
        assert "actor/moe_aux_loss" not in rank[0][1]
        for _, reported in rank[1:]:
            assert metrics.values(reported)["actor/moe_aux_loss"] == pytest.approx(mean, rel=TOLERANCE)


def test_the_oracle_is_not_trivial(oracle: Any) -> None:
    """Every layer below a router learns from it, and the load is uneven."""
    for family in FAMILIES:
        mean, gradient = oracle(family)
        assert mean > 1.02
        assert min(float(gradient[name].abs().max()) for name in gradient if "gate.weight" in name) > 1e-3
        assert float(gradient["model.embed_tokens.weight"].abs().max()) > 1e-4


def choices(path: str) -> list[torch.Tensor]:
    """(E,) tokens of all rows that go to each expert, by layer of experts, as transformers chooses."""
    lm = AutoModelForCausalLM.from_pretrained(path, experts_implementation="eager")
    counts = [torch.zeros(8) for _ in mixtures(lm)]

    def count(number: int, chosen: torch.Tensor) -> None:
        counts[number] += chosen.flatten().bincount(minlength=8)

    for number, mixture in enumerate(mixtures(lm)):
        mixture.experts.register_forward_pre_hook(lambda module, args, number=number: count(number, args[1]))
    for tokens, _ in rows():
        lm(input_ids=tokens[None], use_cache=False)
    return counts


RATE = 0.05
BIASED: dict[str, tuple[int, dict[str, Any], int, dict[str, Any]]] = {
    "alone": (1, sizes(), 8, {}),
    "alone, row by row": (1, sizes(), 1, {}),
    "tp 2, padded": (2, sizes(2), 3, PADDED),
    "pp 2": (2, sizes(1, 2), 3, {}),
    "tp 2, data 2": (4, sizes(2, **EP), 2, {}),
    "context 2, data 2": (4, sizes(context_parallel_size=2), 2, KEPT),
}


@pytest.mark.parametrize("layout", BIASED)
def test_biases_move_towards_an_even_load(pools: dict[int, Ranks], models: Path, layout: str) -> None:
    """By the rate, whatever micro-batches and prompts that rows share; not if the step is skipped."""
    ranks, settings, of_micro_batch, model = BIASED[layout]
    path = models / "deepseek_v3"
    stored = load_file(path / "model.safetensors")
    (name,) = (one for one in stored if one.endswith("correction_bias"))
    (counts,) = choices(str(path))
    assert len(counts.unique()) > 3
    options = {"megatron": {**settings, "moe_router_bias_update_rate": RATE}, "model": model}
    for skipped, after in pools[ranks].run(jobs.moved_biases, str(path), options, KIND, of_micro_batch):
        assert torch.equal(skipped[name], stored[name])
        torch.testing.assert_close(after[name], stored[name] + RATE * (counts.mean() - counts).sign())


def test_biases_are_frozen_by_default(pools: dict[int, Ranks], models: Path) -> None:
    path = models / "deepseek_v3"
    stored = load_file(path / "model.safetensors")
    for _, after in pools[2].run(jobs.moved_biases, str(path), {"megatron": sizes(2)}, KIND, 4):
        assert all(torch.equal(value, stored[name]) for name, value in after.items()) and after


def test_moved_biases_are_in_checkpoints(pools: dict[int, Ranks], models: Path, tmp_path: Path) -> None:
    """Read with other sizes, they are those that were written, and the next steps move them as they would
    have."""
    path = str(models / "deepseek_v3")

    def options(**of_engine: Any) -> dict[str, Any]:
        return {"megatron": {"moe_router_bias_update_rate": RATE, **of_engine}}

    written = pools[2].run(write_checkpoint, path, options(**sizes(2)), str(tmp_path))[0]
    read = pools[2].run(read_checkpoint, path, options(**sizes(1, 2)), str(tmp_path))[0]
    stored = load_file(models / "deepseek_v3" / "model.safetensors")
    (name,) = (one for one in stored if one.endswith("correction_bias"))
    assert not torch.equal(written["weights"][name], stored[name])
    assert torch.equal(read["weights"][name], written["weights"][name])
    assert_near(read["next"], written["next"])
