"""The losses once more, as a person would write them down: loops over rows and tokens, nothing of hydraflow
but the names.

In: a plain Hugging Face model and one row after the other. Out: a loss, and its gradient by torch's autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Row:
    """One row as the model sees it, and its columns (R,) by name."""

    said: list[Tensor]
    """Log-probability of each response token, or the value predicted before it."""
    entropy: list[Tensor]
    columns: dict[str, list[Any]]

    @property
    def trained(self) -> list[int]:
        return [t for t, mask in enumerate(self.columns["response_mask"]) if mask]


def read_policy(
    model: nn.Module, prompt: Tensor, response: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """(R,) log-probabilities and (R,) entropies."""
    logits = model(input_ids=torch.cat([prompt, response])[None], use_cache=False).logits[
        0, len(prompt) - 1 : -1
    ]
    everything = (logits / temperature).log_softmax(-1)
    return everything[torch.arange(len(response)), response], -(everything.exp() * everything).sum(-1)


def read_values(model: nn.Module, score: Tensor, prompt: Tensor, response: Tensor) -> tuple[Tensor, Tensor]:
    """(R,) values, and nothing for entropies."""
    hidden = model.model(input_ids=torch.cat([prompt, response])[None], use_cache=False).last_hidden_state[0]
    values = hidden[len(prompt) - 1 : -1] @ score[0]
    return values, torch.zeros_like(values)


def clipped(ratio: Tensor) -> Tensor:
    return ratio if 0.8 <= ratio <= 1.2 else torch.tensor(0.8 if ratio < 0.8 else 1.2, dtype=ratio.dtype)


def each_token(loss: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """The losses of a row's tokens, from the loss of one: by its log-probability now and before, its
    advantage, and whether it was chosen."""

    def of_row(
        now: list[Tensor], old: list[float], advantages: list[float], chosen: list[bool], **keys: Any
    ) -> list[Tensor]:
        return [loss(*token, **keys) for token in zip(now, old, advantages, chosen, strict=True)]

    return of_row


@each_token
def vanilla(logp: Tensor, before: float, advantage: float, chosen: bool) -> Tensor:
    ratio = (logp - before).exp()
    loss = max(-advantage * ratio, -advantage * clipped(ratio))
    if advantage < 0 and loss > -advantage * 3.0:
        return torch.tensor(-advantage * 3.0, dtype=ratio.dtype)
    return loss


def gspo(now: list[Tensor], old: list[float], advantages: list[float], chosen: list[bool]) -> list[Tensor]:
    if not now:
        return []
    whole = sum(logp.item() - before for logp, before in zip(now, old)) / len(now)
    ratios = [math.exp(whole) * (logp - logp.detach()).exp() for logp in now]
    return [max(-a * ratio, -a * clipped(ratio)) for a, ratio in zip(advantages, ratios)]


@each_token
def sapo(logp: Tensor, before: float, advantage: float, chosen: bool) -> Tensor:
    tau = 1.0 if advantage > 0 else 1.05
    return -advantage * 4 / tau / (1 + (-tau * ((logp - before).exp() - 1)).exp())


@each_token
def cispo(logp: Tensor, before: float, advantage: float, chosen: bool) -> Tensor:
    return -advantage * clipped((logp - before).exp()).item() * logp


def geo_mean(
    now: list[Tensor], old: list[float], advantages: list[float], chosen: list[bool]
) -> list[Tensor]:
    """The paper's product of |min(ratio A, clip(ratio) A)|, to the power of 1 / length."""
    product = torch.tensor(1.0, dtype=torch.float64)
    for logp, before, advantage in zip(now, old, advantages):
        ratio = (logp - before).exp()
        near = torch.tensor(math.exp(0.2 if advantage > 0 else -0.2), dtype=ratio.dtype)
        product = product * (min(ratio, near) if advantage > 0 else max(ratio, near))
    return [-advantage * product ** (1 / len(now)) for advantage in advantages]


@each_token
def gpg(logp: Tensor, before: float, advantage: float, chosen: bool) -> Tensor:
    return -advantage * logp


