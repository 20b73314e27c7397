"""Whether prompts and responses together fit into the positions that a model has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hydraflow.data.prompts import PromptDataset
from hydraflow.errors import ConfigError
from hydraflow.protocol.ragged import lengths

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def require_context(
    datasets: Sequence[PromptDataset], max_response_length: int, config: PreTrainedConfig
) -> None:
    """Raises ConfigError when the longest prompt leaves too little of the model's context."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    longest = max(
        int(lengths(dataset.batch(range(len(dataset))).get("prompts")).max()) for dataset in datasets
    )
    if context is None or longest + max_response_length <= context:
        return
    rule = (
        f"the longest prompt has {longest} tokens; together that is more than the {context} positions of the"
        " model"
    )
    room = context - longest
    remedy = (
        f"data.max_response_length={room}"
        if room > 0
        else f"data.max_prompt_length={context // 2} data.filter_overlong_prompts=true"
    )
    raise ConfigError.one("data.max_response_length", max_response_length, rule, remedy)
