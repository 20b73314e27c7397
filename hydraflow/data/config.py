"""Configuration of the data: which files, which columns, how long. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class PromptConfig:
    """How prompts are read and tokenised."""

    prompt_key: str = "prompt"
    """Column with the chat messages, or with a plain string (taken as one user message)."""
    max_prompt_length: int = 512
    """Longest prompt, in tokens after the chat template."""
    max_response_length: int = 512
    """Longest response, in tokens."""
    filter_overlong_prompts: bool = False
    """Leave out prompts that are longer than max_prompt_length, and say how many."""
    truncation: str = "error"
    """What happens to a longer prompt that was not filtered: error, left, right or middle (the part that is
    cut)."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra variables for the tokenizer's chat template."""


@dataclass
class DataConfig(PromptConfig):
    """Prompts for reinforcement learning and validation."""

    reward_fn_key: str = "data_source"
    """Column that names a row's data source, by which the built-in reward functions are chosen."""
    train_files: Any = None
    """Parquet or JSONL file of training prompts, or a list of them."""
    val_files: Any = None
    """Parquet or JSONL file of held-out prompts, or a list of them; null: no validation."""
    train_batch_size: int = 1024
    """Prompts in one training step (Q of the batch plan)."""
    gen_batch_size: int | None = None
    """Prompts that are sampled at a time when filter_groups fills a step; null: train_batch_size."""
    val_batch_size: int | None = None
    """Prompts in one validation call; null: all of them at once."""
    shuffle: bool = True
    """Draw the training prompts in a new order each epoch (seeded by trainer.seed)."""
    train_max_samples: int = -1
    """Use only the first so many training prompts; -1: all."""
    val_max_samples: int = -1
    """Use only the first so many held-out prompts; -1: all."""


@dataclass
class GenerateDataConfig(PromptConfig):
    """Prompts for generation alone."""

    path: Any = None
    """Parquet or JSONL file of prompts, or a list of them."""
    max_samples: int = -1
    """Use only the first so many prompts; -1: all."""


@dataclass
class SFTDataConfig:
    """Conversations for supervised training."""

    train_files: Any = None
    """Parquet or JSONL file of training conversations, or a list of them."""
    val_files: Any = None
    """Parquet or JSONL file of held-out conversations, or a list of them; null: no validation."""
    messages_key: str = "messages"
    """Column with whole conversations; used when the file has it."""
    prompt_key: str = "prompt"
    """Column with the prompt (string or chat messages), where there is no messages column."""
    response_key: str = "response"
    """Column with the answer to that prompt."""
    train_batch_size: int = 256
    """Conversations in one optimizer step, over all data ranks."""
    micro_batch_size_per_gpu: int | None = None
    """Conversations per data rank in one forward; null: from max_token_len_per_gpu."""
    max_token_len_per_gpu: int = 8192
    """Tokens per device in one forward when use_dynamic_bsz, or when no micro-batch size is given."""
    use_dynamic_bsz: bool = True
    """Fill micro-batches by tokens instead of by conversations."""
    max_length: int = 1024
    """Longest conversation, in tokens."""
    truncation: str = "error"
    """What happens to a longer one: error, left or right (the part that is cut)."""
    shuffle: bool = True
    """Draw the conversations in a new order each epoch (seeded by trainer.seed)."""
    train_max_samples: int = -1
    """Use only the first so many training conversations; -1: all."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra variables for the tokenizer's chat template."""
