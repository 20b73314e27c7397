"""Training that runs but does not learn, recognised from its metrics: one sentence each, once per run.

In: the metrics of each step, by rising step. Out: sentences that name the steps, the usual causes and what to
look at. Left out on purpose: faults that the run counts itself (skipped steps, rows without a score).

Each rule has to hold for `IN_A_ROW` steps in a row.
- No signal: every advantage of the step is the same (`critic/advantages/max` and `min`), not necessarily 0:
  rounding can leave the same small number everywhere. (Ignored if the run learns from teachers only.)
- Entropy collapse: `actor/entropy` is below 0.05 nats per token and below a tenth of the first step's, and
  the mean score is below 90 % of the range of scores seen so far, or all scores were equal. (A policy that
  has learned its task may be certain.)
- All truncated: `response_length/clip_ratio` is 1.
- Learning rate 0: `actor/lr` or `train/lr` has been 0 in every step of the run. (A warm-up starts at 0, and a
  decay may end there.)
- Lost accuracy: in `IN_A_ROW` validations in a row, held-out accuracy is at least 0.3 below the best so far,
  a mean of as many. (A run that stays at one accuracy is taken for such a one in 7 of 100 cases after 50
  validations of 16 rows each, and hardly ever if they have 30.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from hydraflow.tracking.history import is_validation, validation_accuracy

IN_A_ROW = 3
"""Consecutive steps that must show a symptom before it is reported: a small batch may show one by chance."""
COLLAPSED_NATS, COLLAPSED_SHARE, LEARNED = 0.05, 0.1, 0.9
LOST_ACCURACY = 0.3
"""Fall of the held-out accuracy, as a share of the rows."""

Row = Mapping[str, float]


@dataclass
class SymptomHistory:
    """State from earlier steps that the rules need."""

    first_entropy: float | None = None
    lowest_score: float = float("inf")
    highest_score: float = float("-inf")
    learned: bool = False
    """Whether an optimizer step had a learning rate above 0."""
    accuracies: list[float] = field(default_factory=list)
    """On held-out rows, of the last validations."""
    best_accuracy: float = float("-inf")
    """Best mean of `IN_A_ROW` validations."""

    def add(self, row: Row) -> None:
        if self.first_entropy is None:
            self.first_entropy = row.get("actor/entropy")
        self.lowest_score = min(self.lowest_score, row.get("critic/score/min", self.lowest_score))
        self.highest_score = max(self.highest_score, row.get("critic/score/max", self.highest_score))
        accuracy = validation_accuracy(row)
        if accuracy is not None:
            self.accuracies = [*self.accuracies, accuracy][-IN_A_ROW:]
            if len(self.accuracies) == IN_A_ROW:
                self.best_accuracy = max(self.best_accuracy, sum(self.accuracies) / IN_A_ROW)
        self.learned |= any(row.get(name, 0.0) > 0 for name in ("actor/lr", "train/lr"))


@dataclass(frozen=True)
class Symptom:
    """A rule, and the message once it has held for `IN_A_ROW` steps."""

    reads: tuple[str, ...]
    """Metrics that the rule reads, besides those of validation."""
    holds: Callable[[Row, SymptomHistory], bool | None]
    """Whether the step shows it; None: the step lacks the metrics, and neither ends nor extends the
    streak."""
    sentence: str
    """The message, after the step numbers."""


def _lacks_signal(row: Row, seen: SymptomHistory) -> bool | None:
    if "critic/advantages/max" not in row:
        return None
    if "actor/distillation_loss" in row and "actor/pg_loss" not in row:
        return False  # the run learns from teachers only
    return row["critic/advantages/max"] == row["critic/advantages/min"]


def _entropy_collapse(row: Row, seen: SymptomHistory) -> bool | None:
    if "actor/entropy" not in row or "critic/score/mean" not in row or seen.first_entropy is None:
        return None
    spread = seen.highest_score - seen.lowest_score
    has_learned = spread > 0 and row["critic/score/mean"] >= seen.lowest_score + LEARNED * spread
    low = row["actor/entropy"] < min(COLLAPSED_NATS, COLLAPSED_SHARE * seen.first_entropy)
    return low and not has_learned


def _all_truncated(row: Row, seen: SymptomHistory) -> bool | None:
    share = row.get("response_length/clip_ratio")
    return None if share is None else share == 1


def _zero_learning_rate(row: Row, seen: SymptomHistory) -> bool | None:
    if "actor/lr" not in row and "train/lr" not in row:
        return None
    return not seen.learned


def _lost_accuracy(row: Row, seen: SymptomHistory) -> bool | None:
    accuracy = validation_accuracy(row)
    if accuracy is None:
        return None
    return 0 <= accuracy <= seen.best_accuracy - LOST_ACCURACY and seen.best_accuracy <= 1


SYMPTOMS = (
    Symptom(
        ("critic/advantages/max", "critic/advantages/min", "actor/distillation_loss", "actor/pg_loss"),
        _lacks_signal,
        "every advantage is the same, so the reward gives no direction: the responses to a prompt all score"
        " alike. Usual causes: prompts that are too hard or too easy, a reward function that returns one"
        " value, answers in a format that it does not recognise, a temperature that is too low. Look at"
        " critic/score/mean, critic/groups/no_signal_ratio and the responses in samples/.",
    ),
    Symptom(
        ("actor/entropy", "critic/score/mean", "critic/score/max", "critic/score/min"),
        _entropy_collapse,
        f"the entropy has collapsed (actor/entropy below {COLLAPSED_NATS:g} nats per token and a tenth of its"
        " first value) while the score is not high: the policy hardly explores. Usual causes: a learning rate"
        " that is too high, no entropy or KL term, a low temperature. Look at actor/entropy, actor/ppo_kl and"
        " critic/groups/no_signal_ratio; try a lower actor_rollout_ref.actor.optim.lr or a higher"
        " clip_ratio_high.",
    ),
    Symptom(
        ("response_length/clip_ratio",),
        _all_truncated,
        "every response is truncated at the length limit (response_length/clip_ratio is 1), so answers"
        " may lack their end. Usual causes: data.max_response_length is too small, a chat template or"
        " tokenizer without the model's end-of-sequence token. Look at the responses in samples/.",
    ),
    Symptom(
        ("actor/lr", "train/lr"),
        _zero_learning_rate,
        "the learning rate has been 0 in every step, so no weight has changed. Look at actor/lr (train/lr in"
        " supervised training) and the keys lr, lr_warmup_steps and min_lr_ratio of the optimizer.",
    ),
    Symptom(
        (),
        _lost_accuracy,
        f"held-out accuracy is at least {LOST_ACCURACY:g} below the best so far: the run loses what the model"
        " could do. Usual causes: a learning rate that is too high, too many optimizer steps on one batch, a"
        " reward that favours other answers than validation counts as right. Look at actor/ppo_kl, the"
        " norm of the gradient and the responses in samples/; trainer.keep_best keeps the checkpoint of the"
        " best validation.",
    ),
)


_NEEDED = frozenset(name for symptom in SYMPTOMS for name in symptom.reads)


def is_needed(metric: str) -> bool:
    """Whether a rule reads it."""
    return metric in _NEEDED or is_validation(metric)


@dataclass
class SymptomWatch:
    """Watches one step after another and reports each symptom once."""

    seen: SymptomHistory = field(default_factory=SymptomHistory)
    _rows: dict[int, list[int]] = field(default_factory=dict)
    """Symptom -> the steps in a row that show it."""
    _reported: set[int] = field(default_factory=set)

    def after(self, step: int, row: Row) -> list[str]:
        """The messages about symptoms that this step completes for the first time."""
        self.seen.add(row)
        found = []
        for number, symptom in enumerate(SYMPTOMS):
            holds = symptom.holds(row, self.seen)
            if holds is None or number in self._reported:
                continue
            steps = self._rows.setdefault(number, [])
            if not holds:
                steps.clear()
                continue
            steps.append(step)
            if len(steps) == IN_A_ROW:
                self._reported.add(number)
                found.append(f"steps {steps[0]} to {steps[-1]}: {symptom.sentence}")
        return found


def symptoms_of(rows: Iterable[tuple[int, Row]]) -> list[str]:
    """All sentences about a run, from its steps and their metrics by rising step."""
    watch = SymptomWatch()
    return [sentence for step, row in rows for sentence in watch.after(step, row)]
