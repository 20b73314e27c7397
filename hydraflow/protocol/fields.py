"""The columns of a batch: name, type, shape and meaning of each. Most names are verl's.

Code writes names as plain strings, which tests compare with this table: every column that the code names is
here and used, and the workers' outputs have the dtype and shape given here. Left out on purpose: attention
masks, position ids and padded tables, which would be redundant because rows are ragged.

Legend: B rows (trajectories), P prompt, R response. "ragged (B, R)" is a jagged tensor with as many values in
a row as its response has tokens; all such columns of one batch have the same row lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Axis(StrEnum):
    """What a column has a value for, and the shape that this gives it."""

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
    """Dtype of its numbers; for an object column the type of its objects."""
    axis: Axis
    meaning: str
    each: str = ""
    """Shape per row or token, if there is more than one value."""

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
    "data_source": Field("str", OBJECT, "name of the data set; selects the reward function"),
    "reward_model": Field("dict", OBJECT, "`ground_truth` and how to score against it"),
    "extra_info": Field("dict", OBJECT, "other columns of the data set; passed to reward functions"),
    "raw_prompt": Field("list", OBJECT, "chat messages, before the template"),
    "margin": Field("float32", ROW, "margin by which the preferred response of a pair is better"),
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
    "lengths": Field("int32", ROW, "tokens of prompt and response; mini-batches are balanced by it"),
    "prompt_lengths": Field("int32", ROW, "tokens of the prompt, which a rank computes once for its samples"),
    "versions": Field(
        "int32", ROW, "version of the weights that sampled the tokens: number of training steps"
    ),
    "replica": Field("int32", ROW, "the generation process that sampled the row"),
    "finish_reason": Field("int8", ROW, "why the response ended: an index into FINISH_REASONS"),
    "group": Field(
        "int64",
        ROW,
        "number of the row's prompt in this step; estimators that compare trajectories group by it",
    ),
    "sample": Field("int64", ROW, "number of the sample in its group"),
}
"""Produced by sampling; `group` and `sample` by the controller."""

FINISH_REASONS = ("stop", "length", "fault")
"""stop: an end token; length: the token limit; fault: a failure outside the model (environment, tool,
service), whose rows are never trained on."""

SCORING = {
    "score": Field("float32", ROW, "the reward function's score"),
    "acc": Field(
        "float32", ROW, "the reward function's acc, else its score; NaN if only a reward model scores the row"
    ),
    "failed": Field("bool", ROW, "the reward function raised or exceeded a limit; `score` is failure_score"),
    "reward_baselines": Field("float32", ROW, "the score of the greedy response to the row's prompt"),
    "reward_parts": Field(
        "float32", ROW, "the reward function's outputs that algorithm.gdpo_reward_keys names", each="K"
    ),
    "text": Field("str", OBJECT, "the decoded response"),
    "prompt_text": Field("str", OBJECT, "the decoded prompt"),
    "token_level_rewards": Field(
        "float32", RESPONSE, "the score on the last trained token, minus any KL penalty in the reward"
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
        "int64", RESPONSE, "token ids whose log-probabilities replace the response's own, one or K per token"
    ),
    "top_tokens": Field("int64", RESPONSE, "(K,) per token: ids of the top-k tokens at its position"),
    "teacher_top_log_probs": Field(
        "float32",
        RESPONSE,
        "(K,) per token: the teacher's log-probabilities of `target_tokens`; the first is the response's"
        " own token and not part of the divergence",
    ),
    "routed_experts": Field(
        "uint8",
        TOKENS,
        "(L, K) per token that the model reads: the K experts in each of its L layers with experts;"
        " int16 where a layer has more than 256",
    ),
}
"""Produced by the engines."""

UPDATES = {
    "live": Field("bool", ROW, "false for a row that only pads a data rank's share and is not trained on"),
    "rollout_is_weights": Field(
        "float32", RESPONSE, "importance weight of each token's policy loss (rollout correction)"
    ),
    "chosen_tokens": Field(
        "bool", RESPONSE, "tokens selected over the whole mini-batch, for losses that treat them differently"
    ),
}
"""Columns of a mini-batch: `live` by the controller if its rows do not divide by the data ranks, the others
by the actor, for rollout correction and losses that select tokens."""

ALGORITHMS = {
    "advantages": Field("float32", RESPONSE, "advantage of each token over the baseline"),
    "returns": Field("float32", RESPONSE, "target of the critic's value at each token"),
}
"""Produced by algorithms/."""

FIELDS = DATA | GENERATION | SCORING | ENGINES | ALGORITHMS | UPDATES


def described(name: str) -> str:
    """A column in a few words, for messages.

    >>> described("replica")
    'int32 (B,), the generation process that sampled the row'
    """
    return f"{FIELDS[name].kind}, {FIELDS[name].meaning}"
