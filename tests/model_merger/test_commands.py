"""The command line, the peak of memory, uploads, checksums, and checkpoints of `split` in the training
engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from engine.rank_jobs import full_weights, make_engine
from model_merger.directories import assert_same_bits, merge, read
from transformers import AutoModelForCausalLM, Qwen2Config

from hydraflow.model_merger import arguments, families
from hydraflow.model_merger.__main__ import main
from hydraflow.model_merger.safetensors_files import TensorSpec, Writer

FLAGS = [
    "local_dir",
    "target_dir",
    "hf_upload_path",
    "is_value_model",
    "tie_word_embedding",
    "trust_remote_code",
    "max_shard_size",
]


@pytest.mark.parametrize(
    "spelling",
    [lambda name: f"--{name}", lambda name: f"--{name.replace('_', '-')}"],
    ids=["underscore", "dash"],
)
def test_both_spellings(spelling: Any) -> None:
    values = {
        "local_dir": ["a"],
        "target_dir": ["b"],
        "hf_upload_path": ["me/model"],
        "max_shard_size": ["2MB"],
    }
    line = [word for name in FLAGS for word in (spelling(name), *values.get(name, []))]
    args = arguments.parser().parse_args(
        ["merge", "--backend", "fsdp", "--dtype", "bf16", "--private", *line]
    )
    assert (args.local_dir, args.target_dir, args.hf_upload_path, args.max_shard_size) == (
        "a",
        "b",
        "me/model",
        2_000_000,
    )
    assert args.is_value_model and args.tie_word_embedding and args.trust_remote_code and args.private


STARTS = """
import os, sys
process = os.spawnv(os.P_NOWAIT, sys.argv[1], sys.argv[1:])
_, status, used = os.wait4(process, 0)
print(os.waitstatus_to_exitcode(status), used.ru_maxrss)
"""


def measured(command: list[str]) -> tuple[int, float]:
    """Exit code and peak resident megabytes of a process. Another one starts it, because its peak is at least
    what the process that starts it has held."""
    words = [sys.executable, "-c", STARTS, *command]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, cwd=Path(__file__).parents[2], env=environ, stdout=subprocess.PIPE, text=True, check=True
    )
    code, peak = done.stdout.splitlines()[-1].split()
    return int(code), int(peak) / 1000


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 0.39 GB whose largest tensor has 34 MB. In tensor i, row r holds r + i."""
    folder = tmp_path_factory.mktemp("large")
    sizes = dict(
        vocab_size=8192, hidden_size=1024, intermediate_size=5120, num_hidden_layers=4, num_attention_heads=8
    )
    config = Qwen2Config(
        **sizes,
        num_key_value_heads=8,
        tie_word_embeddings=False,
        dtype="float32",
        architectures=["Qwen2ForCausalLM"],
    )
    config.save_pretrained(folder)
    specs = {
        name: TensorSpec(torch.float32, shape) for name, shape in families.tensors(config.to_dict(), "policy")
    }
    writer = Writer(folder, specs, most_bytes=10**10)
    for i, (name, spec) in enumerate(specs.items()):
        writer.write(name, _filled(spec, i))
    writer.finish()
    assert (
        sum(spec.nbytes for spec in specs.values()) > 380e6
        and max(spec.nbytes for spec in specs.values()) < 34e6
    )
    return folder


@pytest.fixture(scope="module")
def base() -> float:
    """Peak megabytes of a process that has only imported torch."""
    return measured([sys.executable, "-c", "import torch"])[1]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["hydraflow", "verl"])
def test_memory_does_not_grow_with_the_model(large: Path, base: float, tmp_path: Path, layout: str) -> None:
    """Promised: at most the largest tensor and 300 MB above a process that has only imported torch. A few
    blocks of 8 MB in fact."""
    checkpoint, target = str(tmp_path / "split"), str(tmp_path / "merged")
    assert (
        main(
            [
                "split",
                "--hf_dir",
                str(large),
                "--target_dir",
                checkpoint,
                "--world_size",
                "2",
                "--layout",
                layout,
            ]
        )
        == 0
    )
    merge_it = ["merge", "--local_dir", checkpoint, "--target_dir", target, "--dtype", "bf16"]
    code, peak = measured([sys.executable, "-m", "hydraflow.model_merger", *merge_it])
    assert code == 0
    assert peak - base < 120
    assert main(["test", "--local_dir", checkpoint, "--test_hf_dir", target]) == 0
    merged = read(target)["model.layers.3.mlp.up_proj.weight"]  # tensor 1 + 3 * 12 + 8
    assert torch.equal(merged[:, 7], (torch.arange(5120.0) + 45).bfloat16())
    shutil.rmtree(tmp_path)


