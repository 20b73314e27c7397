"""What a rollout correction did, and how far the trainer's policy is from the generation engine's.

In: log-probabilities of the sampled tokens from both, (B, R), and the mask before any rejection. Out:
metrics under verl's names (`rollout_corr/`) that merge exactly over micro-batches and ranks: of tokens, or of
the rows that have a trained token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hydraflow.algorithms.correction import Correction, Rejection, Weighting
from hydraflow.algorithms.policy_loss import bounded
from hydraflow.algorithms.token_terms import keep
from hydraflow.metrics import Metric, eff_sample_size, maximum, mean, minimum, spread

PREFIX = "rollout_corr"


@dataclass(frozen=True)
class _Tokens:
    """Rows with at least one trained token."""

    mask: Tensor
    """bool (B, R)."""
    log_ratio: Tensor
    """(B, R), 0 where the mask is 0."""

    def row_means(self, values: Tensor) -> Tensor:
        """The mean over each row's trained tokens, (B,)."""
        return keep(values, self.mask).sum(1) / self.mask.sum(1)


@torch.no_grad()
def correction_metrics(
    correction: Correction, trained: Tensor, sampled: Tensor, mask: Tensor
) -> dict[str, Metric]:
    """`trained` and `sampled` are log-probabilities, arbitrary where the mask is 0. {} if no token is
    trained."""
    some = mask.bool().any(dim=1)
    mask = mask.bool()[some].cpu()
    trained, sampled = (keep(logp[some].double().cpu(), mask) for logp in (trained, sampled))
    if not len(mask):
        return {}
    tokens = _Tokens(mask, trained - sampled)
    found = _policy_gap(tokens, trained, sampled)
    if correction.weighting is not None:
        found |= _of_weights(correction.weighting, tokens)
    for rejection in correction.rejections:
        found |= _of_rejection(rejection, tokens)
    if correction.rejections:
        found |= _lost("rollout_rs_", mask & ~correction.kept(tokens.log_ratio, mask), mask)
    return {f"{PREFIX}/{name}": metric for name, metric in found.items()}


def _policy_gap(tokens: _Tokens, trained: Tensor, sampled: Tensor) -> dict[str, Metric]:
    ours, theirs = -tokens.row_means(trained), -tokens.row_means(sampled)  # (B,) log-perplexities
    of_token = bounded(tokens.log_ratio)[tokens.mask]
    of_row = bounded(tokens.log_ratio.sum(1))
    means = {
        "kl": -tokens.log_ratio[tokens.mask],
        "k3_kl": torch.expm1(of_token) - of_token,
        "training_ppl": ours.exp(),
        "training_log_ppl": ours,
        "rollout_ppl": theirs.exp(),
        "rollout_log_ppl": theirs,
        "log_ppl_diff": ours - theirs,
        "log_ppl_abs_diff": (ours - theirs).abs(),
        "ppl_ratio": bounded(ours - theirs).exp(),
        "chi2_token": torch.expm1(2 * of_token),
        "chi2_seq": torch.expm1(2 * of_row),
    }
    return {name: mean(float(values.mean()), len(values)) for name, values in means.items()} | {
        "log_ppl_diff_max": maximum(float((ours - theirs).max())),
        "log_ppl_diff_min": minimum(float((ours - theirs).min())),
    }


def _of_weights(weighting: Weighting, tokens: _Tokens) -> dict[str, Metric]:
    """Metrics of the weights before normalization; the maximum and minimum are of the ratios, before the
    threshold is applied."""
    ratios = weighting.ratios(tokens.log_ratio)
    weights = weighting.weights(ratios)
    per_row, ratio_of_row = tokens.row_means(weights), tokens.row_means(ratios)
    # verl's lower bound for this metric where the weights have none
    low = 1.0 / weighting.upper if weighting.lower is None else weighting.lower
    chosen, ratio = weights[tokens.mask], ratios[tokens.mask]
    name = "rollout_is_"
    found = _spread(name, chosen) | _spread(f"{name}seq_", per_row)
    found |= {f"{name}max": maximum(float(ratio.max())), f"{name}min": minimum(float(ratio.min()))}
    square = float(chosen.square().mean())
    found[f"{name}eff_sample_size"] = eff_sample_size(float(chosen.mean()), square, weight=len(chosen))
    found[f"{name}seq_max_deviation"] = maximum(float((per_row - 1.0).abs().max()))
    each = ratio if weighting.level == "token" else ratio_of_row
    shares = {
        "ratio_fraction_high": each > weighting.upper,
        "ratio_fraction_low": each < low,
        "seq_fraction_high": ratio_of_row > weighting.upper,
        "seq_fraction_low": ratio_of_row < low,
    }
    if weighting.lower is not None:
        shares["oob_ratio"] = (ratio > weighting.upper) | (ratio < low)
    return found | {f"{name}{what}": _share(of) for what, of in shares.items()}


def _of_rejection(rejection: Rejection, tokens: _Tokens) -> dict[str, Metric]:
    name, measure = f"rollout_rs_{rejection.rule}_", rejection.measure(tokens.log_ratio, tokens.mask)
    values = measure[tokens.mask] if rejection.rule.startswith("token_") else measure[:, 0]
    return _spread(name, values) | _lost(name, tokens.mask & ~rejection.keeps(measure), tokens.mask)


def _lost(name: str, lost: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Fractions of tokens that are rejected, and of rows that lose any."""
    return {
        f"{name}masked_fraction": _share(lost[mask]),
        f"{name}seq_masked_fraction": _share(lost.any(dim=1)),
    }


def _share(of: Tensor) -> Metric:
    return mean(float(of.double().mean()), len(of))


def _spread(name: str, values: Tensor) -> dict[str, Metric]:
    average = float(values.mean())
    std = float(values.std()) if len(values) > 1 else 0.0
    return {
        f"{name}mean": mean(average, len(values)),
        f"{name}std": spread(std, len(values), average),
        f"{name}max": maximum(float(values.max())),
        f"{name}min": minimum(float(values.min())),
    }
