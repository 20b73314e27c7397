"""The batch script of a submission: examples/slurm/ppo.sbatch with its lines filled in.

In: the example's text, directives for sbatch, settings. Out: the text of a script that runs without this
package on the submitting side. Left out on purpose: checking the request (`submit.py`), and what the
script does (`scripts/slurm/job.sh`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from hydraflow.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]
_PLAIN = re.compile(r"[^\s'\"#\\]+")
_QUOTED = re.compile(r"""\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'""")
_ARGUMENTS = re.compile(r"^ARGUMENTS=\(\n.*?^\)\n", re.MULTILINE | re.DOTALL)


def shipped(name: str) -> Path:
    """A file or folder of ours, `scripts/slurm` or `examples/slurm/...`: in the package when installed, else
    beside it in a clone."""
    candidates = [_PACKAGE / name, _PACKAGE.parent / name]
    for path in candidates:
        if path.exists():
            return path
    rule = f"is neither in {candidates[0].parent} nor in {candidates[1].parent}"
    raise ConfigError.one(name, None, rule, "install hydraflow again")


def fill(
    template: str,
    directives: Mapping[str, str | None],
    settings: Mapping[str, str],
    sweep: Sequence[Sequence[str]],
) -> str:
    """The script. directives: option of sbatch -> its value, empty for one without, None to leave it out.
    settings: variable -> value. sweep: the arguments of each job; several jobs make an array.
    """
    for option, value in directives.items():
        template = _with_directive(template, option, value)
    for name, text in settings.items():
        template = _with_setting(template, name, text)
    words = "".join(f"    {shlex.quote(word)}\n" for word in sweep[0])
    block = f"ARGUMENTS=(\n{words})\n"
    if len(sweep) > 1:
        lists = enumerate(map(shlex.join, sweep))
        cases = "".join(f"    {number}) ARGUMENTS=({words}) ;;\n" for number, words in lists)
        block = f'case "$SLURM_ARRAY_TASK_ID" in\n{cases}esac\n'
    filled, count = _ARGUMENTS.subn(lambda _: block, template)
    assert count == 1, "the template has one list of arguments"
    return filled


def _with_directive(template: str, option: str, value: str | None) -> str:
    """The template with `#SBATCH option=value` in place of its own line, or after its last one."""
    line = f"#SBATCH {option}={quoted(value)}" if value else f"#SBATCH {option}"
    pattern = re.compile(rf"^#SBATCH {re.escape(option)}(?:[= ].*)?$\n?", re.MULTILINE)
    if value is None:
        return pattern.sub("", template)
    if pattern.search(template):
        return pattern.sub(lambda _: f"{line}\n", template)
    last = [found.end() for found in re.finditer(r"^#SBATCH .*$\n", template, re.MULTILINE)][-1]
    return f"{template[:last]}{line}\n{template[last:]}"


def quoted(value: str) -> str:
    """A value as sbatch reads it from a script: in double quotes where it has spaces, quotes or a #. A
    backslash, in quotes or not, escapes the next character.

    >>> print(quoted("gpu,long"), quoted("two words"), quoted('say "no"'))
    gpu,long "two words" "say \\"no\\""
    """
    if _PLAIN.fullmatch(value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def unquoted(value: str) -> str:
    """A value without the quotes and escapes of a script.

    >>> unquoted('"say \\\\"no\\\\""'), unquoted("two words")
    ('say "no"', 'two words')
    """
    return re.sub(r"\\(.)", r"\1", value[1:-1]) if _QUOTED.fullmatch(value) else value


def _with_setting(template: str, name: str, value: str) -> str:
    """The template with `export name=value` in place of its own line, which may be a comment."""
    line = f"export {name}={shlex.quote(value)}"
    filled, count = re.subn(rf"(?m)^(?:# )?export {name}=.*$", lambda _: line, template)
    assert count == 1, f"the template has {count} lines for {name}"
    return filled
