"""The law of gradients on the real engine with the real losses: for fixed rows the gradient, summed over
ranks, depends neither on micro-batches (rows or tokens), nor on packing or padding, nor on the rows' order,
nor on the number of data ranks.

Every gradient is also that of `naive.py`: a plain Hugging Face model, one row at a time, the loss written
with loops. A gradient is linear in the loss, so one pass with the sum of all losses, each of them as large as
the others, says what a pass for each would; where it fails, there is a pass for each, to name the one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.pool import Ranks
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from workers import gradient_jobs as jobs
from workers import naive
from workers.gradient_jobs import CUTS, SCALE, TEMPERATURE, AnyCase, Case, Together

from hydraflow.algorithms.aggregate import LOSS_AGG_MODES
from hydraflow.algorithms.config import POLICY_LOSSES
from hydraflow.algorithms.kl import KL_ESTIMATORS
from hydraflow.metrics import merge, values
from hydraflow.protocol import ragged
from hydraflow.protocol.batch import DataProto

DOUBLE = {"model_dtype": "fp64", "dtype": "fp64"}
PROMPT_TOKENS = [1, 5, 3, 7, 2, 4, 6, 3]
MASKS = ["111111", "1", "110011011", "0111", "10111101", "000", "11111", "1110111"]
"""What is trained of each response: observations in the middle, and one row of nothing else."""

POLICY_CASES = [
    *(
        Case(f"{loss} {mode}", options={"loss_mode": loss, "agg_mode": mode})
        for loss in POLICY_LOSSES
        for mode in (LOSS_AGG_MODES if loss in ("vanilla", "gspo") else ["seq-mean-token-mean"])
    ),
    *(
        Case(f"entropy and KL {mode}", options={"entropy_coeff": 0.5, "kl_coef": 0.7, "agg_mode": mode})
        for mode in LOSS_AGG_MODES
    ),
]
VALUE_CASES = [Case(f"value {mode}", "value", {"agg_mode": mode}) for mode in LOSS_AGG_MODES]
"""The law in every aggregation mode is in tests/algorithms/test_split_law.py, without an engine."""
SINGLE_TERMS = [
    Case("entropy", options={"entropy_coeff": 0.5}),
    *(Case(f"KL {kind}", options={"kl_coef": 0.7, "kl_type": kind}) for kind in KL_ESTIMATORS),
]
CASES = {"policy": POLICY_CASES + SINGLE_TERMS, "value": VALUE_CASES}
Measure = Callable[[list[AnyCase]], list[Mapping[str, Tensor]]]
"""By case: the gradients (cuts, parameters) that each rank has."""


@dataclass
class Plain:
    """A plain model that has read every row of the batch once, in float64."""

    path: str
    head: str
    batch: DataProto
    rows: list[naive.Row] = field(default_factory=list)
    norms: dict[str, float] = field(default_factory=dict)
    """Of the gradients of cases, by name."""

    def __post_init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float64)
        self.parameters = dict(self.model.named_parameters())
        if self.head == "value":
            score = load_file(Path(self.path) / "model.safetensors")["score.weight"]
            self.parameters["score.weight"] = torch.nn.Parameter(score.double())
        self.read(range(len(self.batch)))

    def read(self, which: range) -> list[naive.Row]:
        """Rows under the weights of now."""
        columns = {name: ragged.rows(self.batch.get(name)) for name in self.batch.keys()}
        self.rows = []
        for i in which:
            of_row = {name: column[i] for name, column in columns.items()}
            said, entropy = self._forward(of_row.pop("prompts"), of_row.pop("responses"))
            self.rows.append(
                naive.Row(
                    list(said), list(entropy), {name: column.tolist() for name, column in of_row.items()}
                )
            )
        return self.rows

    def _forward(self, prompt: Tensor, response: Tensor) -> tuple[Tensor, Tensor]:
        if self.head == "value":
            return naive.read_values(self.model, self.parameters["score.weight"], prompt, response)
        return naive.read_policy(self.model, prompt, response, TEMPERATURE)

    def loss(self, options: Mapping[str, Any]) -> Tensor:
        return naive.LOSS[self.head](self.rows, options, SCALE)

    def gradient(self, case: AnyCase) -> Tensor:
        terms = zip(case.cases, case.weights) if isinstance(case, Together) else [(case, 1.0)]
        losses = torch.stack([weight * self.loss(one.options) for one, weight in terms])
        parameters = [self.parameters[name] for name in sorted(self.parameters)]
        gradients = torch.autograd.grad(losses.sum(), parameters, retain_graph=True)
        return torch.cat([g.flatten() for g in gradients])

    def together(self, cases: Sequence[Case]) -> Together:
        """The sum of cases, with weights that make the norm of each one's gradient another number from 1 to
        2: no case is too small to be seen, and the errors of two do not cancel."""
        for case in cases:
            if case.name not in self.norms:
                self.norms[case.name] = self.gradient(case).norm().item()
                assert self.norms[case.name] > 1e-2
        norms = [1 + number / len(cases) for number in range(len(cases))]
        weights = (norm / self.norms[case.name] for norm, case in zip(norms, cases, strict=True))
        return Together(self.head, tuple(cases), tuple(weights))

    def said(self) -> Tensor:
        return torch.cat([torch.stack(row.said) for row in self.rows]).detach()


@pytest.fixture(scope="module")
def path(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model with a value head that is not zero."""
    directory = tmp_path_factory.mktemp("model") / "with_score"
    directory.mkdir()
    for file in Path(tiny).iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    score = torch.randn(1, 32, generator=torch.Generator().manual_seed(1))
    save_file(
        {**load_file(directory / "model.safetensors"), "score.weight": score},
        directory / "model.safetensors",
        {"format": "pt"},
    )
    return str(directory)


