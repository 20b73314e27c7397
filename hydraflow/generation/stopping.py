"""Ends responses at stop strings: finds the token that completes the first one in a response's text.

In: a tokenizer, and a response's tokens one at a time. Out: whether it ends with this one. The tokens of a
response are kept up to and including that one, as vLLM does, although its text may continue after the string.
Special tokens are text, too. Left out on purpose: tokenizers that cannot decode token by token; and vLLM's
engine, which finds stop strings itself (`vllm/v1/engine/detokenizer.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase, TokenizersBackend

from hydraflow.errors import ConfigError, shown
from hydraflow.generation.base import SamplingParams
from hydraflow.generation.config import SamplingConfig, every_stop_string

_CHARACTER = 4
"""Maximum number of tokens that one character takes."""
_HALF = "\ufffd"
"""What bytes decode to while a character is incomplete."""
_BROKEN = "Invalid prefix encountered"
"""Start of the library's error message after invalid bytes have corrupted the stream's state."""


class StopStrings:
    """Watches one response."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        strings: Sequence[str],
        context: Sequence[int],
        sampled: Sequence[int] = (),
    ):
        """context: the prompt, on which the text of the first tokens depends. sampled: tokens that the
        response has already."""
        self._tokenizer, self._strings = tokenizer, tuple(strings)
        whole = _whole_characters(tokenizer, context)
        self.stream = DecodeStream(ids=list(context[:whole]), skip_special_tokens=False)
        for token in context[whole:]:
            self._decoded(token)
        # a string that starts before the last len - 1 characters would be complete already
        self._kept = max(map(len, strings)) - 1
        self.text = ""
        """The end of the response's text, in which a stop string may have started."""
        for token in sampled:
            self.ends_with(token)

    def ends_with(self, token: int) -> bool:
        """Whether a stop string is complete with the response's next token."""
        text = self.text + self._decoded(token)
        self.text = text[-self._kept :] if self._kept else ""
        return any(string in text for string in self._strings)

    def length(self, tokens: Sequence[int]) -> int | None:
        """Number of the response's next tokens up to the first stop string; None: they complete none."""
        return next((place for place, token in enumerate(tokens, start=1) if self.ends_with(token)), None)

    def _decoded(self, token: int) -> str:
        """The text that a token adds; empty while bytes of a character are missing."""
        try:
            return self.stream.step(self._tokenizer, token) or ""
        except Exception as error:  # the library raises plain Exception
            if str(error).startswith(_BROKEN):
                self.stream = DecodeStream(skip_special_tokens=False)  # as vLLM does
                return self.stream.step(self._tokenizer, token) or ""
            raise


def watched(
    tokenizer: TokenizersBackend | None, params: SamplingParams, prompt: Sequence[int], sampled: Sequence[int]
) -> StopStrings:
    """The matcher of a response for the stop strings of `params`."""
    assert tokenizer is not None, "`Limits.require` has checked it"
    return StopStrings(tokenizer.backend_tokenizer, params.stop, prompt, sampled)


def streaming_tokenizer(
    tokenizer: PreTrainedTokenizerBase, rollout: SamplingConfig, *, section: str
) -> TokenizersBackend:
    """The tokenizer for a rollout's stop strings. section: the configuration key of `rollout`.
    ConfigError: a tokenizer that does not decode token by token."""
    if isinstance(tokenizer, TokenizersBackend):
        return tokenizer
    rule = "needs a tokenizer of the tokenizers library (tokenizer.json);"
    rule += f" the model's is a {type(tokenizer).__name__}"
    model = f"{section.removesuffix('rollout')}model"
    remedy = f"{section}.stop_token_ids=[...], or {model}.tokenizer_path=..."
    raise ConfigError.one(f"{section}.stop", shown(list(every_stop_string(rollout))), rule, remedy)


def _whole_characters(tokenizer: Tokenizer, tokens: Sequence[int]) -> int:
    """How many leading tokens end on a character boundary. A stream that started within a character would
    report the whole context as new text."""
    count = len(tokens)
    while count and tokenizer.decode(tokens[:count][-_CHARACTER:], skip_special_tokens=False).endswith(_HALF):
        count -= 1
    return count