def _filled(spec: TensorSpec, number: int) -> Iterator[torch.Tensor]:
    """Row r holds r + number."""
    for row in range(0, spec.shape[0], 512):
        rows = torch.arange(row, min(row + 512, spec.shape[0]), dtype=torch.float32) + number
        yield rows.view(-1, *[1] * (len(spec.shape) - 1)).expand(-1, *spec.shape[1:]).contiguous()


def test_small_files_are_read_by_transformers(tiny: str, tmp_path: Path) -> None:
    main(["split", "--hf_dir", tiny, "--target_dir", str(tmp_path / "split"), "--world_size", "2"])
    merge(tmp_path / "split", tmp_path / "merged", "--max-shard-size", "20KB")
    assert len(list((tmp_path / "merged").glob("model-*-of-*.safetensors"))) > 4
    read_back = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert_same_bits(read_back, AutoModelForCausalLM.from_pretrained(tiny).state_dict())


class Hub:
    """Stands for the hub; remembers calls."""

    calls: list[tuple[str, dict[str, Any]]] = []

    def create_repo(self, **options: Any) -> None:
        if options["repo_id"] == "no/network":
            # The error is one of the HTTP library.
            raise huggingface_hub.errors.HfHubHTTPError.__bases__[0]("Connection refused")
        if options["repo_id"] == "not/mine":
            raise huggingface_hub.errors.LocalTokenNotFoundError("Token is required")
        self.calls.append(("create", options))

    def upload_folder(self, *, folder_path: str, **options: Any) -> None:
        if options["repo_id"] == "me/gone":
            raise OSError("no route to host")
        self.calls.append(
            ("upload", {**options, "files": sorted(file.name for file in Path(folder_path).iterdir())})
        )


def test_uploads(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    main(["split", "--hf_dir", tiny, "--target_dir", str(tmp_path / "split"), "--world_size", "1"])
    merge(tmp_path / "split", tmp_path / "merged", "--hf_upload_path", "me/model", "--private")
    (_, created), (_, sent) = Hub.calls
    assert created == {"repo_id": "me/model", "private": True, "exist_ok": True}
    assert sent["repo_id"] == "me/model" and {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    } <= set(sent["files"])
    command = [
        "merge",
        "--local_dir",
        str(tmp_path / "split"),
        "--target_dir",
        str(tmp_path / "other"),
        "--hf-upload-path",
    ]
    assert main([*command, "not/mine"]) == main([*command, "no/network"]) == 3
    assert "the hub refuses it: Connection refused" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    assert main([*command, "me/gone"]) == 3
    assert "hf upload me/gone" in capsys.readouterr().err and (tmp_path / "other" / "config.json").is_file()


def test_checksums(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    actor = tmp_path / "global_step_5" / "actor"
    actor.parent.mkdir()
    main(["split", "--hf_dir", tiny, "--target_dir", str(actor), "--world_size", "2"])
    assert main(["info", "--local_dir", str(actor), "--verify"]) == 2
    files = {f"actor/{file.relative_to(actor)}": file for file in actor.rglob("*") if file.is_file()}
    facts = {
        name: {"bytes": file.stat().st_size, "crc32": f"{zlib.crc32(file.read_bytes()):08x}"}
        for name, file in files.items()
    }
    (actor.parent / "manifest.json").write_text(json.dumps({"format": 1, "step": 5, "files": facts}))
    assert main(["info", "--local_dir", str(actor.parent), "--verify"]) == 0
    shard = files["actor/dcp/__1_0.distcp"]
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1
    shard.write_bytes(content)
    assert main(["info", "--local_dir", str(actor.parent)]) == 0
    capsys.readouterr()
    assert main(["info", "--local_dir", str(actor.parent), "--verify"]) == 1
    assert "actor/dcp/__1_0.distcp has changed" in capsys.readouterr().out
    files["actor/huggingface/tokenizer.json"].unlink()
    assert main(["info", "--local_dir", str(actor.parent)]) == 1
    assert "tokenizer.json: is missing; the manifest names it" in capsys.readouterr().out


@pytest.mark.parametrize("head", ["policy", "value"])
def test_the_engine_loads_what_split_makes(
    models: dict[str, str], one_rank: None, tmp_path: Path, head: str
) -> None:
    source = models["value" if head == "value" else "tied"]
    flags = ["--is_value_model"] if head == "value" else []
    main(["split", "--hf_dir", source, "--target_dir", str(tmp_path / "split"), "--world_size", "3", *flags])
    engine = make_engine(
        models["untied"], {"head": head, "model": {"override_config": {"tie_word_embeddings": True}}}
    )
    assert not torch.equal(full_weights(engine)["model.norm.weight"], read(source)["model.norm.weight"])
    engine.load(tmp_path / "split", ["model"])
    assert_same_bits(full_weights(engine), read(source))
