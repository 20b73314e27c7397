"""Names of the columns of a batch, each with its dtype, shape and meaning. The names are verl's.

Use: `data.get(fields.RESPONSES)`. Written where a column is made, read by these names everywhere else.
Left out on purpose: attention masks, position ids and padded token tables: rows are ragged, so they would say nothing new.

Legend: B rows (trajectories), P prompt, R response. "ragged (B, R)" is a jagged tensor with as many values in a row as its
response has tokens; all such columns of one batch have the same row lengths.
"""

from __future__ import annotations

# Made by data/

PROMPTS = "prompts"
"""ragged int64 (B, P): token ids of the prompt, chat template applied."""
UID = "uid"
"""str per row: which prompt this is. The trajectories of one prompt share it; estimators that compare trajectories group by it."""
DATA_SOURCE = "data_source"
"""str per row: name of the data set; it chooses the reward function."""
REWARD_MODEL = "reward_model"
"""dict per row: `ground_truth` and how to score against it."""
EXTRA_INFO = "extra_info"
"""dict per row: whatever else the data set says; reward functions receive it."""
RAW_PROMPT = "raw_prompt"
"""list of chat messages per row, before the template."""

# Made by generation

RESPONSES = "responses"
"""ragged int64 (B, R): token ids of the response, its end token included when there is one."""
RESPONSE_MASK = "response_mask"
"""ragged int64 (B, R): 1 where the policy chose the token and is trained on it, 0 elsewhere (a tool's answer)."""
ROLLOUT_LOG_PROBS = "rollout_log_probs"
"""ragged float32 (B, R): log-probability of each token as the generator had it, at its temperature, before top-k and top-p."""

# Made by scoring

TOKEN_LEVEL_SCORES = "token_level_scores"
"""ragged float32 (B, R): the reward function's score, at the last token of the response unless it scores tokens."""
TOKEN_LEVEL_REWARDS = "token_level_rewards"
"""ragged float32 (B, R): the scores less the KL penalty, if the algorithm puts it into the reward."""

# Made by the engines

OLD_LOG_PROBS = "old_log_probs"
"""ragged float32 (B, R): log-probability of each token under the policy at the start of the step."""
REF_LOG_PROB = "ref_log_prob"
"""ragged float32 (B, R): log-probability of each token under the reference policy."""
VALUES = "values"
"""ragged float32 (B, R): the critic's estimate of the return before each token."""
ENTROPYS = "entropys"
"""ragged float32 (B, R): entropy of the policy's distribution at each token, in nats."""

# Made by algorithms/

ADVANTAGES = "advantages"
"""ragged float32 (B, R): how much better each token was than expected."""
RETURNS = "returns"
"""ragged float32 (B, R): what the critic is trained to predict."""