@each_token
def dppo(
    logp: Tensor,
    before: float,
    advantage: float,
    chosen: bool,
    *,
    divergence: Callable[[float, float], float],
) -> Tensor:
    """The paper's objective, a mask times ratio times advantage; ratios above 3 weigh 3."""
    ratio = (logp - before).exp()
    beyond = divergence(math.exp(before), math.exp(logp.item())) > 0.2
    masked = beyond and (ratio > 1 if advantage > 0 else ratio < 1)
    objective = 3 * advantage * logp if ratio > 3 else advantage * ratio
    return 0 * logp if masked else -objective


def total_variation(before: float, now: float) -> float:
    """Of two Bernoulli distributions."""
    return (abs(now - before) + abs((1 - now) - (1 - before))) / 2


def binary_kl(before: float, now: float) -> float:
    return before * math.log(before / now) + (1 - before) * math.log((1 - before) / (1 - now))


@each_token
def dro(logp: Tensor, before: float, advantage: float, chosen: bool) -> Tensor:
    """The squared residual that the paper derives; the policy's part of it, over beta = 0.1."""
    return (advantage - 0.1 * (logp - before)) ** 2 / 0.2


def topr(now: list[Tensor], old: list[float], advantages: list[float], chosen: list[bool]) -> list[Tensor]:
    whole = math.exp(sum(logp.item() - before for logp, before in zip(now, old)))
    return [-a * (1.0 if a > 0 else min(whole, 1.0)) * logp for logp, a in zip(now, advantages)]


@each_token
def tis(
    logp: Tensor, before: float, advantage: float, chosen: bool, *, least: float = 0.0, most: float = 1.0
) -> Tensor:
    return -advantage * max(least, min(math.exp(logp.item() - before), most)) * logp


def kimi15(now: list[Tensor], old: list[float], advantages: list[float], chosen: list[bool]) -> list[Tensor]:
    """The paper's objective has one term for the whole response; the sum of these is that."""
    whole = sum(logp - before for logp, before in zip(now, old))
    return [0.1 / 2 * whole**2 / len(now) - a * logp for logp, a in zip(now, advantages)]


@each_token
def opmd(logp: Tensor, before: float, advantage: float, chosen: bool, *, tau: float = 1.0) -> Tensor:
    return -advantage * logp / (1 + tau)


@each_token
def sppo(logp: Tensor, before: float, advantage: float, chosen: bool, *, most: float = 1.3) -> Tensor:
    ratio = (logp - before).exp()
    near = ratio if 1 / most <= ratio <= most else ratio.detach().clamp(1 / most, most)
    return -advantage * near.log() + 0 * logp


@each_token
def rec(
    logp: Tensor,
    before: float,
    advantage: float,
    chosen: bool,
    *,
    clip_mode: str = "one-side",
    weight: str = "none",
    outer: tuple[float, float] = (0.4, 3.0),
    temperature: float = 1.0,
) -> Tensor:
    ratio = math.exp(logp.item() - before)
    within, rewarded = 0.8 <= ratio <= 1.2, advantage > 0
    keep = {
        "none": True,
        "one-side": ratio <= 1.2 if rewarded else ratio >= 0.8,
        "two-side": within,
        "ring": within or (ratio <= outer[0] if rewarded else ratio >= outer[1]),
    }[clip_mode]
    of_advantage = math.exp(advantage / temperature)
    factor = {"none": 1.0, "importance_sampling": ratio, "advantage": of_advantage}[weight]
    return -advantage * factor * keep * logp


@each_token
def clip_cov(logp: Tensor, before: float, advantage: float, chosen: bool) -> Tensor:
    ratio = (logp - before).exp()
    loss = max(-advantage * ratio, -advantage * clipped(ratio))
    return loss.detach() if chosen else loss


@each_token
def kl_cov(logp: Tensor, before: float, advantage: float, chosen: bool) -> Tensor:
    loss = -advantage * (logp - before).exp()
    return loss + 0.1 * (logp - before).abs() if chosen else loss


def low_var_kl(gap: Tensor) -> Tensor:
    """`gap` is the policy's log-probability less the reference's."""
    estimate = (-gap).exp() + gap - 1
    return estimate if estimate < 10 else estimate.detach()


