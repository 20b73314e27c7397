"""Compares, when a model is loaded, the log-probabilities of the training path with those of the model's own
forward pass in transformers.

In: a sharded model. Out: whether its rows must be padded, or a ConfigError. A few short rows of random tokens
go through the head and the packing that training uses, and each row alone through transformers' forward and
transformers' attention. A configuration does not reveal everything: heads may scale logits, and layers may
mix tokens by other means than attention. Both run the model that `build.py` has made: its norms, rotations,
gates and linear layers, its adapters, and the dtypes of FSDP. A fault there is in both and is not seen;
`scripts/model_types.py` and `tests/engine/test_parity.py` compare with a model that transformers has loaded.
Collective; all ranks reach the same decision.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch.distributed import DistError
from torch.distributed.fsdp import FSDPModule

from hydraflow.device import ran_out_of_memory
from hydraflow.engine import process_group
from hydraflow.engine.fsdp.passes import forget_passes
from hydraflow.engine.fsdp.ulysses import not_shareable
from hydraflow.engine.token_exchange import Output, Ulysses
from hydraflow.errors import ConfigError, first_line
from hydraflow.models import compiled
from hydraflow.models.ask import LOG_PROBS
from hydraflow.models.attention import NAME
from hydraflow.models.heads import PolicyModel, ValueModel, asked_hidden_states, shared_vocabulary
from hydraflow.models.loading import context_of
from hydraflow.models.packing import PackedBatch, pack
from hydraflow.models.probe import (
    LIMITS,
    REFUSED,
    deviation,
    is_exact,
    is_rounding,
    own_log_probs,
    probe_rows,
    within_tolerance,
)
from hydraflow.protocol import ragged

log = logging.getLogger(__name__)


@torch.no_grad()
def must_pad_rows(
    module: PolicyModel | ValueModel,
    *,
    padded: bool,
    ulysses: Ulysses | None,
    own_attention: str,
    device: torch.device,
    dtype: torch.dtype,
    field: str,
    path: str | None,
) -> bool:
    """Whether rows must be padded: if `padded`, or if packed rows differ from the model's own forward pass.

    ulysses: the ranks that share the tokens of packed rows, which padded rows do not allow. own_attention:
    transformers' implementation for this model. dtype: of the computation. Raises ConfigError when padded
    rows differ too, or the model's code rejects them.
    """
    module.eval()
    config = module.hf.config
    wrong = partial(
        _mismatch, module, ulysses=ulysses, own_attention=own_attention, device=device, dtype=dtype
    )
    if not padded and (why := wrong(pads=False)):
        if ulysses is not None:
            raise not_shareable(config, ulysses.group.size(), why)
        log.warning("rows are padded: packed rows of a %s model cannot be used, %s", config.model_type, why)
        padded = True
    if padded and (why := wrong(pads=True)):
        rule = f"models of type {config.model_type} are not supported: {why}"
        remedy = "another model" if dtype in LIMITS else "another model, or fsdp_config.dtype=fp32"
        raise ConfigError.one(f"{field}.path", path, rule, remedy)
    config._attn_implementation = own_attention if padded else NAME
    return padded


def _mismatch(
    module: PolicyModel | ValueModel,
    *,
    pads: bool,
    ulysses: Ulysses | None,
    own_attention: str,
    device: torch.device,
    dtype: torch.dtype,
) -> str:
    """Why padded or packed rows cannot be used; empty if they can. Collective."""
    config, raised, found = module.hf.config, "", (float("inf"), float("inf"))
    context = context_of(config)
    rows = probe_rows(shared_vocabulary(module), context.tokens if context else None)
    prompts, responses = (ragged.rows(column) for column in rows)
    published = partial(_as_published, module, prompts, responses, device)
    try:
        config._attn_implementation = own_attention if pads else NAME
        ours = _as_trained(module, pack(*rows, device=device, padded=pads), ulysses)
        config._attn_implementation = own_attention
        theirs = published()
        found = deviation(ours, theirs, ragged.lengths(rows[1]), exact=is_exact(module, dtype))
    except REFUSED as error:
        if ran_out_of_memory(error) or isinstance(error, ConfigError | DistError):
            raise
        message = first_line(error).partition(". For ")[0]  # what follows is advice to the model's author
        raised = f"its code raises {type(error).__name__}: {message}"
    finally:
        forget_passes(module)
    worst, middle = process_group.all_reduce(torch.tensor(found), "max").tolist()
    if (right := within_tolerance(worst, middle, dtype)) is None:
        # no rank's numbers are inf here, so every one has computed them
        wrong = float(not is_rounding(ours, theirs, config, published))
        forget_passes(module)
        right = not process_group.all_reduce(torch.tensor([wrong]), "max").item()
    if right:
        return ""
    return raised or f"the numbers are off by {worst:.2g} from those of the model's own forward pass"


def _as_trained(
    module: PolicyModel | ValueModel, batch: PackedBatch, ulysses: Ulysses | None
) -> torch.Tensor:
    """Log-probabilities (K,) as in training; of a value model, hidden states (K, hidden)."""

    def numbers(part: PackedBatch) -> Output:
        if isinstance(module, PolicyModel):
            return module(part, LOG_PROBS)[0], None
        module(part)  # the first call makes it FSDP's root
        with _gathered(module):
            return asked_hidden_states(module.hf, part, module.score.weight.dtype), None

    return (numbers(batch) if ulysses is None else ulysses.compute(batch, numbers))[0]


def _as_published(
    module: PolicyModel | ValueModel,
    prompts: Sequence[torch.Tensor],
    responses: Sequence[torch.Tensor],
    device: torch.device,
) -> torch.Tensor:
    """As `_as_trained`, but with the model's own forward pass, row by row."""
    found = []
    with _gathered(module), compiled.as_written():
        for prompt, response in zip(prompts, responses, strict=True):
            if isinstance(module, PolicyModel):
                found.append(own_log_probs(module.lm, prompt, response, device))
                continue
            ids = torch.cat([prompt, response]).to(device)[None]
            states = module.hf(input_ids=ids, use_cache=False).last_hidden_state
            found.append(states[0, len(prompt) - 1 : -1])
    return torch.cat(found)


@contextmanager
def _gathered(module: PolicyModel | ValueModel) -> Iterator[None]:
    """Keeps the root's own weights gathered while parts of the model are called directly."""
    assert isinstance(module, FSDPModule)
    module.unshard()
    try:
        yield
    finally:
        forget_passes(module)
