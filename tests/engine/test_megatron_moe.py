"""Mixtures of experts on Megatron-Core, divided in every way, give the numbers, gradients and steps of the
FSDP engine and of transformers itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hydraflow.engine.megatron  # noqa: F401  lets Megatron-Core run without CUDA, so it comes first

pytest.importorskip("megatron.core")

from engine import megatron_moe_jobs as jobs
from engine.megatron_jobs import OPTIM
from engine.megatron_models import GROUPED, SCORE, plain_numbers, save_model, started
from engine.megatron_ways import TOLERANCE, assert_near
from engine.pool import Ranks
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen2MoeConfig, Qwen3Config, Qwen3MoeConfig

from hydraflow.metrics import merge, values
from hydraflow.protocol import ragged

QWEN = GROUPED | dict(head_dim=16, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2)
FAMILIES: dict[str, Any] = {
    "qwen3_moe": Qwen3MoeConfig(**QWEN, norm_topk_prob=False),
    "a dense layer": Qwen3MoeConfig(**QWEN, norm_topk_prob=True, mlp_only_layers=[1]),
    "mixtral": MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=3),
}


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, Ranks]]:
    """One, two and four ranks."""
    with started((1, 2, 4)) as made:
        yield made


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of each family."""
    folder = tmp_path_factory.mktemp("models")
    for name, config in FAMILIES.items():
        save_model(config, folder / name)
    return folder


Oracle = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def oracle(models: Path) -> Oracle:
    """By family and head: what transformers says and, below `fsdp`, what the FSDP engine does."""
    known: dict[tuple[str, str], dict[str, Any]] = {}

    def numbers(family: str, head: str = "policy") -> dict[str, Any]:
        if (family, head) not in known:
            path = str(models / family)
            fsdp = jobs.numbers(path, {"head": head}, 1)
            known[family, head] = {**plain_numbers(path, head, "usual"), "fsdp": fsdp}
        return known[family, head]

    return numbers


def sizes(
    tensor: int = 1, stages: int = 1, experts: int = 1, slices: int | None = None, **others: Any
) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": stages,
        "expert_model_parallel_size": experts,
        "expert_tensor_parallel_size": slices,
        **others,
    }


PLAIN = {"use_distributed_optimizer": False}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "alone": ("qwen3_moe", 1, sizes()),
    "alone, mixtral": ("mixtral", 1, sizes(**PLAIN)),
    "data 2": ("qwen3_moe", 2, sizes()),
    "ep 2": ("qwen3_moe", 2, sizes(experts=2)),
    "ep 2, plain optimizer": ("mixtral", 2, sizes(experts=2, **PLAIN)),
    "tp 2": ("mixtral", 2, sizes(2)),
    "tp 2, plain optimizer": ("a dense layer", 2, sizes(2, **PLAIN)),
    "tp 2, whole experts": ("qwen3_moe", 2, sizes(2, slices=1, **PLAIN)),
    "tp 2, ep 2": ("qwen3_moe", 2, sizes(2, experts=2, slices=1)),
    "sliced experts": ("a dense layer", 2, sizes(slices=2)),
    "pp 2": ("a dense layer", 2, sizes(1, 2)),
    "pp 2, plain optimizer": ("a dense layer", 2, sizes(1, 2, **PLAIN)),
    "tp 2, ep 2, data 2": ("mixtral", 4, sizes(2, experts=2, slices=1)),
    "tp 2, ep 2, slices 2": ("qwen3_moe", 4, sizes(2, experts=2)),
    "tp 2, ep 4": ("qwen3_moe", 4, sizes(2, experts=4, slices=1, **PLAIN)),
    "pp 2, ep 2": ("a dense layer", 4, sizes(1, 2, experts=2)),
    "pp 2, tp 2": ("qwen3_moe", 4, sizes(2, 2)),
    "context 2, ep 2": ("qwen3_moe", 4, sizes(experts=2, context_parallel_size=2)),
    "ep 2, data 4, plain optimizer": ("a dense layer", 4, sizes(experts=2, **PLAIN)),
}
"""Family, ranks and settings."""


