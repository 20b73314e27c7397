"""Configuration of the data: which files, which columns, how long. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydraflow.options import FILES, NO_LIMIT_OR_COUNT, idle_when, option, unless


@dataclass
class PromptConfig:
    """How prompts are read and tokenised."""

    prompt_key: str = "prompt"
    """Column with the chat messages, or with a plain string (taken as one user message)."""
    max_prompt_length: int = option(512, ge=1)
    """Longest prompt, in tokens after the chat template."""
    max_response_length: int = option(512, ge=1)
    """Longest response, in tokens."""
    filter_overlong_prompts: bool = False
    """Leave out prompts that are longer than max_prompt_length, and say how many."""
    truncation: str = option(
        "error",
        choices=("error", "left", "right", "middle"),
        idle=unless(
            "filter_overlong_prompts", False, why="{s}.filter_overlong_prompts=true leaves longer prompts out"
        ),
    )
    """What happens to a longer prompt that was not filtered: error, left, right or middle (the part that is
    cut)."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra variables for the tokenizer's chat template."""


@dataclass
class DataConfig(PromptConfig):
    """Prompts for reinforcement learning and validation."""

    reward_fn_key: str = "data_source"
    """Column that names a row's data source, by which the built-in reward functions are chosen."""
    train_files: Any = option(None, rule=FILES)
    """Parquet or JSONL file of training prompts, or a list of them."""
    val_files: Any = option(None, rule=FILES, shapes_training=False)
    """Parquet or JSONL file of held-out prompts, or a list of them; null: no validation."""
    train_batch_size: int = option(1024, in_plan=True)
    """Prompts in one training step (Q of the batch plan)."""
    gen_batch_size: int | None = None
    """Prompts that are sampled at a time when filter_groups fills a step; null: train_batch_size."""
    val_batch_size: int | None = option(None, shapes_training=False)
    """Prompts in one validation call; null: all of them at once."""
    shuffle: bool = True
    """Draw the training prompts in a new order each epoch (seeded by trainer.seed)."""
    train_max_samples: int = option(-1, rule=NO_LIMIT_OR_COUNT)
    """Use only the first so many training prompts; -1: all."""
    val_max_samples: int = option(-1, rule=NO_LIMIT_OR_COUNT, shapes_training=False)
    """Use only the first so many held-out prompts; -1: all."""


@dataclass
class GenerateDataConfig(PromptConfig):
    """Prompts for generation alone."""

    path: Any = option(None, rule=FILES)
    """Parquet or JSONL file of prompts, or a list of them."""
    max_samples: int = option(-1, rule=NO_LIMIT_OR_COUNT)
    """Use only the first so many prompts; -1: all."""


@dataclass
class SFTDataConfig:
    """Conversations for supervised training."""

    train_files: Any = option(None, rule=FILES)
    """Parquet or JSONL file of training conversations, or a list of them."""
    val_files: Any = option(None, rule=FILES, shapes_training=False)
    """Parquet or JSONL file of held-out conversations, or a list of them; null: no validation."""
    messages_key: str = "messages"
    """Column with whole conversations; used when the file has it."""
    prompt_key: str = "prompt"
    """Column with the prompt (string or chat messages), where there is no messages column."""
    response_key: str = "response"
    """Column with the answer to that prompt."""
    train_batch_size: int = option(256, in_plan=True)
    """Conversations in one optimizer step, over all data ranks."""
    micro_batch_size_per_gpu: int | None = option(
        None,
        shapes_training=False,
        idle=unless("use_dynamic_bsz", False, why="{s}.use_dynamic_bsz=true fills micro-batches by tokens"),
    )
    """Conversations per data rank in one forward; null: from max_token_len_per_gpu."""
    max_token_len_per_gpu: int = option(
        8192,
        shapes_training=False,
        idle=idle_when(
            lambda s: s.micro_batch_size_per_gpu is not None and not s.use_dynamic_bsz,
            "micro-batches have a given number of rows",
            "{s}.use_dynamic_bsz=true",
        ),
    )
    """Tokens per device in one forward when use_dynamic_bsz, or when no micro-batch size is given."""
    use_dynamic_bsz: bool = option(True, shapes_training=False)
    """Fill micro-batches by tokens instead of by conversations."""
    max_length: int = option(1024, ge=1)
    """Longest conversation, in tokens."""
    truncation: str = option("error", choices=("error", "left", "right"))
    """What happens to a longer one: error, left or right (the part that is cut)."""
    shuffle: bool = True
    """Draw the conversations in a new order each epoch (seeded by trainer.seed)."""
    train_max_samples: int = option(-1, rule=NO_LIMIT_OR_COUNT)
    """Use only the first so many training conversations; -1: all."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra variables for the tokenizer's chat template."""
