"""The command line: four commands, every flag in both spellings (`--local_dir`, `--local-dir`).

In: arguments. Out: a namespace. Left out on purpose: whether flags fit together (the commands check that).
"""

from __future__ import annotations

import argparse
import re
from os.path import expanduser
from typing import Any

BACKENDS = ("auto", "fsdp", "megatron")
_TRUST = "run Python code that comes with the model"


def parser() -> argparse.ArgumentParser:
    """The parser of `python -m hydraflow.model_merger`."""
    top = argparse.ArgumentParser(
        "python -m hydraflow.model_merger",
        description="Sharded checkpoints to Hugging Face directories and back.",
    )
    commands = top.add_subparsers(dest="command", required=True)
    _add_merge(commands)
    _add_test(commands)
    _add_info(commands)
    _add_split(commands)
    return top


def _add_merge(commands: Any) -> None:
    merge = _command(commands, "merge", "convert a checkpoint to a Hugging Face directory")
    _checkpoint(merge)
    _path(merge, "target_dir", required=True, metavar="OUT", help="the directory to create")
    _merge_options(merge)
    adapters = "add adapters to the weights, or write OUT/lora_adapter for peft"
    _flag(merge, "lora", choices=("merged", "adapter"), default="merged", help=adapters)
    largest = "maximum size of one safetensors file (5GB)"
    _flag(merge, "max_shard_size", type=size, default="5GB", help=largest)
    _switch(merge, "overwrite", "replace an existing OUT, once the new one is complete")
    upload = "upload the result to this repository of the Hugging Face hub"
    _flag(merge, "hf_upload_path", metavar="REPO", help=upload)
    _switch(merge, "private", "make that repository private")


def _add_test(commands: Any) -> None:
    what = "compare a checkpoint with a Hugging Face directory, bit by bit; exit code 1 when they differ"
    test = _command(commands, "test", what)
    _checkpoint(test)
    _path(test, "test_hf_dir", required=True, metavar="DIR", help="the directory to compare with")
    _merge_options(test)


def _add_info(commands: Any) -> None:
    info = _command(commands, "info", "show what a checkpoint holds; exit code 1 when parts are missing")
    _checkpoint(info)
    _switch(info, "verify", "read every file and compare it with the checksums of the step's manifest")
    _switch(info, "json", "as JSON")


def _add_split(commands: Any) -> None:
    split = _command(commands, "split", "convert a Hugging Face directory to a checkpoint")
    _path(split, "hf_dir", required=True, metavar="DIR", help="the directory to split")
    target = "the checkpoint to create: a model's directory, such as .../actor"
    _path(split, "target_dir", required=True, metavar="CKPT", help=target)
    _flag(split, "world_size", type=int, required=True, help="number of ranks, each with its own file")
    writer = "format: an FSDP engine's, or Megatron-Core's own"
    _flag(split, "backend", choices=BACKENDS[1:], default="fsdp", help=writer)
    _flag(split, "layout", choices=("hydraflow", "verl"), help="layout of an fsdp checkpoint (hydraflow)")
    layers = "with megatron: one tensor per layer (non_homogeneous_layers) instead of one for all layers"
    _switch(split, "separate_layers", layers)
    _dtype(split, "config.json's")
    value = "a value model: no output matrix, a score that starts at zero if DIR has none"
    _switch(split, "is_value_model", value)
    _switch(split, "trust_remote_code", _TRUST)
    _switch(split, "overwrite", "replace an existing CKPT, once the new one is complete")


def size(text: str) -> int:
    """Bytes of a size.

    >>> size("5GB"), size("1.5 MiB"), size("200")
    (5000000000, 1572864, 200)
    """
    units = {"": 1, "B": 1}
    for power, letter in enumerate("KMGT", 1):
        units |= {f"{letter}B": 1000**power, f"{letter}IB": 1024**power}
    found = re.fullmatch(r"([0-9.]+)\s*([A-Za-z]*)", text.strip())
    if not found or found[2].upper() not in units:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; 5GB or 500MB would be")
    return int(float(found[1]) * units[found[2].upper()])


def _command(commands: Any, name: str, what: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=what, description=what, allow_abbrev=False)


def _checkpoint(command: argparse.ArgumentParser) -> None:
    writer = "writer of the checkpoint; auto detects it"
    _flag(command, "backend", choices=BACKENDS, default="auto", help=writer)
    where = "a model's directory (.../global_step_N/actor, iter_N); for a step or run, its actor is used"
    _path(command, "local_dir", required=True, metavar="CKPT", help=where)
    settings = "Hugging Face directory of the model that was trained, if CKPT has no huggingface/"
    _path(command, "hf_model_path", metavar="DIR", help=settings)


def _merge_options(command: argparse.ArgumentParser) -> None:
    _flag(command, "lora_alpha", type=float, help="lora_alpha of checkpoints that do not record it")
    _dtype(command, "as they are")
    _switch(command, "is_value_model", "require a value head (detected by default)")
    _switch(command, "tie_word_embedding", "the output matrix is the embedding, whatever config.json says")
    _switch(command, "trust_remote_code", _TRUST)


def _dtype(command: argparse.ArgumentParser, auto: str) -> None:
    types = ("auto", "fp32", "bf16", "fp16")
    _flag(command, "dtype", choices=types, default="auto", help=f"of the weights; auto: {auto}")


def _path(command: argparse.ArgumentParser, name: str, **options: Any) -> None:
    # a shell does not expand the ~ of --flag=~/x
    _flag(command, name, type=expanduser, **options)


def _switch(command: argparse.ArgumentParser, name: str, what: str) -> None:
    _flag(command, name, action="store_true", help=what)


def _flag(command: argparse.ArgumentParser, name: str, **options: Any) -> None:
    spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
    command.add_argument(*spellings, dest=name, **options)
