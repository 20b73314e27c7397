"""Checkpoints that Megatron-Core itself writes and reads: merging gives the Hugging Face model whose weights
were saved, bit by bit, and what `split` makes is loaded by Megatron-Core."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import hydraflow.engine.megatron  # noqa: F401  lets Megatron-Core run without CUDA, so it comes first

pytest.importorskip("megatron.core")

from engine import megatron_models
from engine.megatron_models import LATENT, QWEN, SCORE, save_families, save_model, sizes, stored
from engine.pool import Ranks, started
from model_merger import core_jobs as jobs
from model_merger.directories import assert_same_bits, merge, read
from once import made_once
from transformers import DeepseekV2Config, DeepseekV3Config, Qwen3MoeConfig

from hydraflow.engine.dcp_index import INDEX
from hydraflow.errors import ConfigError
from hydraflow.model_merger import architecture, load_state_dict
from hydraflow.model_merger.__main__ import main
from scripts.bench.merger import WITH_MEGATRON_CORE

MIXTURES = {
    **megatron_models.MIXTURES,
    "qwen3_moe": Qwen3MoeConfig(**QWEN),
    "mixed": Qwen3MoeConfig(**QWEN, mlp_only_layers=[1]),
    "deepseek_v3": DeepseekV3Config(**LATENT, q_lora_rank=20, n_shared_experts=2, n_group=1, topk_group=1),
    "deepseek_v2": DeepseekV2Config(**LATENT, q_lora_rank=None),
}
FAMILIES = [*megatron_models.FAMILIES, *MIXTURES]
NAMES = "--hf_model_path"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of each family."""

    def save(folder: Path) -> None:
        save_families(folder)
        for name, config in MIXTURES.items():
            save_model(config, folder / name)

    return made_once(tmp_path_factory, "megatron-core-models", save)


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Four ranks."""
    with started([4]) as made:
        yield made[4]


def split(model: Path, folder: Path, *flags: str) -> Path:
    """What `split` makes of a model."""
    options = ("--backend", "megatron", "--hf_dir", str(model), "--target_dir", str(folder))
    assert main(["split", *options, "--world_size", "2", *flags]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", jobs.CASES)
def test_merging_and_loading_give_the_model_that_was_saved(
    models: Path, pool: Ranks, tmp_path: Path, case: str
) -> None:
    """The engine loads it with other parallel sizes than it was saved with, and reads no other weights."""
    model, run = models / jobs.CASES[case][0], tmp_path / "run"
    pool.run(jobs.save, str(model), str(run / "iter_0000010"), case)
    merged = merge(run, tmp_path / "merged", "--backend", "megatron", NAMES, str(model))
    wanted = {name: tensor.to(merged[name].dtype) for name, tensor in stored(model).items()}
    assert_same_bits(merged, wanted)
    assert {tensor.dtype for tensor in merged.values()} == {
        torch.bfloat16 if case == "bf16" else torch.float32
    }
    without_weights = shutil.copytree(
        model, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")
    )
    found = pool.run(jobs.load_into_engine, str(without_weights), str(run), jobs.OTHERS[case])
    for rank in (0, 3):
        assert_same_bits(in_files(found[rank], model), wanted)


def in_files(weights: dict[str, torch.Tensor], model: Path) -> dict[str, torch.Tensor]:
    """The engine's weights by their names in files."""
    known = architecture.describe(model, {n: tuple(t.shape) for n, t in weights.items()}, head="policy")
    return known.revert({name: weights[name] for name in weights.keys() - known.tied.keys()})


@pytest.mark.slow
def test_a_rank_that_has_no_checkpoint_ends_all(models: Path, pool: Ranks, tmp_path: Path) -> None:
    folder, model = split(models / "qwen3", tmp_path / "split"), str(models / "qwen3")
    reported = pool.run(jobs.refused_without, model, str(folder), 2)
    assert f"{folder}-of-another-machine: there is no such directory" in reported[0] and len({*reported}) == 1