@pytest.fixture(scope="module")
def plain(path: str) -> Callable[[str], Plain]:
    """Plain models by head, on columns that are close to what the models say, so that clips hold for some
    tokens and not for others."""
    empty = make_batch({})
    spoken = {head: Plain(path, head, empty).said() for head in ("policy", "value")}
    batch = make_batch(make_columns(spoken["policy"], spoken["value"]))
    return {head: Plain(path, head, batch) for head in spoken}.__getitem__


def make_batch(columns: Mapping[str, Tensor]) -> DataProto:
    draw = torch.Generator().manual_seed(7)
    lengths = torch.tensor([len(mask) for mask in MASKS])
    tokens = [
        torch.randint(2, 17, (int(sizes.sum()),), generator=draw)
        for sizes in (torch.tensor(PROMPT_TOKENS), lengths)
    ]
    mask = torch.tensor([int(m) for m in "".join(MASKS)])
    response_columns = {"responses": tokens[1], "response_mask": mask, **columns}
    return DataProto.from_dict(
        {
            "prompts": ragged.from_parts(tokens[0], torch.tensor(PROMPT_TOKENS)),
            **{name: ragged.from_parts(column, lengths) for name, column in response_columns.items()},
        }
    )


def make_columns(logp: Tensor, value: Tensor) -> dict[str, Tensor]:
    """Columns of all response tokens in float64; where nothing is trained they hold NaN, which must not
    matter."""
    draw = torch.Generator().manual_seed(11)
    trained = torch.tensor([int(m) for m in "".join(MASKS)]).bool()

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(len(logp), generator=draw, dtype=torch.float64)

    columns = {
        "old_log_probs": logp + noise(0.7),
        "advantages": noise(1.0),
        "ref_log_prob": logp + noise(1.5),
        "values": value + noise(0.6),
        "returns": value + noise(1.0),
    }
    columns = {name: torch.where(trained, column, float("nan")) for name, column in columns.items()}
    return columns | {"chosen_tokens": torch.rand(len(logp), generator=draw) < 0.3}


def in_float32(batch: DataProto) -> DataProto:
    return DataProto.from_dict({name: c.float() if c.is_floating_point() else c for name, c in batch.items()})


