"""Configuration of the data: which files, which columns, how long. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hydraflow.options import FILES, NO_LIMIT_OR_COUNT, Rule, free, listed, no_effect_when, option, unless

_OF_THE_TOKENIZER = (
    *("add_generation_prompt", "continue_final_message", "max_length", "padding", "return_dict"),
    *("return_assistant_tokens_mask", "return_tensors", "tokenize", "tokenizer_kwargs", "truncation"),
)
"""Arguments of transformers' apply_chat_template that are no variables of the template."""
TEMPLATE_VARIABLES = Rule(
    f"must hold variables of the template, not {listed(_OF_THE_TOKENIZER)}, which the trainer sets",
    lambda value: value.keys().isdisjoint(_OF_THE_TOKENIZER),
    example="{enable_thinking: false}",
)


@dataclass
class PromptConfig:
    """How prompts are read and tokenized."""

    prompt_key: str = "prompt"
    """Column with chat messages, or with a plain string (used as one user message)."""
    max_prompt_length: int = option(512, size=True)
    """Maximum prompt length, in tokens after the chat template."""
    max_response_length: int = option(512, size=True)
    """Maximum response length, in tokens."""
    filter_overlong_prompts: bool = False
    """Drop prompts longer than max_prompt_length and report how many."""
    truncation: str = option(
        "error",
        choices=("error", "left", "right", "middle"),
        no_effect=unless(
            "filter_overlong_prompts", False, why="{s}.filter_overlong_prompts=true drops longer prompts"
        ),
    )
    """What to do with longer prompts: error, or truncate on the left, right or in the middle."""
    apply_chat_template_kwargs: dict[str, Any] = option(factory=dict, rule=TEMPLATE_VARIABLES)
    """Extra variables for the tokenizer's chat template."""


@dataclass
class DataConfig(PromptConfig):
    """Prompts for reinforcement learning and validation."""

    reward_fn_key: str = "data_source"
    """Column with a row's data source, which selects the built-in reward function."""
    train_files: Any = option(None, rule=FILES)
    """Parquet or JSONL file of training prompts, or a list of them."""
    val_files: Any = free(None, rule=FILES)
    """Parquet or JSONL file of held-out prompts, or a list of them; null: no validation."""
    train_batch_size: int = option(1024, size=True, in_plan=True)
    """Prompts per training step (Q of the batch plan)."""
    gen_batch_size: int | None = option(None, size=True)
    """Prompts per generation batch while filter_groups fills a step; null: train_batch_size."""
    val_batch_size: int | None = free(None, size=True)
    """Prompts per validation call; null: all at once."""
    shuffle: bool = True
    """Shuffle the training prompts every epoch (seeded by trainer.seed)."""
    train_max_samples: int = option(-1, rule=NO_LIMIT_OR_COUNT)
    """Maximum number of training prompts, from the start of the files; -1: all."""
    val_max_samples: int = free(-1, rule=NO_LIMIT_OR_COUNT)
    """Maximum number of held-out prompts, from the start of the files; -1: all."""


@dataclass
class GenerateDataConfig(PromptConfig):
    """Prompts for main_generate."""

    path: Any = option(None, rule=FILES)
    """Parquet or JSONL file of prompts, or a list of them."""
    max_samples: int = option(-1, rule=NO_LIMIT_OR_COUNT)
    """Maximum number of prompts, from the start of the files; -1: all."""


@dataclass
class ExamplesConfig:
    """Training examples: conversations, or pairs of them."""

    train_files: Any = option(None, rule=FILES)
    """Parquet or JSONL file of training examples, or a list of them."""
    val_files: Any = free(None, rule=FILES)
    """Parquet or JSONL file of held-out examples, or a list of them; null: no validation."""
    tools_key: str | None = "tools"
    """Column with the tools for a row's chat template; used if the file has it."""
    enable_thinking_key: str | None = "enable_thinking"
    """Column with a row's value of the chat template's variable enable_thinking; used if the file has it."""
    prompt_key: str = "prompt"
    """Column with the prompt, a string or chat messages; used if a row has no complete conversation."""
    train_batch_size: int = option(256, size=True, in_plan=True)
    """Conversations (main_dpo, main_rm: pairs) per optimizer step, over all data ranks."""
    micro_batch_size_per_gpu: int | None = free(
        None,
        size=True,
        verl=("micro_batch_size",),
        no_effect=unless(
            "use_dynamic_bsz", False, why="{s}.use_dynamic_bsz=true fills micro-batches by tokens"
        ),
    )
    """Micro-batch size per data rank, in conversations or pairs; null: derived from max_token_len_per_gpu."""
    max_token_len_per_gpu: int = free(
        8192,
        size=True,
        no_effect=no_effect_when(
            lambda s: s.micro_batch_size_per_gpu is not None and not s.use_dynamic_bsz,
            "micro-batches have a given number of rows",
            "{s}.use_dynamic_bsz=true",
        ),
    )
    """Token budget per device of one forward pass; used with use_dynamic_bsz or without a micro-batch
    size."""
    use_dynamic_bsz: bool = free(True)
    """Fill micro-batches by token count (dynamic batch size) instead of by a fixed number of rows."""
    max_length: int = option(1024, size=True)
    """Maximum conversation length, in tokens."""
    truncation: str = option("error", choices=("error", "left", "right"))
    """What to do with longer conversations: error, or truncate on the left or right."""
    shuffle: bool = True
    """Shuffle the examples every epoch (seeded by trainer.seed)."""
    train_max_samples: int = option(-1, rule=NO_LIMIT_OR_COUNT)
    """Maximum number of training examples, from the start of the files; -1: all."""
    val_max_samples: int = free(-1, rule=NO_LIMIT_OR_COUNT)
    """Maximum number of held-out examples, from the start of the files; -1: all."""
    apply_chat_template_kwargs: dict[str, Any] = option(factory=dict, rule=TEMPLATE_VARIABLES)
    """Extra variables for the tokenizer's chat template."""


@dataclass
class SFTDataConfig(ExamplesConfig):
    """Conversations for supervised training."""

    messages_key: str = "messages"
    """Column with complete conversations; used if the file has it."""
    prompt_dict_keys: list[str] | None = None
    """Path of keys, outermost first, to the prompt inside prompt_key; null: the column itself."""
    response_key: str = "response"
    """Column with the response to the prompt."""
    response_dict_keys: list[str] | None = None
    """Path of keys, outermost first, to the response inside response_key; null: the column itself."""


@dataclass
class PairsConfig(ExamplesConfig):
    """Preference pairs: two responses to the same prompt, one of them preferred."""

    chosen_key: str = "chosen"
    """Column with the preferred response: a string or chat messages; a complete conversation if the row has
    no prompt."""
    rejected_key: str = "rejected"
    """Column with the other response, in the same form."""


@dataclass
class GradedPairsConfig(PairsConfig):
    """Preference pairs with an optional margin."""

    margin_key: str | None = "margin"
    """Column with the margin by which the preferred score must be higher; used if a row has it."""
