"""`info`: what a checkpoint holds, without reading its weights unless checksums are to be verified.

In: a model's directory, a step's or a run's. Out: facts as JSON, or as lines for a person.
"""

from __future__ import annotations

import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from hydraflow.engine.stored.checkpoint import Checkpoint, read_json
from hydraflow.engine.stored.pieces import StoredTensor
from hydraflow.errors import ConfigError
from hydraflow.model_merger.opening import model_directories, open_checkpoint

MANIFEST = "manifest.json"
_bytes = partial(decimal, precision=2)


def facts_of(
    local_dir: str, *, backend: str, hf_model_path: str | None, verify: bool
) -> list[dict[str, Any]]:
    """One object for each model. `verify`: read every file of the step and compare its checksum with the
    manifest's. Raises ConfigError when there is no checkpoint, or no manifest to verify it against."""
    directories = model_directories(Path(local_dir))
    found = [_facts(open_checkpoint(directory, backend, hf_model_path)) for directory in directories]
    if verify and (damage := _damage(directories)):
        found[0]["problems"].append(damage)
    return found


def lines(facts: dict[str, Any]) -> list[str]:
    """A model's facts for a person; layers that look alike are one line."""
    total, details, others = facts["weights"], facts["details"].items(), facts["others"].items()
    sizes = f"{total['tensors']} tensors, {total['numbers']:,} numbers, {_bytes(total['bytes'])}"
    shown = {
        "layout": facts["layout"],
        "step": "unknown" if facts["step"] is None else facts["step"],
        "world size": facts["world_size"],
        **{name: fact if isinstance(fact, str) else json.dumps(fact) for name, fact in details},
        "weights": f"{sizes}, {', '.join(total['dtypes'])}",
        **{part: f"{one['entries']} entries, {_bytes(one['bytes'])}" for part, one in others},
        "huggingface": ", ".join(facts["huggingface"]) or "nothing",
        "missing parts": "none" if not facts["problems"] else f"{len(facts['problems'])}",
    }
    width = max(map(len, shown))
    lines = [facts["directory"], *(f"  {name:<{width}}  {value}" for name, value in shown.items())]
    lines += [f"    {problem}" for problem in facts["problems"]]
    return [*lines, *_tensor_lines(facts["tensors"])]


def _facts(found: Checkpoint) -> dict[str, Any]:
    tensors = list(found.tensors.values())
    problems = [str(problem) for problem in found.problems]
    problems += _missing_from_manifest(found.directory)
    if not (found.huggingface / "config.json").is_file():
        remedy = "--hf_model_path <Hugging Face directory>, to merge it anyway"
        problems.append(f"{found.huggingface / 'config.json'}: is missing -> {remedy}")
    return {
        "directory": str(found.directory),
        "layout": found.layout,
        "step": found.step,
        "world_size": found.world_size,
        "details": {**({"head": found.head} if found.head else {}), **found.details},
        "weights": {
            "tensors": len(tensors),
            "numbers": sum(math.prod(tensor.shape) for tensor in tensors),
            "bytes": sum(tensor.nbytes for tensor in tensors),
            "dtypes": sorted({_dtype(tensor) for tensor in tensors}),
        },
        "others": {
            part: {"entries": entries, "bytes": size} for part, (entries, size) in found.others.items()
        },
        "huggingface": sorted(file.name for file in found.huggingface.glob("*")),
        "problems": problems,
        "tensors": {
            name: {"dtype": _dtype(t), "shape": list(t.shape), "bytes": t.nbytes}
            for name, t in found.tensors.items()
        },
    }


def _damage(directories: list[Path]) -> str:
    """What is wrong with the files of the step, by their checksums; empty when nothing is."""
    from hydraflow.trainer.checkpoint_store import damage

    step = directories[0].parent
    if not (step / MANIFEST).is_file():
        rule = f"there is no {MANIFEST} in {step.absolute()}"
        raise ConfigError.one("--verify", None, rule, "info without --verify")
    found = damage(step, [directory.name for directory in directories])
    return f"{step}: {found}" if found else ""


def _missing_from_manifest(directory: Path) -> list[str]:
    """Files of this model that the step's manifest names, but that are missing or of another size."""
    step = directory.parent
    problems = []
    files = read_json(step / MANIFEST).get("files")
    for name, entry in files.items() if isinstance(files, dict) else ():
        file = step / name
        if not name.startswith(f"{directory.name}/"):
            continue
        if not file.is_file():
            problems.append(f"{file}: is missing; the manifest names it")
        elif isinstance(entry, dict) and file.stat().st_size != entry.get("bytes", file.stat().st_size):
            problems.append(f"{file}: {file.stat().st_size} bytes; the manifest says {entry['bytes']}")
    return problems


def _tensor_lines(tensors: dict[str, dict[str, Any]]) -> list[str]:
    """Tensors of equal dtype and shape whose names differ only in numbers share a line."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for name, entry in tensors.items():
        key = (re.sub(r"(?<=\.)\d+(?=\.)", "*", name), str(entry["shape"]), entry["dtype"])
        alike.setdefault(key, []).append(name)
    rows = []
    for (pattern, shape, dtype), names in alike.items():
        size = _bytes(sum(tensors[name]["bytes"] for name in names))
        label, count = (pattern, f"x {len(names)}") if len(names) > 1 else (names[0], "")
        rows.append((label, shape, dtype, count, size))
    widths = [max(map(len, column)) for column in zip(*rows)]
    cells = ((f"{cell:<{width}}" for cell, width in zip(row, widths)) for row in rows)
    return [f"    {'  '.join(row)}".rstrip() for row in cells]


def _dtype(tensor: StoredTensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
