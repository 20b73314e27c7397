"""The longest prompts of a sample against the configured limits and the model's positions.

In: rows from all over the data files, the tokenizer. Out: findings that say how large the sample was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hydraflow.checkup import sampling
from hydraflow.checkup.context import FILE_KEYS, CheckContext
from hydraflow.checkup.data_files import require_prompts
from hydraflow.checkup.finding import CheckSkipped, Finding, note, ok, problem, warning
from hydraflow.data.chat import as_messages, tokenise_chats
from hydraflow.data.config import PromptConfig
from hydraflow.models.loading import Context, context_of

SAMPLE = 512


def check_lengths(context: CheckContext) -> Iterator[Finding]:
    """Tokenises a sample of each data file, as training does with all rows."""
    if context.main_key is None:
        raise CheckSkipped(context.nothing_yet())
    data, tokenizer = context.config.data, context.tokenizer
    for key in FILE_KEYS:
        if not context.files(key):
            continue
        records = context.sample(key, SAMPLE)
        require_prompts(records, data.prompt_key)
        chats = [as_messages(record, data.prompt_key) for record in records]
        options = data.apply_chat_template_kwargs
        ids = tokenise_chats(tokenizer, chats, records, add_generation_prompt=True, template_kwargs=options)
        total = sum(sampling.look_at(path, key).rows for path in context.files(key))
        yield from judge_lengths(
            sorted(map(len, ids)), data, key=key, total=total, context=context_of(context.model_config)
        )


def judge_lengths(
    lengths: Sequence[int], data: PromptConfig, *, key: str, total: int, context: Context | None
) -> Iterator[Finding]:
    """`lengths`: tokens of each prompt in the sample, rising. `total`: rows in the files. `context`: the
    model's."""
    limit, response = data.max_prompt_length, data.max_response_length
    longest, median = lengths[-1], lengths[len(lengths) // 2]
    whose = f"all {total} rows" if len(lengths) == total else f"a sample of {len(lengths)} of {total} rows"
    seen = f"{key}, {whose}: median {median} tokens, longest {longest}"
    over = sum(length > limit for length in lengths)
    kept = [min(length, limit) for length in lengths if length <= limit or not data.filter_overlong_prompts]
    if over:
        evidence = f"{seen}; {over} are longer than data.max_prompt_length={limit}"
        yield _overlong(evidence, over == len(lengths), longest, data)
    if context is not None and kept and kept[-1] + response > context.tokens:
        more, room = f"more than {context.limit}", context.tokens - kept[-1]
        too_long = f"data.max_prompt_length={context.tokens // 2}"
        shorter = f"data.max_response_length={room}" if room > 0 else too_long
        yield problem(f"{seen}; with data.max_response_length={response} that is {more}", shorter)
    elif not over:
        yield ok(f"{seen}; data.max_prompt_length={limit}")


def _overlong(evidence: str, all_of_them: bool, longest: int, data: PromptConfig) -> Finding:
    remedy = f"data.max_prompt_length={longest}"
    if data.filter_overlong_prompts:
        found = problem if all_of_them else note
        return found(f"{evidence} and are left out", remedy)
    if data.truncation == "error":
        return problem(evidence, f"{remedy} or data.filter_overlong_prompts=true or data.truncation=left")
    lost = f"{evidence} and lose their {data.truncation} part"
    return warning(lost, f"{remedy} or data.filter_overlong_prompts=true")
