"""`merge`: a checkpoint becomes a Hugging Face directory, one block of one tensor at a time.

In: a checkpoint and a `MergeOptions`. Out: the directory, whole or not at all; with `--lora adapter` also
`lora_adapter/` in it. Left out on purpose: what the tensors are (`outputs.py`), how files look
(`safetensors_files.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hydraflow.errors import EnvironmentFault, first_line
from hydraflow.model_merger import lora, target
from hydraflow.model_merger.opening import open_checkpoint
from hydraflow.model_merger.outputs import MergeOptions, Outputs, cast, outputs_of
from hydraflow.model_merger.progress import Advance, bar
from hydraflow.model_merger.safetensors_files import TensorSpec, Writer

ADAPTER = "lora_adapter"
"""Folder of exported adapters inside the target."""


def merge(
    local_dir: str,
    target_dir: str,
    *,
    backend: str,
    hf_model_path: str | None,
    merge_options: MergeOptions,
    most_bytes: int,
    overwrite: bool,
    upload_to: str | None,
    private: bool,
) -> list[str]:
    """Merges, and returns lines for the user. `most_bytes`: largest size of one safetensors file.
    `upload_to`: a repository of the hub, made `private` if it is new. `hf_model_path`: a directory with
    configuration and tokenizer, if the checkpoint has none. Raises ConfigError before anything is written,
    EnvironmentFault when the disk fills up or the hub refuses."""
    outputs = outputs_of(open_checkpoint(local_dir, backend, hf_model_path), merge_options)
    specs = outputs.specs
    nbytes = sum(spec.nbytes for spec in specs.values())
    source, where = outputs.checkpoint.huggingface, Path(target_dir)
    settings = target.settings(source)
    target.require_inside(settings, source.absolute().parent)
    if upload_to is not None:  # first, so that missing permissions are found before the merge
        with _hub(f"--hf_upload_path={upload_to}: the hub refuses it") as hub:
            hub.create_repo(repo_id=upload_to, private=private, exist_ok=True)
    with target.unfinished(where, source, nbytes=nbytes, overwrite=overwrite) as folder:
        writer = Writer(folder, specs, most_bytes=most_bytes)
        with bar("merging", nbytes) as advance:
            for name, blocks in outputs.tensors():
                writer.write(name, _counted(blocks, advance))
        writer.finish()
        if merge_options.lora == "adapter":
            _export_adapter(outputs, folder / ADAPTER, target_dir)
        target.copy_settings(settings, folder)
        target.write_config(source, folder, outputs.architecture, outputs.main_dtype)
    dtype = str(outputs.main_dtype).removeprefix("torch.")
    lines = [f"{where.absolute()}: {len(specs)} tensors, {nbytes / 1e9:.3f} GB, {dtype}"]
    lines += [f"  {note}" for note in outputs.notes]
    if upload_to is not None:
        with _hub(f"{where} is merged, but the upload failed", f"hf upload {upload_to} {where}") as hub:
            hub.upload_folder(folder_path=str(where), repo_id=upload_to, repo_type="model")
        lines.append(f"uploaded to {upload_to}")
    return lines


def _export_adapter(outputs: Outputs, folder: Path, base: str) -> None:
    """Writes adapters in peft's format. `base`: where their base weights will be."""
    folder.mkdir()
    found = lora.peft_names(weight.adapter for weight in outputs.adapted.values())
    specs = {name: TensorSpec(outputs.final_dtype(m.dtype), m.shape) for name, m in found.items()}
    nbytes = sum(spec.nbytes for spec in specs.values())
    writer = Writer(folder, specs, most_bytes=nbytes, single="adapter_model.safetensors")
    for name, tensor in found.items():
        writer.write(name, (cast(block, specs[name].dtype, name) for block in tensor.blocks()))
    writer.finish()
    assert outputs.lora_alpha is not None
    adapted, names, head = outputs.adapted.values(), outputs.sources.keys(), outputs.architecture.head
    config = lora.peft_config(adapted, names, alpha=outputs.lora_alpha, head=head)
    config["base_model_name_or_path"] = str(Path(base).absolute())
    target.write_json(folder / "adapter_config.json", config)


def _counted(blocks: Iterator[torch.Tensor], advance: Advance) -> Iterator[torch.Tensor]:
    for block in blocks:
        yield block
        advance(block.numel() * block.element_size())


@contextmanager
def _hub(failure: str, remedy: str = "") -> Iterator[Any]:
    """The hub's client. Raises EnvironmentFault for its errors: ValueError, and the bases of its HTTP error,
    which are OSError and that of the HTTP library."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    errors: tuple[type[Exception], ...] = *HfHubHTTPError.__bases__, ValueError
    try:
        yield HfApi()
    except errors as error:
        text = f"{failure}: {first_line(error)}"
        raise EnvironmentFault(f"{text}\n      -> {remedy}" if remedy else text) from error