LOADED = {
    "llama": (sizes(2, 2), jobs.STACKED),
    "qwen2": (sizes(2, 1), jobs.SEPARATE),
    "qwen3": (sizes(1, 2), jobs.STACKED),
    "qwen3_moe": (sizes(1, 2, expert_model_parallel_size=2), jobs.STACKED),
    "mixtral": (sizes(2, 2), jobs.SEPARATE),
    "mixed": (sizes(2, 1), jobs.STACKED),
    "deepseek_v3": (sizes(2, 2), jobs.STACKED),
    "deepseek_v2": (sizes(1, 1, expert_model_parallel_size=2), jobs.STACKED),
    "qwen2_moe": (sizes(1, 2), jobs.STACKED),
    "glm4_moe": (sizes(2, 1), jobs.SEPARATE),
}
"""Family -> sizes of the engine, how Megatron-Core wants its layers."""


@pytest.mark.slow
@pytest.mark.parametrize("family", LOADED)
def test_megatron_core_loads_what_split_makes(models: Path, pool: Ranks, tmp_path: Path, family: str) -> None:
    ways, layers = LOADED[family]
    flags = ["--separate_layers"] if layers == jobs.SEPARATE else []
    folder = split(models / family, tmp_path / "split", *flags) / "release"
    assert pool.run(jobs.load, str(models / family), str(folder), ways, layers) == [[]] * 4


@pytest.mark.parametrize("family", FAMILIES)
def test_splitting_and_merging_gives_the_same_bits(models: Path, tmp_path: Path, family: str) -> None:
    """Also layer by layer and in another type, in which `split` rounds as `merge` does."""
    found = merge(split(models / family, tmp_path / "split"), tmp_path / "merged")
    assert_same_bits(found, stored(models / family))
    half = split(models / family, tmp_path / "half", "--separate_layers", "--dtype", "bf16")
    wanted = {
        name: tensor if "bias" in name and "gate" in name else tensor.bfloat16()
        for name, tensor in stored(models / family).items()
    }
    assert_same_bits(merge(half, tmp_path / "half-merged"), wanted)
    assert_same_bits(merge(tmp_path / "split", tmp_path / "rounded", "--dtype", "bf16"), wanted)


@pytest.mark.slow
def test_what_the_bench_compares_with_gives_the_same_bits(models: Path, pool: Ranks, tmp_path: Path) -> None:
    """Megatron-Core's own loading, in one process: forked, like the ranks, from one that has imported it."""
    run, script = split(models / "qwen2", tmp_path / "split"), tmp_path / "script.py"
    script.write_text(WITH_MEGATRON_CORE)
    words = [str(script), str(run), str(tmp_path / "saved")]
    process = multiprocessing.get_context("forkserver").Process(target=jobs.run_script, args=words)
    process.start()
    process.join(240)
    assert process.exitcode == 0
    assert_same_bits(read(tmp_path / "saved"), stored(models / "qwen2"))


