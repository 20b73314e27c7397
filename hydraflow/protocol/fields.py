"""The columns of a batch: name, type, shape and meaning of each. Most names are verl's.

Code writes names as plain strings; tests hold it to this table: every column that a file names is here and
used, and the workers' outputs have the type and shape given here. Left out on purpose: attention masks,
position ids and padded tables: rows are ragged, so they would say nothing new.

Legend: B rows (trajectories), P prompt, R response. "ragged (B, R)" is a jagged tensor with as many values in
a row as its response has tokens; all such columns of one batch have the same row lengths.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Field:
    """Description of one column."""

    kind: str
    """Type and shape; "str per row" and the like are object columns, which stay on the controller."""
    meaning: str


DATA = {
    "prompts": Field("ragged int64 (B, P)", "token ids of the prompt, chat template applied"),
    "uid": Field("str per row", "identity of the prompt; the trajectories of one prompt share it"),
    "data_source": Field("str per row", "name of the data set; it chooses the reward function"),
    "reward_model": Field("dict per row", "`ground_truth` and how to score against it"),
    "extra_info": Field("dict per row", "other columns of the data set; passed to reward functions"),
    "raw_prompt": Field("list per row", "chat messages, before the template"),
}
"""Produced by data/."""

GENERATION = {
    "responses": Field(
        "ragged int64 (B, R)", "token ids of the response, its end token included when there is one"
    ),
    "response_mask": Field(
        "ragged int64 (B, R)",
        "1 where the policy chose the token and is trained on it, 0 elsewhere (a tool's answer)",
    ),
    "rollout_log_probs": Field(
        "ragged float32 (B, R)",
        "log-probability of each token in the generation engine, at its temperature, before top-k and top-p",
    ),
    "lengths": Field("int32 (B,)", "tokens of prompt and response: what mini-batches are balanced by"),
    "versions": Field(
        "int32 (B,)",
        "version of the weights that all tokens were sampled with: the training steps behind them",
    ),
    "replica": Field("int32 (B,)", "the generation process that sampled the row"),
    "finish_reason": Field("int8 (B,)", "why the response ended: a place in FINISH_REASONS"),
    "group": Field(
        "int64 (B,)",
        "number of the row's prompt in this step; estimators that compare trajectories group by it",
    ),
    "sample": Field("int64 (B,)", "number of the sample in its group"),
}
"""Produced by sampling; `group` and `sample` by the controller."""

FINISH_REASONS = ("stop", "length", "fault")
"""An end token; the limit of tokens; a fault outside the model (an environment, a tool, a service): such rows
are never trained on."""

SCORING = {
    "score": Field("float32 (B,)", "the reward function's score"),
    "acc": Field("float32 (B,)", "the reward function's acc, else its score"),
    "failed": Field("bool (B,)", "the reward function raised or exceeded a limit; `score` is failure_score"),
    "text": Field("str per row", "the decoded response"),
    "prompt_text": Field("str per row", "the decoded prompt"),
    "token_level_rewards": Field(
        "ragged float32 (B, R)",
        "the score on the last trained token, less the KL penalty if the algorithm puts it into the reward",
    ),
}
"""Produced by scoring."""

ENGINES = {
    "log_probs": Field(
        "ragged float32 (B, R)", "log-probability of each token in the requested pass; renamed by the caller"
    ),
    "old_log_probs": Field(
        "ragged float32 (B, R)", "log-probability of each token under the policy at the start of the step"
    ),
    "ref_log_prob": Field(
        "ragged float32 (B, R)", "log-probability of each token under the reference policy"
    ),
    "values": Field("ragged float32 (B, R)", "the critic's estimate of the return before each token"),
    "entropys": Field("ragged float32 (B, R)", "entropy of the policy's distribution at each token, in nats"),
    "greedy_match": Field("ragged float32 (B, R)", "1 where the token is the most probable one"),
}
"""Produced by the engines."""

UPDATES = {
    "live": Field(
        "bool (B,)", "false for a row that only fills up a data rank's share, and is not trained on"
    ),
    "rollout_is_weights": Field(
        "ragged float32 (B, R)", "importance weight of each token's policy loss, where a correction has any"
    ),
}
"""Of a mini-batch: made by the controller where its rows do not divide by the data ranks, and by the actor
where it corrects for samples of another policy."""

ALGORITHMS = {
    "advantages": Field("ragged float32 (B, R)", "how much better each token was than expected"),
    "returns": Field("ragged float32 (B, R)", "what the critic is trained to predict"),
}
"""Produced by algorithms/."""

FIELDS = DATA | GENERATION | SCORING | ENGINES | ALGORITHMS | UPDATES


def described(name: str) -> str:
    """A column in a few words, for messages.

    >>> described("replica")
    'int32 (B,), the generation process that sampled the row'
    """
    return f"{FIELDS[name].kind}, {FIELDS[name].meaning}"