def assert_lawful(measure: Measure, plain: Plain, cases: list[Case], tolerance: float) -> None:
    """Every gradient is the plain one, up to `tolerance` of its norm."""
    failed = unlawful(measure, plain, [plain.together(cases)], tolerance)
    assert not failed, unlawful(measure, plain, cases, tolerance) or failed


def unlawful(measure: Measure, plain: Plain, cases: Sequence[AnyCase], tolerance: float) -> list[str]:
    """Gradients that are not the plain ones. A sum of cases is held to the norm of the smallest."""
    failed = []
    every = measure(list(cases))
    for case in cases:
        wanted = plain.gradient(case)
        norm = 1.0 if isinstance(case, Together) else wanted.norm().item()
        for rank, found in enumerate(every):
            for cut, gradient in zip(CUTS, found[case.name], strict=True):
                error = (gradient.double() - wanted).norm().item() / norm
                if not error < tolerance:
                    failed.append(f"{case.name}, {cut}, rank {rank}: {error:.1e}")
    return failed


def test_every_loss_has_its_plain_twin() -> None:
    assert naive.POLICY.keys() == POLICY_LOSSES.keys()
    assert naive.KL.keys() | {f"{name}+" for name in naive.KL} == KL_ESTIMATORS.keys()


def test_rows_reach_every_branch_of_the_losses(plain: Callable[[str], Plain]) -> None:
    """Some ratios are inside the clip, some above, some below, some at the dual clip; some KLs and values are
    clipped, some not."""
    policy, critic = (
        [(row.said[t].item(), row.columns, t) for row in plain(head).rows for t in row.trained]
        for head in CASES
    )
    ratios = [
        (torch.tensor(now - c["old_log_probs"][t]).exp().item(), c["advantages"][t]) for now, c, t in policy
    ]
    assert any(r > 1.2 and a > 0 for r, a in ratios) and any(r > 3 and a < 0 for r, a in ratios)
    assert any(r < 0.8 and a < 0 for r, a in ratios) and any(0.8 < r < 1.2 for r, a in ratios)
    gaps = [c["ref_log_prob"][t] - now for now, c, t in policy]
    # From 2.6 on, low_var_kl is above 10.
    assert min(gaps) < 0 and any(0 < gap < 2 for gap in gaps) and max(gaps) > 2.7
    moved = [abs(now - c["values"][t]) for now, c, t in critic]
    assert min(moved) < 0.5 < max(moved)


def test_token_budgets_are_binding_and_ranks_differ(
    path: str, plain: Callable[[str], Plain], ranks: Ranks
) -> None:
    first, second = ranks.run(jobs.count_micro_batches, path, plain("policy").batch)
    for cut in ("24 tokens", "shuffled, 13 tokens"):
        assert first[cut][0] == second[cut][0] == max(first[cut][1], second[cut][1]) > 1
    assert first["shuffled, 13 tokens"][1] != second["shuffled, 13 tokens"][1]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("head", CASES)
@pytest.mark.parametrize("data_ranks", [1, 2])
def test_gradient_is_the_plain_one_however_it_was_computed(
    path: str, plain: Callable[[str], Plain], ranks: Ranks, data_ranks: int, head: str, packed: bool
) -> None:
    options = {
        "fsdp": DOUBLE,
        "model": {"use_remove_padding": packed, "enable_gradient_checkpointing": False},
    }
    args = path, head, options, plain(head).batch

    def measure(cases: list[AnyCase]) -> list[Mapping[str, Tensor]]:
        return [jobs.measure(*args, cases)] if data_ranks == 1 else ranks.run(jobs.measure, *args, cases)

    assert_lawful(measure, plain(head), CASES[head], 1e-9)


@pytest.mark.parametrize("head", CASES)
def test_gradient_is_the_plain_one_where_two_ranks_share_the_tokens(
    path: str, plain: Callable[[str], Plain], ranks: Ranks, head: str
) -> None:
    options = {"fsdp": {**DOUBLE, "ulysses_sequence_parallel_size": 2, "head_chunk_tokens": 3}}
    args = path, head, options, plain(head).batch
    assert_lawful(lambda cases: ranks.run(jobs.measure, *args, cases), plain(head), CASES[head], 1e-9)


