"""The chat template on three prompts, and the tokens that end a response.

In: tokenizer, the model's configurations, three rows. Out: findings. The usual
reasons why a run learns nothing: a missing template, one that is already rendered into the prompts, or an end
token that the generator does not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from hydraflow.checkup.context import MODEL, CheckContext
from hydraflow.checkup.data_files import require_prompts
from hydraflow.checkup.finding import Finding, note, ok, problem, warning
from hydraflow.data.chat import Messages, as_messages
from hydraflow.generation.config import stop_strings
from hydraflow.generation.native import end_tokens
from hydraflow.models.loading import load_generation_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARKERS = (
    *("<|im_start|>", "<|start_header_id|>", "<start_of_turn>"),
    *("<|user|>", "<|assistant|>", "<｜User｜>", "[INST]"),
)
"""How well-known templates open a turn. The tokenizer's own special tokens are markers, too."""
SENTINEL = "ANSWER"
ROLLOUT = "actor_rollout_ref.rollout"


def check_template(context: CheckContext) -> Iterator[Finding]:
    """Renders three prompts as training does."""
    tokenizer = context.tokenizer
    if not tokenizer.chat_template:
        remedy = f"{MODEL}.custom_chat_template=<Jinja template>, or an instruct model"
        evidence = f"the tokenizer of {tokenizer.name_or_path} has no chat template"
        yield problem(f"{evidence}, which prompts need: text is one message of the user", remedy)
        return
    data = context.config.data
    require_prompts(context.first_rows, data.prompt_key)
    chats = [as_messages(record, data.prompt_key) for record in context.first_rows]
    try:
        yield from list(judge_chats(tokenizer, chats, options=data.apply_chat_template_kwargs))
    except TemplateError as error:
        remedy = "correct the messages' roles and order, or data.apply_chat_template_kwargs"
        yield problem(f"the chat template refuses a prompt: {error}", remedy)


def judge_chats(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[Messages], *, options: Mapping[str, Any]
) -> Iterator[Finding]:
    """Findings from rendering. Raises jinja2's TemplateError if the template refuses a prompt."""
    special = set(map(str, tokenizer.all_special_tokens)) | set(MARKERS)

    def render(chat: Messages, *, prompt: bool) -> str:
        return str(
            tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt, **options)
        )

    rendered = [render(chat, prompt=True) for chat in chats]
    found = (_complaint(tokenizer, chat, text, special) for chat, text in zip(chats, rendered, strict=True))
    complaints = dict.fromkeys(complaint for complaint in found if complaint)
    yield from complaints
    if not complaints:
        yield ok(f"{len(chats)} prompts rendered, the first: {_short(rendered[0])}")
    if rendered[0] == render(chats[0], prompt=False):
        yield note("the template adds no generation prompt, which would start the answer")


def _complaint(
    tokenizer: PreTrainedTokenizerBase, chat: Messages, text: str, special: Set[str]
) -> Finding | None:
    """A warning if something is wrong with a prompt that was rendered as `text`."""
    last, bos, shown = chat[-1], tokenizer.bos_token, _short(text)
    if marks := sorted({mark for message in chat for mark in special if mark in str(message["content"])}):
        evidence = f"a prompt holds {', '.join(marks)} already, so the template is applied twice: {shown}"
        return warning(evidence, "store plain messages, without the template's own markers")
    if str(last["content"]).strip() not in text:
        evidence = f"the template drops the content of the last message: {shown}"
        return warning(evidence, "use another chat template")
    if last["role"] == "assistant":
        evidence = f"a prompt ends with an assistant's message: {shown}"
        return warning(evidence, "end prompts with a user's message")
    if bos and text.startswith(2 * str(bos)):
        return warning(f"the template starts with {bos} twice: {shown}", "correct the template")
    return None


def _short(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= 120 else f"{shown[:60]} ... {shown[-55:]}"


def check_end_tokens(context: CheckContext) -> Iterator[Finding]:
    """Generation stops at the model's end tokens; the template must close an answer with one of them."""
    rollout, tokenizer = context.config.actor_rollout_ref.rollout, context.tokenizer
    if rollout.ignore_eos and not rollout.stop_token_ids and not stop_strings(rollout.stop):
        yield note(f"{ROLLOUT}.ignore_eos=true: every response runs to data.max_response_length")
        return
    ends = list(rollout.stop_token_ids)
    if not rollout.ignore_eos:
        ends = [*end_tokens(load_generation_config(context.own_model()), context.model_config), *ends]
    yield from judge_ends(tokenizer, ends, vocabulary=context.model_config.get_text_config().vocab_size)


def judge_ends(
    tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], *, vocabulary: int
) -> Iterator[Finding]:
    """`ends`: tokens at which generation stops. `vocabulary`: size of the model's vocabulary."""
    named = ", ".join(f"{token} {_token_text(tokenizer, token)}" for token in ends) or "none"
    if beyond := [token for token in ends if not 0 <= token < vocabulary]:
        evidence = f"end tokens {beyond} are not among the model's {vocabulary} tokens"
        yield problem(evidence, "correct eos_token_id in generation_config.json")
        return
    closing, eos = turn_end(tokenizer), tokenizer.eos_token_id
    others = {"the chat template's end of an answer": closing, "the tokenizer's end token": eos}
    unknown = {words: token for words, token in others.items() if token is not None and token not in ends}
    if not ends and not unknown:
        evidence = "no end token is known: every response runs to data.max_response_length"
        yield warning(evidence, f"{ROLLOUT}.stop_token_ids=[...]")
    for token in dict.fromkeys(unknown.values()):
        words = " and ".join(words for words, found in unknown.items() if found == token)
        remedy = f"{ROLLOUT}.stop_token_ids=[{token}], or add it to eos_token_id in generation_config.json"
        seen = f"generation stops at {named}, but {words} is {token} {_token_text(tokenizer, token)}"
        yield warning(seen, remedy)
    if ends and not unknown:
        closes = "none" if closing is None else "one of them"
        yield ok(f"generation stops at {named}; the template closes an answer with {closes}")


def turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token with which the chat template closes an assistant's message; None: no
    special token, or the template does not accept such a message."""
    if not tokenizer.chat_template:
        return None
    chat = [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": SENTINEL}]
    try:
        text = str(tokenizer.apply_chat_template(chat, tokenize=False))
    except TemplateError:
        return None
    tail = text.rpartition(SENTINEL)[2]
    special = set(tokenizer.all_special_ids)
    ends = tokenizer.encode(tail, add_special_tokens=False)
    return next((token for token in ends if token in special), None)


def _token_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    return str(tokenizer.convert_ids_to_tokens(token))
