"""The columns of a batch: name, type, shape and meaning of each. Most names are verl's.

Code writes names as plain strings; tests hold it to this table: every column that a file names is here and
used, and the workers' outputs have the type and shape given here. Left out on purpose: attention masks,
position ids and padded tables: rows are ragged, so they would say nothing new.

Legend: B rows (trajectories), P prompt, R response. "ragged (B, R)" is a jagged tensor with as many values in
a row as its response has tokens; all such columns of one batch have the same row lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Axis(StrEnum):
    """What a column has a value for, and how its shape is written."""

    ROW = "(B,)"
    """Each row: a number, or several."""
    OBJECT = "per row"
    """Each row: an object, which stays on the controller."""
    PROMPT = "(B, P)"
    """Each token of the prompt."""
    RESPONSE = "(B, R)"
    """Each token of the response."""
    TOKENS = "(B, P + R - 1)"
    """Each token that the model reads: all but the last."""


ROW, OBJECT, PROMPT, RESPONSE, TOKENS = Axis


@dataclass(frozen=True)
class Field:
    """Description of one column."""

    dtype: str
    """Of its numbers; of an object column the type of its objects."""
    axis: Axis
    meaning: str
    each: str = ""
    """The shape of what a row or a token has, where it is more than one value."""

    @property
    def kind(self) -> str:
        """Type and shape in words.

        >>> Field("float32", RESPONSE, "").kind, Field("float32", ROW, "", each="K").kind
        ('ragged float32 (B, R)', 'float32 (B, K)')
        """
        if self.axis in (ROW, OBJECT):
            return f"{self.dtype} (B, {self.each})" if self.each else f"{self.dtype} {self.axis}"
        return f"ragged {self.dtype} {self.axis}"


DATA = {
    "prompts": Field("int64", PROMPT, "token ids of the prompt, chat template applied"),
    "uid": Field("str", OBJECT, "identity of the prompt; the trajectories of one prompt share it"),
    "data_source": Field("str", OBJECT, "name of the data set; it chooses the reward function"),
    "reward_model": Field("dict", OBJECT, "`ground_truth` and how to score against it"),
    "extra_info": Field("dict", OBJECT, "other columns of the data set; passed to reward functions"),
    "raw_prompt": Field("list", OBJECT, "chat messages, before the template"),
    "margin": Field("float32", ROW, "by how much the preferred response of a pair is better, at least"),
}
"""Produced by data/."""

GENERATION = {
    "responses": Field(
        "int64", RESPONSE, "token ids of the response, its end token included when there is one"
    ),
    "response_mask": Field(
        "int64",
        RESPONSE,
        "1 where the policy chose the token and is trained on it, 0 elsewhere (a tool's answer)",
    ),
    "rollout_log_probs": Field(
        "float32",
        RESPONSE,
        "log-probability of each token in the generation engine, at its temperature, before top-k and top-p",
    ),
    "lengths": Field("int32", ROW, "tokens of prompt and response: what mini-batches are balanced by"),
    "versions": Field(
        "int32",
        ROW,
        "version of the weights that all tokens were sampled with: the training steps behind them",
    ),
    "replica": Field("int32", ROW, "the generation process that sampled the row"),
    "finish_reason": Field("int8", ROW, "why the response ended: a place in FINISH_REASONS"),
    "group": Field(
        "int64",
        ROW,
        "number of the row's prompt in this step; estimators that compare trajectories group by it",
    ),
    "sample": Field("int64", ROW, "number of the sample in its group"),
}
"""Produced by sampling; `group` and `sample` by the controller."""

FINISH_REASONS = ("stop", "length", "fault")
"""An end token; the limit of tokens; a fault outside the model (an environment, a tool, a service): such rows
are never trained on."""

SCORING = {
    "score": Field("float32", ROW, "the reward function's score"),
    "acc": Field(
        "float32",
        ROW,
        "the reward function's acc, else its score; NaN of a row that only a reward model scores",
    ),
    "failed": Field("bool", ROW, "the reward function raised or exceeded a limit; `score` is failure_score"),
    "reward_baselines": Field("float32", ROW, "the score of the greedy response to the row's prompt"),
    "reward_parts": Field(
        "float32", ROW, "the numbers of the reward function that algorithm.gdpo_reward_keys names", each="K"
    ),
    "text": Field("str", OBJECT, "the decoded response"),
    "prompt_text": Field("str", OBJECT, "the decoded prompt"),
    "token_level_rewards": Field(
        "float32",
        RESPONSE,
        "the score on the last trained token, less the KL penalty if the algorithm puts it into the reward",
    ),
}
"""Produced by scoring."""

ENGINES = {
    "log_probs": Field(
        "float32", RESPONSE, "log-probability of each token in the requested pass; renamed by the caller"
    ),
    "old_log_probs": Field(
        "float32", RESPONSE, "log-probability of each token under the policy at the start of the step"
    ),
    "ref_log_prob": Field("float32", RESPONSE, "log-probability of each token under the reference policy"),
    "teacher_log_probs": Field(
        "float32", RESPONSE, "log-probability of each token under the teacher of the row's data source"
    ),
    "values": Field("float32", RESPONSE, "the critic's estimate of the return before each token"),
    "entropys": Field("float32", RESPONSE, "entropy of the policy's distribution at each token, in nats"),
    "sum_pi_squared": Field(
        "float32", RESPONSE, "sum of the squared probabilities of the policy's distribution at each token"
    ),
    "greedy_match": Field("float32", RESPONSE, "1 where the token is the most probable one"),
    "target_tokens": Field(
        "int64",
        RESPONSE,
        "token ids whose log-probabilities are asked for in place of the response's own, one or K for each",
    ),
    "top_tokens": Field("int64", RESPONSE, "(K,) for each token: ids of the likeliest tokens at its place"),
    "teacher_top_log_probs": Field(
        "float32",
        RESPONSE,
        "(K,) for each token: the teacher's log-probabilities of `target_tokens`, of which the first is the"
        " response's own and not counted",
    ),
    "routed_experts": Field(
        "uint8",
        TOKENS,
        "(L, K) for each token that the model reads: the K experts of each of its L layers that has any;"
        " int16 where a layer has more than 256",
    ),
}
"""Produced by the engines."""

UPDATES = {
    "live": Field(
        "bool", ROW, "false for a row that only fills up a data rank's share, and is not trained on"
    ),
    "rollout_is_weights": Field(
        "float32", RESPONSE, "importance weight of each token's policy loss, where a correction has any"
    ),
    "chosen_tokens": Field(
        "bool",
        RESPONSE,
        "chosen over the whole mini-batch for a policy loss that treats them differently",
    ),
}
"""Of a mini-batch: made by the controller where its rows do not divide by the data ranks, and by the actor
where it corrects for samples of another policy, or its loss chooses tokens."""

ALGORITHMS = {
    "advantages": Field("float32", RESPONSE, "how much better each token was than expected"),
    "returns": Field("float32", RESPONSE, "what the critic is trained to predict"),
}
"""Produced by algorithms/."""

FIELDS = DATA | GENERATION | SCORING | ENGINES | ALGORITHMS | UPDATES


def described(name: str) -> str:
    """A column in a few words, for messages.

    >>> described("replica")
    'int32 (B,), the generation process that sampled the row'
    """
    return f"{FIELDS[name].kind}, {FIELDS[name].meaning}"