POLICY: dict[str, Callable[..., list[Tensor]]] = {
    "vanilla": vanilla,
    "gspo": gspo,
    "sapo": sapo,
    "cispo": cispo,
    "geo_mean": geo_mean,
    "gpg": gpg,
    "dppo_tv": partial(dppo, divergence=total_variation),
    "dppo_kl": partial(dppo, divergence=binary_kl),
    "dro": dro,
    "topr": topr,
    "tis": tis,
    "kimi15": kimi15,
    "opmd": opmd,
    "sppo": sppo,
    "rec": rec,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}
"""Losses of the trained tokens of one row, with the defaults of the keys; `chosen` are tokens that were
chosen over the mini-batch."""
KL: dict[str, Callable[[Tensor], Tensor]] = {
    "kl": lambda gap: gap,
    "k1": lambda gap: gap,
    "abs": lambda gap: gap if gap > 0 else -gap,
    "mse": lambda gap: gap * gap / 2,
    "k2": lambda gap: gap * gap / 2,
    "low_var_kl": low_var_kl,
    "k3": low_var_kl,
}


def kl(kind: str, gap: Tensor) -> Tensor:
    """A trailing + takes the value of one and the gradient of k2."""
    if not kind.endswith("+"):
        return KL[kind](gap)
    return KL[kind[:-1]](gap).detach() + KL["k2"](gap) - KL["k2"](gap).detach()


def actor_loss(rows: Sequence[Row], options: Mapping[str, Any], scale: float) -> Tensor:
    losses = []
    for row in rows:
        losses.append([])
        old, advantages = (
            [row.columns[name][t] for t in row.trained] for name in ("old_log_probs", "advantages")
        )
        of_choice = row.columns.get("chosen_tokens")
        chosen = [of_choice is not None and bool(of_choice[t]) for t in row.trained]
        policy_loss, now = POLICY[options.get("loss_mode", "vanilla")], [row.said[t] for t in row.trained]
        for t, loss in zip(row.trained, policy_loss(now, old, advantages, chosen)):
            ref = row.columns["ref_log_prob"][t]
            loss = loss - options.get("entropy_coeff", 0.0) * row.entropy[t]
            if "kl_coef" in options:
                loss = loss + options["kl_coef"] * kl(options.get("kl_type", "low_var_kl"), row.said[t] - ref)
            losses[-1].append(loss)
    return aggregate(losses, options.get("agg_mode", "token-mean"), scale)


def value_loss(rows: Sequence[Row], options: Mapping[str, Any], scale: float) -> Tensor:
    losses = []
    for row in rows:
        losses.append([])
        for t in row.trained:
            value, old, target = row.said[t], row.columns["values"][t], row.columns["returns"][t]
            gap = value.item() - old
            near = (
                value if abs(gap) <= 0.5 else torch.tensor(old + math.copysign(0.5, gap), dtype=value.dtype)
            )
            losses[-1].append(max((value - target) ** 2, (near - target) ** 2) / 2)
    return aggregate(losses, options.get("agg_mode", "token-mean"), scale)


def aggregate(losses: Sequence[Sequence[Tensor]], mode: str, scale: float) -> Tensor:
    """Losses of trained tokens, row by row; a row without any does not count as a sequence."""
    losses = [row for row in losses if row]
    sums = [sum(row[1:], row[0]) for row in losses]
    everything = sum(sums[1:], sums[0])
    if mode == "token-sum":
        return everything
    if mode == "token-mean":
        return everything / sum(len(row) for row in losses)
    if mode == "seq-mean-token-sum":
        return everything / len(losses)
    if mode == "seq-mean-token-sum-norm":
        return everything / len(losses) / scale
    assert mode == "seq-mean-token-mean", mode
    means = [total / len(row) for total, row in zip(sums, losses)]
    return sum(means[1:], means[0]) / len(losses)


LOSS: dict[str, Callable[[Sequence[Row], Mapping[str, Any], float], Tensor]] = {
    "policy": actor_loss,
    "value": value_loss,
}
