"""What other people's training loops need of an engine: several passes before one optimizer step, that step's
own settings, and log-probabilities of given tokens at every position."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import rank_jobs
from engine import several_jobs as jobs
from engine.alike import assert_same
from engine.megatron_jobs import OPTIM, assembled
from engine.megatron_models import FAMILIES as ALL
from engine.megatron_models import sizes
from engine.pool import Ranks
from transformers import AutoModelForCausalLM

from hydraflow.engine.base import StepOptions
from hydraflow.protocol import ragged

FAMILIES = {"qwen3": ALL["qwen3"]}
GROUP_SIZES = (2,)
LAYOUTS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "two copies": {"fsdp": {"fsdp_size": 1}},
    "Megatron, distributed optimizer": {"megatron": sizes()},
    "Megatron, plain optimizer": {"megatron": sizes(use_distributed_optimizer=False)},
    "Megatron, tensor parallel": {"megatron": sizes(2)},
}
ALL_LAYOUTS = LAYOUTS | {
    "shared tokens": {"fsdp": {"ulysses_sequence_parallel_size": 2}},
    "chunks": {"fsdp": {"head_chunk_tokens": 3}},
    "Megatron, stages": {"megatron": sizes(1, 2)},
}
OWN = StepOptions(lr=3e-2, betas=(0.5, 0.9), eps=1e-2, weight_decay=0.5, clip_grad=0.2)
CONFIGURED = StepOptions()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_calls_add_up_and_a_step_has_its_own_settings(ranks: Ranks, models: Path, layout: str) -> None:
    """The same as one call with all rows, whatever failed in between; and steps are those of an
    engine which is configured like them. The second shows the betas: after the first, Adam's moments are the
    gradient, whatever they are."""
    path, options = str(models / "qwen3"), LAYOUTS[layout]
    configured = dict(vars(OWN)) | {"betas": list(OWN.betas or ())}
    whole = ranks.run(jobs.updated, path, options, 1, [OWN, CONFIGURED])[0]
    disturbed = layout != "Megatron, tensor parallel"  # where it ends the run
    several = ranks.run(jobs.updated, path, options, 2, [OWN, CONFIGURED], disturbed)[0]
    own = ranks.run(jobs.updated, path, options, 1, [OWN, OWN])[0]
    like_it = ranks.run(jobs.updated, path, {**options, "optim": configured}, 1, [CONFIGURED] * 2)[0]
    assert several["reported"][0]["grad_norm"] > 0.2, "it is clipped"
    for mine, other in zip(several["reported"], whole["reported"], strict=True):
        assert mine == pytest.approx(other, rel=1e-5)
    for mine, other in zip(own["reported"], like_it["reported"], strict=True):
        assert mine == pytest.approx(other, rel=1e-5)
    assert_same(own["weights"], like_it["weights"], 2e-5)
    assert [step["lr"] for step in whole["reported"]] == [OWN.lr, OPTIM["lr"]]
    assert_same(several["weights"], whole["weights"], 2e-5)


def test_each_setting_of_a_step_changes_the_weights(ranks: Ranks, models: Path) -> None:
    """So that the comparison with an engine configured like it can fail."""
    own, *others = (
        ranks.run(jobs.updated, str(models / "qwen3"), {}, 1, [settings] * 2)[0]["weights"]
        for settings in (OWN, *(replace(OWN, **{field: None}) for field in vars(OWN)))
    )
    changed = [max(float((own[name] - other[name]).abs().max()) for name in own) for other in others]
    assert min(changed) > 1e-3, dict(zip(vars(OWN), changed, strict=True))


def assert_learned(answers: list[dict[str, Any]], lm: torch.nn.Module) -> None:
    """The gradient of all ranks is that of the model."""
    gradients = [one["gradient"] for one in answers]
    whole = gradients[0] if isinstance(gradients[0], dict) else assembled(gradients)
    found = {name.removeprefix("lm."): gradient for name, gradient in whole.items()}
    for name, parameter in lm.named_parameters():
        torch.testing.assert_close(found[name].double(), parameter.grad, atol=2e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("layout", ["sharded", "shared tokens", "Megatron, tensor parallel", "chunks"])
def test_given_tokens_at_every_position(ranks: Ranks, models: Path, layout: str, several: bool) -> None:
    """Against transformers in float64, row by row."""
    options = ALL_LAYOUTS[layout]
    lm = AutoModelForCausalLM.from_pretrained(models / "qwen3", dtype=torch.float64).eval()
    rows = jobs.rows_with_targets(several)
    names = ("prompts", "responses", "target_tokens", "returns")
    expected, loss = [], torch.zeros((), dtype=torch.float64)
    columns = (ragged.rows(rows.get(name)) for name in names)
    for prompt, response, asked, weights in zip(*columns, strict=True):
        logits = lm(input_ids=torch.cat([prompt, response])[None], use_cache=False).logits[0, :-1]
        found = logits.log_softmax(-1).gather(1, asked.view(len(asked), -1)).view(asked.shape)
        expected.append(found.detach())
        loss = loss + (found * weights).sum()
    loss.backward()
    answers = ranks.run(jobs.asked, str(models / "qwen3"), options, several)
    said = {one["place"][0]: one["said"] for one in answers if one["place"][2]}
    together = torch.cat([said[share] for share in sorted(said)])
    torch.testing.assert_close(together.double(), torch.cat(expected), atol=2e-5, rtol=0)
    assert_learned(answers, lm)


def check_refusals(said: list[str]) -> None:
    expected = [
        "row 0: target_tokens has length 2, responses has length 1",
        f"ids must be from 0 to {jobs.VOCABULARY - 1}",
        "at least one micro-batch",
        "at least one micro-batch",
        f"likeliest={jobs.VOCABULARY + 1} is more than the {jobs.VOCABULARY} tokens",
    ]
    for text, part in zip(said, expected, strict=True):
        assert part in text


def test_wrong_requests_are_refused(models: Path) -> None:
    check_refusals(jobs.refusals(str(models / "qwen3"), {}))


def test_megatron_refuses_wrong_requests(ranks: Ranks, models: Path) -> None:
    for said in ranks.run(jobs.refusals, str(models / "qwen3"), ALL_LAYOUTS["Megatron, tensor parallel"]):
        check_refusals(said)


@pytest.mark.parametrize("mode", ["forward_kl_topk", "reverse_kl"])
@pytest.mark.parametrize(
    "layout", ["sharded", "shared tokens", "Megatron, tensor parallel", "Megatron, stages", "chunks"]
)
def test_a_teachers_likeliest_tokens(ranks: Ranks, models: Path, layout: str, mode: str) -> None:
    """The teacher's pass, and the gradient of a divergence from it, against transformers in float64."""
    options, most = ALL_LAYOUTS[layout], jobs.VOCABULARY if mode == "reverse_kl" else 4
    lm = AutoModelForCausalLM.from_pretrained(models / "qwen3", dtype=torch.float64).eval()
    rows, loss = rank_jobs.make_batch(), torch.zeros((), dtype=torch.float64)
    columns = (ragged.rows(rows.get(name)) for name in ("prompts", "responses", "response_mask"))
    for prompt, response, mask in zip(*columns, strict=True):
        logits = lm(input_ids=torch.cat([prompt, response])[None], use_cache=False).logits[0]
        logits = logits[len(prompt) - 1 : -1][mask.bool()]
        q, p = (logits / jobs.TEACHER).softmax(-1).detach(), logits.softmax(-1)
        top = q.topk(most).indices
        q, p = ([*one.gather(1, top).t(), 1 - one.gather(1, top).sum(1)] for one in (q, p))
        pairs = list(zip(q, p, strict=True))[: most + (most < jobs.VOCABULARY)]
        if mode.startswith("forward"):
            loss = loss + sum((a * (a.log() - b.log())).sum() for a, b in pairs)
        else:
            loss = loss + sum((b * (b.log() - a.log())).sum() for a, b in pairs)
    loss.backward()
    answers = ranks.run(jobs.distilled, str(models / "qwen3"), options, mode, most)
    said = {one["place"][0]: one["loss"] for one in answers if one["place"][2]}
    assert sum(said.values()) == pytest.approx(loss.item(), rel=1e-5)
    assert_learned(answers, lm)