@pytest.mark.parametrize("head", CASES)
def test_float32_on_two_ranks(path: str, plain: Callable[[str], Plain], ranks: Ranks, head: str) -> None:
    """gloo has no scaled sum of float32: an engine that asks for one fails here, and only here."""
    args = path, head, {}, in_float32(plain(head).batch)
    assert_lawful(lambda cases: ranks.run(jobs.measure, *args, cases), plain(head), CASES[head], 1e-4)


def test_the_law_can_fail(path: str, plain: Callable[[str], Plain]) -> None:
    """Micro-batches that divide by their own counts, as some trainers' do, are right only where there is one
    of them."""
    case = jobs.OwnCounts("own counts", "value", {"agg_mode": "token-mean"})
    found = jobs.measure(path, "value", {"fsdp": DOUBLE}, plain("value").batch, [case])["own counts"]
    wanted = plain("value").gradient(case)
    right = [
        name
        for name, gradient in zip(CUTS, found, strict=True)
        if (gradient - wanted).norm() < 1e-9 * wanted.norm()
    ]
    assert right == ["all rows"]


def plain_training(model: Plain, training: jobs.Training, options: Mapping[str, Any]) -> dict[str, float]:
    """Two epochs of two mini-batches with torch's AdamW; the means over the four steps of what the worker
    reports."""
    parameters = list(model.parameters.values())
    optimizer = torch.optim.AdamW(parameters, lr=training.lr, weight_decay=training.weight_decay)
    means = {"loss": 0.0, "grad_norm": 0.0}
    for first in (0, 4, 0, 4):
        model.read(range(first, first + 4))
        optimizer.zero_grad()
        model.loss(options).backward(retain_graph=True)
        norm = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).norm()
        means["grad_norm"] += norm.item() / 4
        means["loss"] += model.loss({"agg_mode": options["agg_mode"]}).item() / 4
        optimizer.step()
    return means


@pytest.mark.parametrize("head", CASES)
def test_a_training_step_of_the_worker(
    path: str, plain: Callable[[str], Plain], ranks: Ranks, head: str
) -> None:
    """Two mini-batches, two epochs: weights and merged metrics on one rank, on two ranks, and of a plain loop
    with AdamW."""
    batch = plain(head).batch
    alone, weights = jobs.train(path, jobs.Training(head, jobs.rows(2)), batch)
    both = ranks.run(jobs.train, path, jobs.Training(head, jobs.tokens(24)), batch)
    one, two = values(alone), values(merge(metrics for metrics, _ in both))
    assert two == pytest.approx(one, rel=1e-10, abs=1e-12)

    model = Plain(path, head, batch)
    options = {"agg_mode": "seq-mean-token-mean"} | (
        {"entropy_coeff": 0.02, "kl_coef": 0.3} if head == "policy" else {}
    )
    means = plain_training(model, jobs.Training(head, jobs.rows(1)), options)
    prefix, loss, clipped, others = METRICS[head]
    assert one[f"{prefix}/grad_norm"] == pytest.approx(means["grad_norm"], rel=1e-9)
    assert one[f"{prefix}/{loss}"] == pytest.approx(means["loss"], rel=1e-9)
    assert 0 < one[f"{prefix}/{clipped}"] < 1
    assert one.keys() >= {f"{prefix}/{name}" for name in others}
    for found in (weights, *(of_rank for _, of_rank in both)):
        for name, wanted in model.parameters.items():
            torch.testing.assert_close(
                found[name],
                wanted.detach(),
                rtol=0,
                atol=1e-10,
                msg=lambda text, name=name: f"{name}: {text}",
            )


METRICS = {
    "policy": ("actor", "pg_loss", "pg_clipfrac", ["entropy", "kl_loss", "ppo_kl", "grad_norm_max", "lr"]),
    "value": ("critic", "vf_loss", "vf_clipfrac", ["vpred_mean", "grad_norm_max", "lr"]),
}
"""What the worker's metrics are called: prefix, loss, share of clipped tokens, others."""