def check(found: list[dict[str, Any]], oracle: dict[str, Any]) -> None:
    """All that ranks said, counted, added up and became."""
    collected = [rank for rank in found if rank["collect"]]
    for name, wanted in oracle["fsdp"]["said"].items():
        said = torch.cat([rank["said"][name] for rank in collected]).double()
        torch.testing.assert_close(said, wanted.double(), rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(said, oracle["said"][name], rtol=0, atol=TOLERANCE)
    told = values(merge(rank["told"] for rank in collected))
    assert told["loss"] == pytest.approx(oracle["loss"], rel=TOLERANCE)
    gradient = jobs.assembled([rank["gradient"] for rank in found])
    assert_near(gradient, oracle["gradient"])
    norm = float(torch.cat([g.flatten() for g in oracle["gradient"].values()]).norm())
    for rank in found:
        assert rank["steps"][0]["grad_norm"] == pytest.approx(norm, rel=TOLERANCE)
        assert rank["steps"] == [pytest.approx(step, rel=TOLERANCE) for step in oracle["fsdp"]["steps"]]
        assert_near(rank["weights"], oracle["fsdp"]["weights"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(pools: dict[int, Ranks], models: Path, oracle: Oracle, layout: str) -> None:
    family, ranks, settings = LAYOUTS[layout]
    found = pools[ranks].run(jobs.numbers, str(models / family), {"megatron": settings}, 2)
    check(found, oracle(family))


def test_values_of_tokens(pools: dict[int, Ranks], models: Path, oracle: Oracle) -> None:
    options = {"megatron": sizes(2, experts=2), "head": "value"}
    found = pools[4].run(jobs.numbers, str(models / "mixtral"), options, 2)
    check(found, oracle("mixtral", "value"))


def test_no_checkpointing_of_activations(pools: dict[int, Ranks], models: Path, oracle: Oracle) -> None:
    options = {"megatron": sizes(experts=2), "model": {"enable_gradient_checkpointing": False}}
    found = pools[2].run(jobs.numbers, str(models / "qwen3_moe"), options, 4)
    check(found, oracle("qwen3_moe"))


def test_the_oracle_is_not_trivial(oracle: Oracle) -> None:
    """Every tensor has a gradient, each expert's matrices among them, and gradients are clipped."""
    for family in FAMILIES:
        found = oracle(family)
        assert min(float(g.abs().max()) for g in found["gradient"].values()) > 1e-4
        experts = [g for name, g in found["gradient"].items() if "experts" in name]
        assert experts and all(bool(g.flatten(1).abs().amax(1).gt(1e-4).all()) for g in experts)
        assert found["fsdp"]["steps"][0]["grad_norm"] > 2 * OPTIM["clip_grad"]


def test_share_of_the_busiest_expert(pools: dict[int, Ranks], models: Path) -> None:
    """Each token of all ranks counts once, also where activations are computed again; a prompt that rows
    share counts once in a line."""
    path, rows = str(models / "qwen3_moe"), jobs.make_rows("one token")
    lm = AutoModelForCausalLM.from_pretrained(path)
    counts = torch.zeros(2, 4)

    def count(layer: int, output: Any) -> None:
        counts[layer] += output[2].flatten().bincount(minlength=4)

    for layer, decoder in enumerate(lm.model.layers):
        decoder.mlp.gate.register_forward_hook(lambda m, args, output, layer=layer: count(layer, output))
    for prompt, response in zip(ragged.rows(rows.get("prompts")), ragged.rows(rows.get("responses"))):
        lm(input_ids=torch.cat([prompt, response])[None])
    wanted = float((counts.amax(1) / counts.sum(1)).max())
    for ranks, settings in ((1, sizes()), (2, sizes(experts=2)), (4, sizes(1, 2, 2))):
        for again in (True, False):
            options = {"megatron": settings, "model": {"enable_gradient_checkpointing": again}}
            for told in pools[ranks].run(jobs.told_of_load, path, options, "one token"):
                assert told == pytest.approx(wanted)


# --- weights and checkpoints


@pytest.mark.parametrize("layout", ["tp 2, ep 2, data 2", "tp 2, ep 2, slices 2", "pp 2, ep 2"])
def test_weights_come_out_as_they_went_in(pools: dict[int, Ranks], models: Path, layout: str) -> None:
    """Bit by bit and under the FSDP engine's names, on all ranks or on the one that wants them."""
    family, ranks, settings = LAYOUTS[layout]
    path = str(models / family)
    wanted = dict(jobs.weights_to(path, {}, None))
    for to in (None, 0, 3):
        for rank, tensors in enumerate(pools[ranks].run(jobs.weights_to, path, {"megatron": settings}, to)):
            assert sorted(name for name, _ in tensors) == sorted(wanted)
            for name, tensor in tensors:
                assert tensor.shape == wanted[name].shape
                assert torch.equal(tensor, wanted[name]) if to in (None, rank) else tensor.is_meta


def test_files_are_saved_as_they_were_read(pools: dict[int, Ranks], models: Path, tmp_path: Path) -> None:
    """Each expert under its own names, bit by bit."""
    path, saved = models / "a dense layer", tmp_path / "saved"
    pools[2].run(jobs.save_hf, str(path), {"megatron": sizes(experts=2)}, str(saved))
    found, wanted = (load_file(folder / "model.safetensors") for folder in (saved, path))
    del wanted[SCORE]
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


PATHS = {
    "fsdp 2": "tp 2, ep 2, slices 2",
    "tp 2, ep 2, slices 2": "pp 2, ep 2",
    "pp 2, ep 2": "sliced experts",
    "sliced experts": "ep 2, plain optimizer",
    "ep 2, plain optimizer": "alone",
    "alone": "fsdp 2",
}


@pytest.mark.parametrize("writer", PATHS)
def test_checkpoints_are_read_with_other_sizes(
    pools: dict[int, Ranks], models: Path, tmp_path: Path, writer: str
) -> None:
    """Weights and moments bit by bit; the next step is the same."""

    def run(layout: str, job: Any) -> dict[str, Any]:
        ranks, options = 2, {}
        if layout in LAYOUTS:
            ranks, options = LAYOUTS[layout][1], {"megatron": LAYOUTS[layout][2]}
        found = pools[ranks].run(job, str(models / "a dense layer"), options, str(tmp_path))
        moments = found[0].get("moments") or {
            f"lm.{name}.{slot}": value
            for slot in jobs.SLOTS
            for name, value in jobs.assembled([rank[slot] for rank in found]).items()
        }
        whole = {name: value for name, value in moments.items() if not name.endswith(".step")}
        return {"state": whole | found[0]["weights"], "next": found[0]["next"]}

    written, read = run(writer, jobs.write), run(PATHS[writer], jobs.read)
    assert read["state"].keys() == written["state"].keys()
    changed = [
        name for name, value in written["state"].items() if not torch.equal(read["state"][name], value)
    ]
    assert not changed
    assert_near(read["next"], written["next"])


# --- what is not built


@pytest.mark.parametrize(("ranks", "settings"), [(1, sizes()), (2, sizes(1, 2)), (2, sizes(experts=2))])
def test_a_model_that_changes_from_pass_to_pass_ends_the_run(
    pools: dict[int, Ranks], models: Path, ranks: int, settings: dict[str, Any]
) -> None:
    path = str(models / "qwen3_moe")
    for told in pools[ranks].run(jobs.refusal_of_noise, path, {"megatron": settings}):
        assert "the same rows gave numbers that differ by" in told
        assert "-> actor_rollout_ref.actor.megatron.moe_router_dtype=fp64" in told


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "experts": (
        MixtralConfig(**GROUPED, num_local_experts=3),
        sizes(experts=2),
        "must divide the 3 experts of the model",
    ),
    "slices": (
        Qwen3MoeConfig(**QWEN | dict(moe_intermediate_size=25)),
        sizes(slices=2),
        "must divide the 25 columns of an expert",
    ),
    "no sp": (FAMILIES["mixtral"], sizes(2, sequence_parallel=False), "megatron.sequence_parallel=false"),
    "dense": (Qwen3Config(**GROUPED), sizes(experts=2), "must divide the 0 experts of the model"),
    "one expert": (
        MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=1),
        sizes(),
        "no router whose one expert",
    ),
    "noise": (
        MixtralConfig(**GROUPED, num_local_experts=4, router_jitter_noise=0.1),
        sizes(),
        "router_jitter_noise",
    ),
    "shared experts": (Qwen2MoeConfig(**GROUPED), sizes(), "not qwen2_moe"),
    "kernels": (
        FAMILIES["mixtral"],
        sizes(moe_permute_fusion=True),
        "megatron.moe_permute_fusion=true: Transformer Engine is not installed",
    ),
    "loss": (
        FAMILIES["mixtral"],
        sizes(override_transformer_config={"moe_aux_loss_coeff": 0.01}),
        "leave out actor_rollout_ref.actor.megatron.override_transformer_config.moe_aux_loss_coeff",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_not_built_is_refused(tmp_path: Path, pools: dict[int, Ranks], why: str) -> None:
    config, settings, words = REFUSED[why]
    save_model(config, tmp_path)
    for told in pools[2].run(jobs.refusal, str(tmp_path), {"megatron": settings}):
        assert words in told
