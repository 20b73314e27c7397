"""Measures time and peak memory of `model_merger merge`, against verl's merger on the same checkpoint.

    python scripts/bench/merger.py [--sizes 0.5b 1.5b] [--layouts verl hydraflow megatron] [--repeats 3]
        [--verl VENV/bin/python] [--folder DIR]

Creates models with random bf16 weights in Qwen2's shapes, splits them over 4 ranks with `split`, merges, and
compares the result with the model bit by bit. Prints one JSON object. `ratio_*` are verl's figures divided by
ours; on a busy machine, CPU time says more than the clock. With --verl, verl merges the same checkpoint here;
without it, its figures are those of verl 0.9.1 on another machine with 2 cores. Megatron-Core checkpoints are
compared with Megatron-Core's own `dist_checkpointing.load` in one process and transformers' `save_pretrained`
instead. `above_torch_mb` is the peak above that of a process that only imports torch.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RANKS = 4
SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": dict(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
    ),
    "1.5b": dict(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
    ),
}


@dataclass(frozen=True)
class Figures:
    """Cost of one merge; over several runs, the least time and the highest peak."""

    seconds: float
    cpu_seconds: float
    peak_mb: float


VERL = {"0.5b": Figures(12.7, 11.1, 2150), "1.5b": Figures(44.4, 23.6, 5070)}
"""Measured with verl 0.9.1 on 4 bf16 shards."""


def make_model(size: str, directory: str) -> None:
    """Writes a model with random weights and a small tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from hydraflow.model_merger.target import copy_settings, settings
    from hydraflow.models.tiny import make_model as make_tiny

    config = Qwen2Config(vocab_size=151936, tie_word_embeddings=True, dtype="bfloat16", **SHAPES[size])
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    Qwen2ForCausalLM(config).save_pretrained(directory)
    with tempfile.TemporaryDirectory() as other:
        tiny = Path(make_tiny(Path(other) / "tiny", hidden=32, layers=1, heads=2, kv_heads=1))
        for name in ("config.json", "generation_config.json"):
            (tiny / name).unlink(missing_ok=True)
        copy_settings(settings(tiny), Path(directory))


def run(command: list[str]) -> Figures:
    """Runs a command and measures it; SystemExit with its stderr if it fails."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)  # unlike Popen.wait, reports the resources used
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{errors.decode()}")
    return Figures(time.perf_counter() - begin, used.ru_utime + used.ru_stime, used.ru_maxrss / 1000)


def fastest(command: list[str], target: Path, repeats: int) -> Figures:
    """Figures over several runs, each with a fresh target."""
    found = []
    for _ in range(repeats):
        shutil.rmtree(target, ignore_errors=True)
        found.append(run(command))
    return Figures(
        min(f.seconds for f in found), min(f.cpu_seconds for f in found), max(f.peak_mb for f in found)
    )


def merger(*arguments: object) -> list[str]:
    """Command line of hydraflow's merger."""
    return [sys.executable, "-m", "hydraflow.model_merger", *map(str, arguments)]


def bench(size: str, layout: str, folder: Path, repeats: int, verl: str | None) -> dict[str, Any]:
    """Figures of one model in one layout."""
    model, checkpoint, target = folder / size, folder / f"{size}-{layout}", folder / "merged"
    if not model.exists():
        child = multiprocessing.get_context("spawn").Process(target=make_model, args=(size, str(model)))
        child.start()
        child.join()
    kind = ("--backend", layout) if layout == "megatron" else ("--layout", layout)
    run(merger("split", "--hf_dir", model, "--target_dir", checkpoint, "--world_size", RANKS, *kind))
    ours = fastest(merger("merge", "--local_dir", checkpoint, "--target_dir", target), target, repeats)
    run(merger("test", "--local_dir", checkpoint, "--test_hf_dir", model))
    run([sys.executable, "-c", _SAME, str(model), str(target)])
    theirs = VERL[size]
    if verl is not None and layout == "verl":
        command = [
            verl,
            "-m",
            "verl.model_merger",
            "merge",
            "--backend",
            "fsdp",
            "--local_dir",
            str(checkpoint),
            "--target_dir",
            str(target),
        ]
        theirs = fastest(command, target, repeats)
    if layout == "megatron":
        theirs = fastest(
            [sys.executable, "-c", WITH_MEGATRON_CORE, str(checkpoint), str(target)], target, repeats
        )
        run([sys.executable, "-c", _SAME, str(model), str(target)])
    base = run([sys.executable, "-c", "import torch"])
    shutil.rmtree(checkpoint)
    shutil.rmtree(target)
    return {
        "size": size,
        "layout": layout,
        **asdict(ours),
        "above_torch_mb": round(ours.peak_mb - base.peak_mb, 1),
        "megatron_core" if layout == "megatron" else "verl": asdict(theirs),
        "ratio_time": round(theirs.seconds / ours.seconds, 2),
        "ratio_cpu": round(theirs.cpu_seconds / ours.cpu_seconds, 2),
        "ratio_memory": round(theirs.peak_mb / ours.peak_mb, 2),
    }


_SAME = """
import glob, sys, torch
from safetensors import safe_open
def read(folder):
    files = [safe_open(f, "pt") for f in glob.glob(folder + "/*.safetensors")]
    return {k: f.get_tensor(k) for f in files for k in f.keys()}
a, b = read(sys.argv[1]), read(sys.argv[2])
assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a), "the merged model differs"
"""


WITH_MEGATRON_CORE = """
import sys, torch
import hydraflow.engine.megatron
from megatron.core import dist_checkpointing
from transformers import AutoConfig, AutoModelForCausalLM
from hydraflow.engine.megatron.names import Names
from hydraflow.engine.megatron.saved_names import LAYERS, keys_of, parameters
from hydraflow.model_merger.sizes import sizes_of
from pathlib import Path
checkpoint, target = map(Path, sys.argv[1:])
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
folder, shape = str(checkpoint / "release"), sizes_of(checkpoint / "huggingface")
saved = dist_checkpointing.load(dist_checkpointing.load_tensors_metadata(folder), folder)
state, names = {}, Names(shape, 0, 1)
for name in parameters(shape):
    layer, _, place = name.removeprefix(LAYERS).partition(".")
    if name.startswith(LAYERS):
        tensor = saved[LAYERS + keys_of(place, latent=False, experts=False)[0]][int(layer)]
    else:
        tensor = saved[name]
    holding = names.holding(name)
    state |= {part.name: piece for part, piece in zip(holding.parts, holding.cut(tensor))}
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint / "huggingface"))
model.load_state_dict(state, strict=False, assign=True)
model.tie_weights()
model.save_pretrained(target)
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), default=["0.5b"])
    layouts = ["verl", "hydraflow", "megatron"]
    parser.add_argument("--layouts", nargs="+", choices=layouts, default=layouts)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--verl", help="a Python that has verl")
    parser.add_argument(
        "--folder", type=Path, help="parent of the temporary folder for models and checkpoints"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rows = [
            bench(size, layout, Path(folder), args.repeats, args.verl)
            for size in args.sizes
            for layout in args.layouts
        ]
    print(
        json.dumps(
            {"load": os.getloadavg()[0], "cores": len(os.sched_getaffinity(0)), "merges": rows}, indent=2
        )
    )


if __name__ == "__main__":
    main()
