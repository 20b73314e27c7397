"""A model directory, file by file: configuration, weights as the index promises them, tokenizer, lengths.

In: the models that the configuration names. Out: findings. Only the headers of weight files are read, so that a missing, cut off
or never downloaded shard is found within milliseconds instead of after minutes of loading.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydraflow.checkup.facts import CRITIC, MODEL, Facts
from hydraflow.checkup.finding import Finding, Skip, note, ok, problem, warning
from hydraflow.errors import ConfigError
from hydraflow.memory.report import size_text
from hydraflow.models.cache import cached_snapshot
from hydraflow.models.config import ModelConfig
from hydraflow.models.weight_map import INDEX, read_weight_map
from hydraflow.paths import is_hub_name

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

LFS = b"version https://git-lfs"
LARGEST_HEADER = 100 * 2**20
"""safetensors allows no larger one."""
SHOWN = 3


def check_model(facts: Facts) -> Iterator[Finding]:
    """The policy's directory, and the critic's where it has one of its own."""
    policy = facts.config.actor_rollout_ref.model
    if not policy.path:
        raise Skip(facts.nothing_yet())
    yield from _check_directory(policy, MODEL)
    if facts.config.critic.model.path and facts.plan.critic is not None:
        yield from _check_directory(facts.config.critic.model, CRITIC)


def _check_directory(model: ModelConfig, field: str) -> Iterator[Finding]:
    assert model.path is not None
    hub = is_hub_name(model.path)
    directory = cached_snapshot(model.path) if hub else Path(model.path).expanduser()
    if directory is None:
        yield to_download(f"{field}.path={model.path} is not on this machine", model.path, offline=_is_offline())
        return
    if not (directory / "config.json").is_file():
        yield problem(f"{field}.path={model.path}: there is no config.json in it", f"{field}.path=<Hugging Face directory>")
        return
    faults = weight_faults(directory)
    for fault in faults[:SHOWN]:
        evidence = f"{field}.path: {fault}"
        yield to_download(evidence, model.path, offline=_is_offline()) if hub else problem(evidence, "download the model again, all of it")
    if not faults:
        files = weight_files(directory)
        size = size_text(sum(file.stat().st_size for file in files))
        yield ok(f"{directory}: {len(files)} weight files, {size}, {', '.join(stored_types(files))}")


def to_download(evidence: str, name: str, *, offline: bool) -> Finding:
    """What is missing of a model on the hub: it comes at the start of the run, unless Hugging Face is told to stay offline."""
    if offline:
        return problem(f"{evidence}, and HF_HUB_OFFLINE is set", f"unset HF_HUB_OFFLINE; hf download {name}")
    return note(f"{evidence}; it will be downloaded at the start", f"hf download {name}")


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def weight_files(directory: Path) -> list[Path]:
    """The files with weights, safetensors before pickles."""
    return sorted(directory.glob("*.safetensors")) or sorted(directory.glob("*.bin"))


def weight_faults(directory: Path) -> list[str]:
    """What keeps the weights from being loaded; empty when nothing is known to."""
    files = weight_files(directory)
    index = directory / INDEX
    if not files:
        return [f"{directory} has no weights (*.safetensors or *.bin)"]
    if not index.is_file():
        return [fault for file in files if (fault := file_fault(file))]
    try:
        places = read_weight_map(index)
    except ConfigError as error:
        return [f"{index} {error.problems[0].rule}"]
    promised = sorted(set(places.values()))
    absent = [name for name in promised if not (directory / name).is_file()]
    if absent:
        lost = sum(shard in absent for shard in places.values())
        return [
            f"{len(absent)} of {len(promised)} weight files are missing ({', '.join(absent[:SHOWN])}), with {lost} of {len(places)} weights"
        ]
    return [fault for name in promised if (fault := file_fault(directory / name, {key for key, shard in places.items() if shard == name}))]


def file_fault(file: Path, names: Collection[str] = ()) -> str | None:
    """What is wrong with a weight file that must hold `names`; None: nothing, as far as its header says."""
    with file.open("rb") as opened:
        if opened.read(len(LFS)) == LFS:
            return f"{file.name} is a Git LFS pointer, not the file itself (git lfs pull)"
    if file.suffix != ".safetensors":
        return None if file.stat().st_size else f"{file.name} is empty"
    header = read_header(file)
    if header is None:
        return f"{file.name} has no safetensors header: it is broken"
    described, start = header
    end = start + max((entry["data_offsets"][1] for entry in described.values()), default=0)
    if file.stat().st_size < end:
        return f"{file.name} is cut off: it has {file.stat().st_size} bytes of {end}"
    lost = sorted(set(names) - set(described))
    return f"{file.name} lacks {len(lost)} weights that the index promises, the first {lost[0]}" if lost else None


def read_header(file: Path) -> tuple[dict[str, Any], int] | None:
    """What a safetensors file says about each tensor, and the byte at which their data begins; None: it is no such file."""
    with file.open("rb") as opened:
        start = opened.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else LARGEST_HEADER + 1
        if size > LARGEST_HEADER:
            return None
        try:
            described = json.loads(opened.read(size))
        except (ValueError, RecursionError):
            return None
    if not isinstance(described, dict):
        return None
    described.pop("__metadata__", None)
    return described, 8 + size


def stored_types(files: list[Path]) -> list[str]:
    """Types of the tensors in safetensors files, as their first file names them."""
    header = read_header(files[0]) if files[0].suffix == ".safetensors" else None
    return sorted({entry["dtype"] for entry in header[0].values()}) if header else ["pickled"]


def check_model_fits(facts: Facts) -> Iterator[Finding]:
    """Tokenizer and model agree on the vocabulary; rows fit the model's positions."""
    data, config = facts.config.data, facts.model_config
    yield judge_vocabulary(facts.tokenizer, config)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None:
        yield judge_positions(data.max_prompt_length, data.max_response_length, positions)


def judge_vocabulary(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> Finding:
    """A token beyond the model's table would end the run with an index error."""
    model, known = config.get_text_config().vocab_size, len(tokenizer)
    if known > model:
        evidence = f"the tokenizer has {known} tokens, the model {model}: the last {known - model} would be out of range"
        return problem(evidence, f"{MODEL}.tokenizer_path=<the model's own tokenizer>")
    return ok(f"the tokenizer has {known} tokens, the model {model}")


def judge_positions(prompt: int, response: int, positions: int) -> Finding:
    """Limits of prompt and response, in tokens, against the model's positions."""
    if response >= positions:
        evidence = f"data.max_response_length={response} leaves no room for a prompt in the model's {positions} positions"
        return problem(evidence, f"data.max_response_length={positions // 2}")
    if prompt + response > positions:
        evidence = f"a row of {prompt} + {response} tokens would pass the model's {positions} positions"
        return warning(evidence, f"data.max_prompt_length={positions - response} or data.max_response_length={max(1, positions - prompt)}")
    return ok(f"rows of {prompt} + {response} tokens in {positions} positions")
