"""Weights in checkpoints of Megatron-Core: what each rank reads of them, and checkpoints that are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.megatron_models import FAMILIES, LATENT, SCORE, SIZES, save_model
from once import made_once
from transformers import DeepseekV3Config, Qwen3MoeConfig

from hydraflow.engine.megatron.architecture import Architecture
from hydraflow.engine.megatron.names import Names
from hydraflow.engine.megatron.saved_names import parameters
from hydraflow.engine.megatron.stored_weights import open_weights, read_part
from hydraflow.engine.stored import pieces
from hydraflow.engine.stored.pieces import StoredTensor, whole
from hydraflow.errors import ConfigError
from hydraflow.model_merger.__main__ import main
from hydraflow.models.config import ModelConfig
from hydraflow.models.loading import load_config

CONFIGS: dict[str, Any] = {
    "qwen2": FAMILIES["qwen2"],
    "qwen3": FAMILIES["qwen3"],
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES | dict(head_dim=16, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2),
        num_key_value_heads=2,
        mlp_only_layers=[1],
    ),
    "deepseek_v3": DeepseekV3Config(**LATENT, q_lora_rank=20, n_shared_experts=2, n_group=1, topk_group=1),
}
"""Tied and not, and with experts."""
KEY, MODEL = "actor_rollout_ref.actor.megatron.dist_checkpointing_path", "actor_rollout_ref.model"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, and in `core` the same as checkpoints of Megatron-Core."""

    def make(folder: Path) -> None:
        for name, config in CONFIGS.items():
            save_model(config, folder / name)
            where = ("--hf_dir", str(folder / name), "--target_dir", str(folder / "core" / name))
            assert main(["split", "--backend", "megatron", "--world_size", "3", *where]) == 0

    return made_once(tmp_path_factory, "stored-weights", make)


def sizes_of(model: Path, **overrides: Any) -> Architecture:
    config = load_config(ModelConfig(path=str(model), override_config=overrides))
    return Architecture.of(config, field=MODEL, path=str(model))


def opened(
    checkpoint: Path, model: Path, *, head: str = "policy", **overrides: Any
) -> dict[str, StoredTensor]:
    where = {"key": KEY, "model": MODEL, "model_path": str(model)}
    return open_weights(str(checkpoint), sizes_of(model, **overrides), head=head, **where)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_rank_reads_its_part(made: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Of a tensor that is divided by rows, its own rows and no others."""
    weights, shape, read = opened(made / "core" / name, made / name), sizes_of(made / name), [0]
    full = {name: whole(tensor) for name, tensor in weights.items()}
    usual = pieces.read_numbers

    def counted(file: Path, offset: int, into: torch.Tensor) -> None:
        read[0] += into.nbytes
        usual(file, offset, into)

    monkeypatch.setattr(pieces, "BLOCK_BYTES", 300)
    monkeypatch.setattr(pieces, "read_numbers", counted)
    for rank, share, slice in product(range(2), range(2), range(2)):
        names = Names(shape, rank, 2, experts=share, expert_shares=2, slice=slice, slices=2)
        for parameter in parameters(shape):
            for part in names.holding(parameter).parts:
                read[0], wanted = 0, part.of(full[part.name])
                found = read_part(part, weights)
                assert torch.equal(found, wanted) and found.dtype == wanted.dtype, (parameter, rank)
                if part.slice is None and part.dim != 1:
                    assert read[0] == wanted.nbytes, parameter


def test_a_critic_starts_from_a_policy_with_a_value_head_of_zeros(made: Path) -> None:
    weights = opened(made / "core" / "qwen3", made / "qwen3", head="value")
    (part,) = Names(sizes_of(made / "qwen3"), 0, 1).holding(SCORE).parts
    assert torch.equal(read_part(part, weights), torch.zeros(1, 32))


def refused(*given: Any, **overrides: Any) -> str:
    with pytest.raises(ConfigError) as error:
        opened(*given, **overrides)
    assert all(problem.field == KEY for problem in error.value.problems)
    return str(error.value)


def test_a_checkpoint_of_another_model_is_named_with_both_shapes(made: Path) -> None:
    core, model = made / "core" / "qwen3", made / "qwen3"
    reported = refused(core, model, intermediate_size=40)
    assert f"{KEY}={core}: " in reported and "of another shape than the model of" in reported
    assert "decoder.layers.mlp.linear_fc1.weight [2, 96, 32], not [2, 80, 32]" in reported
    assert f"-> {MODEL}.path=<Hugging Face directory of the model in {core}>" in reported
    reported = refused(core, model, num_hidden_layers=3)
    assert "decoder.layers.mlp.linear_fc1.weight [2, 96, 32], not 3 layers" in reported
    assert "lacks tensors of the model" in reported


def test_embeddings_that_are_tied_or_not(made: Path, tmp_path: Path) -> None:
    tie = f"{MODEL}.override_config.tie_word_embeddings"
    reported = refused(made / "core" / "qwen2", made / "qwen2", tie_word_embeddings=False)
    assert "holds no output matrix (output_layer.weight [19, 32])" in reported and f"+{tie}=true" in reported
    reported = refused(made / "core" / "qwen3", made / "qwen3", tie_word_embeddings=True)
    assert (
        "output matrix (output_layer.weight) differs from its embedding" in reported
        and f"+{tie}=false" in reported
    )


def without_a_shard(run: Path) -> Path:
    (run / "release" / "__0_0.distcp").unlink()
    return run


def with_files_of_hugging_face_alone(run: Path) -> Path:
    return run / "huggingface"


def of_a_step(run: Path) -> Path:
    (run / "latest_checkpointed_iteration.txt").unlink()
    shutil.move(run / "release", run / "global_step_3" / "actor" / "dist_ckpt")
    return run / "global_step_3"


def of_another_format(run: Path) -> Path:
    (run / "release" / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    return run


def absent(run: Path) -> Path:
    return run / "nothing"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (absent, "there is no such directory"),
        (without_a_shard, "/release/__0_0.distcp: this shard is missing; the index expects"),
        (
            with_files_of_hugging_face_alone,
            "holds no checkpoint that Megatron-Core wrote",
        ),
        (of_a_step, f"-> {KEY}={{run}}/global_step_3/actor"),
        (of_another_format, "metadata.json: sharded_backend=zarr: only torch_dist can be read"),
    ],
)
def test_what_is_not_a_whole_checkpoint(
    made: Path, tmp_path: Path, change: Callable[[Path], Path], said: str
) -> None:
    run = shutil.copytree(made / "core" / "qwen3", tmp_path / "run")
    path = change(run)
    assert said.format(run=run) in refused(path, made / "qwen3")
