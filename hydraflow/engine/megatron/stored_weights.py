"""Fills a rank's part of a model from a checkpoint that Megatron-Core wrote, with any parallel sizes.

In: a checkpoint's folder and the sizes of the model. Out: its tensors under Hugging Face's names. Each rank
reads the rows that it holds, one parameter at a time, so host memory never holds more than one. Of a tensor
that is divided by columns, a rank reads all rows, a block at a time, and keeps its columns: reading only
those would take a system call per row. Left out on purpose: optimizer states; the configuration and the
tokenizer, which come from `model.path`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from hydraflow.engine.megatron.architecture import Architecture
from hydraflow.engine.megatron.names import EMBEDDING, HEAD, SCORE, Names, Part
from hydraflow.engine.megatron.saved_names import hugging_face
from hydraflow.engine.stored import megatron
from hydraflow.engine.stored.pieces import StoredTensor, same
from hydraflow.errors import ConfigError, Problem, shown


def open_weights(
    path: str, shape: Architecture, *, head: str, key: str, model: str, model_path: str
) -> dict[str, StoredTensor]:
    """The weights in a checkpoint of Megatron-Core by Hugging Face name, not yet read. key: the configuration
    key of the path; model: that of the role's model, whose directory is `model_path`. Raises ConfigError when
    there is no such checkpoint, parts of it are missing, or it is another model's; a value head may be
    missing."""
    with _named(key, path, "copy or save the checkpoint again"):
        checkpoint = replace(megatron.find(Path(path), field=key), settings=Path(model_path))
        checkpoint.require_whole()
    with _named(key, path, f"{model}.path=<Hugging Face directory of the model in {path}>"):
        found = hugging_face(checkpoint, shape)
    if head == "policy" and (wrong := _head_problem(found, shape, key, path, model)):
        raise ConfigError([wrong])
    return found


@contextmanager
def _named(key: str, path: str, remedy: str) -> Iterator[None]:
    """Reports problems with files as problems of the key that names the path."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([_renamed(one, key, path, remedy) for one in error.problems]) from error


def _renamed(problem: Problem, key: str, path: str, remedy: str) -> Problem:
    if problem.field == key:
        return problem
    value = "" if problem.value is None else f"={shown(problem.value)}"
    where = "" if problem.field.rstrip("/") == path.rstrip("/") else f"{problem.field}{value}: "
    return Problem(key, path, f"{where}{problem.rule}", problem.remedy or remedy)


def _head_problem(
    found: Mapping[str, StoredTensor], shape: Architecture, key: str, path: str, model: str
) -> Problem | None:
    """Why the policy cannot use the checkpoint's output matrix; None if it can."""
    tie = f"{model}.override_config.tie_word_embeddings"
    names = Names(replace(shape, tied=False), 0, 1)
    embedding, output = (names.holding(name).parts[0].name for name in (EMBEDDING, HEAD))
    if not shape.tied and output not in found:
        wanted = [shape.vocabulary, shape.hidden]
        rule = f"holds no output matrix ({HEAD} {wanted}): it is a value model's, or its embeddings are tied"
        return Problem(key, path, rule, f"a policy's checkpoint, or +{tie}=true")
    if shape.tied and output in found and not same(found[output], found[embedding]):
        rule = f"its output matrix ({HEAD}) differs from its embedding, but config.json ties them"
        return Problem(key, path, rule, f"+{tie}=false")
    return None


def read_part(part: Part, weights: Mapping[str, StoredTensor]) -> torch.Tensor:
    """A rank's part of a Hugging Face tensor, read a block of rows at a time. A value head that the
    checkpoint lacks is zero."""
    if part.name == SCORE and SCORE not in weights:
        return torch.zeros(part.shape)
    source = weights[part.name]
    by_rows = part.dim == 0
    first, last = (part.start, part.start + part.size) if by_rows else (0, part.shape[0])
    of_block = replace(part, dim=None) if by_rows else part
    found = torch.empty(part.of(torch.empty(part.shape, device="meta")).shape, dtype=source.dtype)
    at = 0
    for block in source.blocks_between(first, last):
        found[at : at + len(block)] = of_block.of(block)
        at += len(block)
    return found
