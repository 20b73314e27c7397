"""What may be shown of a configuration, a command line or a message: everything but its secrets.

In: plain values or text. Out: the same with `(hidden)` in place of values whose key says that they are
secret, of all environment variables, of passwords in addresses, and of what looks like a credential under any
name. Standard library only. Left out on purpose: Hydra's grammar (`compose/command_words.py`).
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

HIDDEN = "(hidden)"
ENVIRONMENTS = {"env_vars", "env_set"}
"""Keys of mappings whose values are all hidden, because any environment variable may be a secret."""

_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
"""The words of a name: openaiApiKey, OPENAI_API_KEY and openai-api-key have the same three."""
_ANYWHERE = {
    *("password", "passwords", "passwd", "passphrase"),
    *("secret", "secrets", "credential", "credentials"),
}
"""Words that make a name secret wherever they are in it."""
_PAIRS = {("api", "key"), ("access", "key"), ("private", "key"), ("account", "key"), ("connection", "string")}
"""The same for two words in a row."""
_GLUED = (
    *("token", "secret", "password", "passwd", "passphrase"),
    *("apikey", "secretkey", "accesskey", "privatekey"),
)
"""The same for endings of the last word: mytoken."""
_LAST = {
    *("key", "auth", "authorization", "bearer", "cookie", "cookies"),
    *("jwt", "passcode", "pat", "pem", "pw", "signature"),
}
"""The same for last words."""
_LAST_UNLESS_A_NUMBER = {"keys", "tokens", "pass", "sig"}
"""Last words of secrets, unless the value is a number: max_tokens=512 counts tokens."""
_POINTERS = {"file", "path", "dir", "folder", "env", "length", "len"}
"""Last words of names that point to a secret or give its length, but do not hold it."""
_COLUMNS = {
    *("prompt_key", "response_key", "messages_key", "data_source_key"),
    *("reward_fn_key", "reward_model_key", "gdpo_reward_keys"),
    *("input_key", "output_key", "question_key", "answer_key", "text_key", "label_key"),
    *("chosen_key", "rejected_key", "margin_key", "prompt_dict_keys", "response_dict_keys"),
    *("tools_key", "enable_thinking_key", "image_key", "video_key", "audio_key"),
}
"""Keys that name a column of the data."""
_OF_A_VOCABULARY = {
    *("bos", "eos", "pad", "unk", "sep", "cls", "mask", "stop", "special", "begin", "end", "start", "new"),
    *("image", "video", "audio", "vision", "think", "thinking", "next", "first", "last", "bad"),
}
"""Words before `token` or `tokens` in names for tokens of a vocabulary, not credentials."""

# lengths are limited so that long words take time in proportion to their length
_ADDRESS = re.compile(
    r"(?P<before>[a-z][a-z0-9+.-]{0,63}://)"
    r"(?:[^/\s:]{0,255}:(?!\d+(?:/|\s|$))[^\s'\"]{0,16383}|[^/\s]{1,16383})@",
    re.IGNORECASE,
)
_WHOLE_ADDRESS = re.compile(
    r"\A(?P<before>[a-z][a-z0-9+.-]*://)[^/:]*:(?!\d+(?:/|\Z)).*@", re.IGNORECASE | re.DOTALL
)
"""If the whole value is an address, its password may have spaces."""
_WITHOUT_SCHEME = re.compile(
    r"(?<![\w/:.@%+-])[\w.%+-]+:(?!//)[^\s'\"{}\[\]=]+@(?!sha\d)"
    r"(?=[\w.-]+(?::\d+)?(?:[/\s'\",\]})]|$))"
)
"""user:password@host without a scheme, a common form for proxies."""
_LOOKS_SECRET = re.compile(
    r"""-----BEGIN\ [^-]+-----.*?(?:-----END\ [^-]+-----|\Z)
    |(?<![A-Za-z0-9])(?:
        hf_[A-Za-z0-9]{16,}
        |sk-(?=[\w-]*\d)[\w-]{16,}
        |gh[opsur]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}
        |(?:AKIA|ASIA)[A-Z0-9]{12,}
        |AIza[\w-]{30,}|xox[a-z]-[\w-]{10,}|nvapi-[\w-]{16,}|npm_[A-Za-z0-9]{30,}|wandb_v\d+_\w{16,}
        |eyJ[\w-]{6,}\.[\w-]{6,}\.[\w-]*
    )
    |(?<=\bBearer\ )[\w.~+/=-]{6,}|(?<=\bBasic\ )[A-Za-z0-9+/=]{8,}""",
    re.VERBOSE | re.DOTALL,
)
"""Credentials of well-known services, under any key; PEM blocks; the two usual Authorization headers."""

_ASSIGNED = re.compile(
    r"(?:(?<!\w)|(?<=\w{199}))(?P<quote>['\"]?)(?P<name>[A-Za-z_][\w.-]{0,199})(?P=quote)"
    r"(?P<sign>=(?!=)|[ \t]*:[ \t]*|[ \t]+=[ \t]+)"
)
_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_REFERENCE = r"\$\{[^{}]*\}"
_HIDDEN = r"\(hidden\)(?=[\s,\]})]|$)"
_TIGHT = re.compile(
    rf"{_HIDDEN}|[\[{{][^\]}}]*[\]}}]?|(?:{_REFERENCE}|{_QUOTED}|\\.|[^\s,\]}})])+", re.DOTALL
)
_SPACED = re.compile(
    rf"{_HIDDEN}|[\[{{][^\]}}]*[\]}}]?|(?:{_REFERENCE}|{_QUOTED}|\\.|[^,\]}}\n])+", re.DOTALL
)
"""The value after a sign of `_ASSIGNED`: `_TIGHT` ends at a space or comma,
`_SPACED` at a comma or the end of the line."""
_WORD = re.compile(r"(?P<before>[+~]*(?P<key>[\w.@:/-]+)=)(?P<value>.+)", re.DOTALL)
_NUMBERS = re.compile(r"[\d\s.,e+\[\]-]+")
_OPEN = re.compile(r"\$\{oc\.env:\w+\}|\(hidden\)|\{?\.\.\.\}?|null|true|false", re.IGNORECASE)
"""Harmless values under secret names: a reference to the environment, a placeholder, a switch."""
_FINGERPRINT = re.compile(r"(?P<public>.*\(hidden\).*) #[0-9a-f]{8}", re.DOTALL)
"""A value that `fingerprinted` has already hidden."""


def public(value: Any, key: str = "") -> Any:
    """The value of `key`, which may be dotted, without secrets.

    >>> public({"env_vars": {"A": "b"}, "wandb_proxy": "http://me:pw@host:3128", "max_tokens": 5})
    {'env_vars': {'A': '(hidden)'}, 'wandb_proxy': 'http://(hidden)@host:3128', 'max_tokens': 5}
    >>> public("${oc.env:HF_TOKEN}", "hub.token"), public("abc", "hub.token")
    ('${oc.env:HF_TOKEN}', '(hidden)')
    """
    return _each_leaf(value, key, _public_leaf)


def fingerprinted(value: Any, key: str = "") -> Any:
    """As `public`, but different values stay different: a hidden value leaves a few digits of its hash.

    They are too few to reveal a random secret, and slow to compute, which makes guessing weak secrets costly.

    >>> fingerprinted({"api_key": "one", "seed": 1}, "judge")
    {'api_key': '(hidden) #bc3dad32', 'seed': 1}
    """
    return _each_leaf(value, key, _fingerprinted_leaf)


def public_text(text: str) -> str:
    """A message, or any other text, without anything that looks secret.

    >>> public_text("https://host/?n=1&token=abc failed"), public_text("data.prompt_key=prompt max_tokens=5")
    ('https://host/?n=1&token=(hidden) failed', 'data.prompt_key=prompt max_tokens=5')
    """
    text = _LOOKS_SECRET.sub(HIDDEN, text)
    text = _ADDRESS.sub(_without_user, text)
    return _without_assigned(_WITHOUT_SCHEME.sub(f"{HIDDEN}@", text))


def public_word(word: str) -> str:
    """One word of a command line.

    >>> public_word("+x.WANDB_API_KEY=a b"), public_word("env_vars={A:b}"), public_word("data.prompt_key=p")
    ('+x.WANDB_API_KEY=(hidden)', 'env_vars=(hidden)', 'data.prompt_key=p')
    """
    whole = _WORD.fullmatch(word)
    if whole and _is_secret(whole["key"], whole["value"]):
        return f"{whole['before']}{HIDDEN}"
    return public_text(word)


def public_command(command: str) -> str:
    """A command line as one text, quoted for a shell."""
    try:
        return shlex.join(map(public_word, shlex.split(command)))
    except ValueError:  # not valid shell syntax
        return public_text(command)


def _without_user(found: re.Match[str]) -> str:
    return f"{found['before']}{HIDDEN}@"


def _each_leaf(value: Any, key: str, of: Callable[[Any, str], Any]) -> Any:
    if isinstance(value, Mapping):
        prefix = f"{key}." if key else ""
        return {str(name): _each_leaf(inner, f"{prefix}{name}", of) for name, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_each_leaf(inner, key, of) for inner in value]
    return of(value, key)


def _public_leaf(value: Any, key: str) -> Any:
    if isinstance(value, str) and (marked := _FINGERPRINT.fullmatch(value)):
        value = marked["public"]
    if _is_secret(key, value):
        return HIDDEN
    return public_text(_WHOLE_ADDRESS.sub(_without_user, value)) if isinstance(value, str) else value


def _fingerprinted_leaf(value: Any, key: str) -> Any:
    shown = _public_leaf(value, key)
    if shown == value or (isinstance(value, str) and _FINGERPRINT.fullmatch(value)):
        return value
    return f"{shown} #{_digits(str(value), key)}"


@cache
def _digits(value: str, key: str) -> str:
    password, salt = (text.encode(errors="surrogatepass") for text in (value, key))
    return hashlib.pbkdf2_hmac("sha256", password, salt, 20_000).hex()[:8]


def _is_secret(key: str, value: Any) -> bool:
    """Whether the value is secret, by the name of the key or of a section around it."""
    if value in (None, "") or isinstance(value, bool) or (isinstance(value, str) and _OPEN.fullmatch(value)):
        return False
    *sections, name = key.split(".")
    if name in ENVIRONMENTS or not ENVIRONMENTS.isdisjoint(sections) or any(map(_names_secret, sections)):
        return True
    return _names_secret(name, number=not isinstance(value, str) or _NUMBERS.fullmatch(value) is not None)


@cache
def _names_secret(name: str, *, number: bool = False) -> bool:
    """Whether a name without dots names a secret. `number`: its value is a number."""
    words = [word.lower() for word in _PARTS.findall(name)]
    if not words or name in _COLUMNS or words[-1] in _POINTERS:
        return False
    *before, last = words
    if last in ("token", "tokens") and before and before[-1] in _OF_A_VOCABULARY:
        return False
    if not _ANYWHERE.isdisjoint(words) or not _PAIRS.isdisjoint(zip(words, words[1:])):
        return True
    if last in _LAST_UNLESS_A_NUMBER:
        return not number
    if last == "pwd":
        return bool(before)  # MYSQL_PWD is a password, PWD the working folder
    return last in _LAST or last.endswith(_GLUED)


def _without_assigned(text: str) -> str:
    """The text without the values of secret names in it: name=value anywhere, "name": value, name: value."""
    kept, at = [], 0
    for found in _ASSIGNED.finditer(text):
        # a value may be long, so it is looked for only after a name that hides some values
        if found.start() < at or not _assigns_a_secret(found, "x"):
            continue
        value = (_TIGHT if found["sign"] == "=" else _SPACED).match(text, found.end())
        if value is not None and _assigns_a_secret(found, value[0]):
            kept += [text[at : found.end()], HIDDEN]
            at = value.end()
    return "".join([*kept, text[at:]])


def _assigns_a_secret(found: re.Match[str], value: str) -> bool:
    """`token: x` counts in a mapping, not in a sentence; HF_TOKEN: x and token=x count everywhere. key=x
    counts only in the query of an address, because messages write it for any key."""
    *sections, name = found["name"].split(".")
    before = found.string[: found.start()].rstrip(" \t")[-1:]
    in_a_sentence = found["sign"] != "=" and not found["quote"] and before not in ("", "{", ",", "\n")
    is_a_plain_word = name.islower() and name.isalpha() and name not in _ANYWHERE
    if name in ENVIRONMENTS or (in_a_sentence and is_a_plain_word):
        return False
    if name == "key" and not sections and found["sign"] == "=" and before not in ("?", "&"):
        return False
    environment = next((section for section in sections if section in ENVIRONMENTS), None)
    return _is_secret(f"{environment}.{name}" if environment else name, value.strip("'\" "))