def test_test_and_info(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = split(models / "qwen2", tmp_path / "split")
    merge(run, tmp_path / "merged")
    capsys.readouterr()
    found = {}
    for name, directory in {"same": tmp_path / "merged", "other": models / "mistral"}.items():
        found[name] = main(["test", "--local_dir", str(run), "--test_hf_dir", str(directory)])
        assert capsys.readouterr().out.startswith("same" if name == "same" else "DIFFERENT")
    assert found == {"same": 0, "other": 1}
    assert main(["info", "--json", "--local_dir", str(run)]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert (facts["layout"], facts["world_size"], facts["weights"]["tensors"]) == ("megatron", 2, 9)
    shape = facts["tensors"]["decoder.layers.mlp.linear_fc1.weight"]["shape"]
    assert shape == [2, 96, 32] and facts["others"]["extra_state"]["entries"] == 19


def change(folder: Path, how: Callable[[Any], None]) -> None:
    """Rewrites the index of a checkpoint."""
    index = pickle.loads((folder / INDEX).read_bytes())
    how(index)
    (folder / INDEX).write_bytes(pickle.dumps(index))


def rename(index: Any, old: str, new: str, *, copy: bool = False) -> None:
    """Gives a tensor another name, or one more."""
    index.state_dict_metadata[new] = index.state_dict_metadata[old]
    for key, place in [(key, place) for key, place in index.storage_data.items() if key.fqn == old]:
        index.storage_data[type(key)(new, key.offset)] = place
        if not copy:
            del index.storage_data[key]
    if not copy:
        del index.state_dict_metadata[old]


def iteration(run: Path) -> Path:
    """Megatron-LM and slime: folders of iterations, and no configuration."""
    shutil.move(run / "release", run / "iter_0000010")
    shutil.copytree(run / "iter_0000010", run / "iter_0000002")
    (run / "iter_0000002" / INDEX).unlink()
    shutil.rmtree(run / "huggingface")
    (run / "latest_checkpointed_iteration.txt").write_text("10")
    return run


def without_a_pointer(run: Path) -> Path:
    iteration(run)
    (run / "latest_checkpointed_iteration.txt").unlink()
    return run


def as_verl(run: Path) -> Path:
    """A step of verl's with an actor."""
    actor = run / "global_step_3" / "actor"
    actor.mkdir(parents=True)
    shutil.move(run / "release", actor / "dist_ckpt")
    shutil.move(run / "huggingface", actor / "huggingface")
    (run / "latest_checkpointed_iteration.txt").write_text("3")
    return run


def as_nemo(run: Path) -> Path:
    """NeMo 2: below `weights`, and names begin with `module.`."""
    (run / "latest_checkpointed_iteration.txt").unlink()
    folder = Path(shutil.move(run / "release", run / "weights"))

    def in_a_module(index: Any) -> None:
        for key in list(index.state_dict_metadata):
            rename(index, key, f"module.{key}")

    change(folder, in_a_module)
    return run


@pytest.mark.parametrize("lay_out", [iteration, without_a_pointer, as_verl, as_nemo])
def test_where_trainers_put_it(models: Path, tmp_path: Path, lay_out: Callable[[Path], Path]) -> None:
    run = lay_out(split(models / "qwen3", tmp_path / "run"))
    flags = [NAMES, str(models / "qwen3")] if lay_out in (iteration, without_a_pointer) else []
    assert_same_bits(merge(run, tmp_path / "merged", *flags), stored(models / "qwen3"))


def test_a_padded_vocabulary_is_cut(models: Path, tmp_path: Path) -> None:
    """The embedding has more rows than the configuration tokens."""
    run, model = split(models / "qwen3", tmp_path / "run"), stored(models / "qwen3")
    config = json.loads((run / "huggingface" / "config.json").read_text())
    (run / "huggingface" / "config.json").write_text(json.dumps({**config, "vocab_size": 17}))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        model[name] = model[name][:17].contiguous()
    assert_same_bits(merge(run, tmp_path / "merged"), model)


def test_a_value_head_is_an_output_matrix_of_one_row(models: Path, tmp_path: Path) -> None:
    run, model = split(models / "qwen3", tmp_path / "run"), stored(models / "qwen3")
    file, head, score = run / "release" / "__0_0.distcp", "output_layer.weight", torch.randn(1, 32)

    def replace_head(index: Any) -> None:
        index.state_dict_metadata[head].size = score.shape
        index.state_dict_metadata[head].chunks[0].sizes = score.shape
        place = next(place for key, place in index.storage_data.items() if key.fqn == head)
        place.relative_path, place.offset = file.name, file.stat().st_size
        with file.open("ab") as opened:
            torch.save(score, opened)
        place.length = file.stat().st_size - place.offset

    change(run / "release", replace_head)
    del model["lm_head.weight"]
    assert_same_bits(merge(run, tmp_path / "merged", "--is-value-model"), model | {SCORE: score})


def test_optimizer_states_are_skipped_and_unknown_names_listed(
    models: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    run = split(models / "qwen3", tmp_path / "run")
    norm, optimizer = "decoder.final_layernorm.weight", "optimizer.state.exp_avg."
    for prefix in (optimizer, f"chained_0.{optimizer}"):
        change(run / "release", partial(rename, old=norm, new=prefix + norm, copy=True))
    assert_same_bits(merge(run, tmp_path / "merged"), stored(models / "qwen3"))
    change(run / "release", partial(rename, old=norm, new=f"mtp.{norm}", copy=True))
    reported = refused("merge", "--local_dir", run, "--target_dir", tmp_path / "out", target=tmp_path / "out")
    assert "with unknown names (1): mtp.decoder.final_layernorm.weight [32]" in reported


def test_a_model_of_other_sizes(models: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    run, out = split(models / "qwen3", tmp_path / "run"), tmp_path / "out"
    file = run / "huggingface" / "config.json"
    config = json.loads(file.read_text())
    reported = {}
    for key, value in {"num_hidden_layers": 3, "intermediate_size": 40, "model_type": "gpt2"}.items():
        file.write_text(json.dumps({**config, key: value}))
        reported[key] = refused("merge", "--local_dir", run, "--target_dir", out, target=out)
    assert "lacks tensors of the model" in reported["num_hidden_layers"]
    assert "of another shape" in reported["intermediate_size"]
    assert "decoder.layers.mlp.linear_fc1.weight [2, 96, 32]" in reported["intermediate_size"]
    assert "model_type=gpt2: Megatron's names are known for deepseek_v2, " in reported["model_type"]
    reported["empty"] = refused("merge", NAMES, tmp_path, "--local_dir", run, "--target_dir", out, target=out)
    assert f"{NAMES}={tmp_path}: is not a Hugging Face directory" in reported["empty"]
    file.unlink()
    reported["none"] = refused("merge", "--local_dir", run, "--target_dir", out, target=out)
    assert "configuration is missing" in reported["none"] and NAMES in reported["none"]


def test_formats_that_cannot_be_read(models: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    run, out = split(models / "qwen3", tmp_path / "run"), tmp_path / "out"
    (run / "release" / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    reported = refused("merge", "--local_dir", run, "--target_dir", out, target=out)
    assert "sharded_backend=zarr: only torch_dist can be read" in reported
    (tmp_path / "old" / "iter_0000010" / "mp_rank_00").mkdir(parents=True)
    reported = refused("merge", "--local_dir", tmp_path / "old", "--target_dir", out, target=out)
    assert "one file per rank (mp_rank_*)" in reported and "--ckpt-format torch_dist" in reported


class Opens:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.file), "w")


def test_nothing_is_unpickled(models: Path, tmp_path: Path) -> None:
    run = split(models / "qwen3", tmp_path / "run")
    torch.save(Opens(tmp_path / "common"), run / "release" / "common.pt")
    assert len(load_state_dict(run)) == 25
    change(run / "release", lambda index: index.state_dict_metadata.update(evil=Opens(tmp_path / "index")))
    with pytest.raises(ConfigError, match="which no index holds; nothing was executed"):
        load_state_dict(run)
    assert not (tmp_path / "common").exists() and not (tmp_path / "index").exists()


@pytest.mark.parametrize(
    ("flags", "reported"),
    [
        (["--layout", "verl"], "--layout=verl: cannot be used with --backend megatron"),
        (["--is-value-model"], "--is-value-model: cannot be used with --backend megatron"),
        (["--backend", "fsdp", "--separate-layers"], "--separate-layers: cannot be used with"),
    ],
)
def test_flags_that_do_not_fit(
    models: Path, tmp_path: Path, refused: Callable[..., str], flags: list[str], reported: str
) -> None:
    out = tmp_path / "out"
    where = ("--hf_dir", models / "qwen3", "--target_dir", out, "--world_size", 1)
    assert reported in refused("split", "--backend", "megatron", *where, *flags, target=out)


def test_split_tells_what_it_leaves_out(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    split(models / "qwen3", tmp_path / "run")
    assert f"the model has no such tensor: {SCORE}" in capsys.readouterr().out
