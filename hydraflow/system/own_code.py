"""User code: functions in files, as `path.py:name`, and modules to import.

In: names from the configuration. Out: a function's parameters, parsed without running the file; the function
itself; or a `ConfigError` that says what is wrong. Left out on purpose: importing in a separate process
before a run starts (`jobs/own_code.py`), and the use of the functions. Standard library only.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from hydraflow.errors import ConfigError

MOST_CAUSE = 500
"""Maximum length of a reported error, in characters."""


@dataclass(frozen=True)
class Parameters:
    """The parameters of a function."""

    names: tuple[str, ...] = ()
    """In order, without *args and **kwargs."""
    optional: frozenset[str] = frozenset()
    """Those with a default."""


@dataclass(frozen=True)
class OwnFunction:
    """A function in a file."""

    path: Path
    """Absolute."""
    name: str

    @classmethod
    def named(cls, text: object) -> OwnFunction | None:
        """From `path.py:name`; None for anything else.

        >>> OwnFunction.named("/code/mine.py:loss")
        OwnFunction(path=PosixPath('/code/mine.py'), name='loss')
        >>> OwnFunction.named("vanilla"), OwnFunction.named("mine.py:"), OwnFunction.named("mine:loss")
        (None, None, None)
        """
        path, _, name = str(text).rpartition(":")
        if not path.endswith(".py") or not name.isidentifier():
            return None
        return cls(Path(os.path.expanduser(path)).absolute(), name)

    def parameters(self) -> Parameters:
        """Parsed from the source; nothing is run. Raises OSError when the file cannot be read, ValueError
        when it cannot be parsed or has no such function."""
        try:
            tree = ast.parse(self.path.read_bytes())
        except (SyntaxError, ValueError) as error:
            where = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
            raise ValueError(f"is not Python: {getattr(error, 'msg', error)}{where}") from error
        defined = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        if any(isinstance(node, ast.AsyncFunctionDef) and node.name == self.name for node in tree.body):
            raise ValueError("is an async function; make it a plain one (def)")
        if self.name not in defined:
            raise ValueError(f"the file defines no such function; it has {', '.join(defined) or 'none'}")
        return _parameters(defined[self.name].args)

    def load(self) -> Any:
        """The function itself. Raises ConfigError if the file cannot be imported."""
        found = getattr(_module(self.path), self.name, None)
        if not callable(found):
            raise ConfigError.one(f"{self.path}:{self.name}", None, "is not a function")
        return found


def parameters_of(text: str) -> Parameters:
    """The parameters of the function `path.py:name`; empty if it cannot be read."""
    function = OwnFunction.named(text)
    try:
        return function.parameters() if function else Parameters()
    except (OSError, ValueError):
        return Parameters()


def import_modules(names: str | Sequence[str] | None, field: str) -> None:
    """Imports modules by name. Raises ConfigError for one that cannot be imported; `field`: their key."""
    for name in [names] if isinstance(names, str) else names or ():
        try:
            with redirect_stdout(sys.stderr):  # a command's stdout is reserved for its report
                importlib.import_module(name)
        except (Exception, SystemExit) as error:  # the user's module may raise anything
            rule = f"cannot be imported: {in_short(error)}"
            remedy = "install it, or add its folder to PYTHONPATH"
            raise ConfigError.one(field, name, rule, remedy) from error


def line_of(error: BaseException, path: Path) -> str:
    """The line of the user's file, an absolute path, that raised, such as `line 7: return table[key]`; empty
    if the file is not in the traceback."""
    if isinstance(error, SyntaxError):
        return ""  # its message names file and line
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path]
    return f"line {frames[-1].lineno}: {frames[-1].line}" if frames else ""


def with_line(error: BaseException, path: Path) -> str:
    """The error with the line of the user's file that raised it.

    >>> with_line(KeyError("x"), Path("/code/mine.py"))
    "KeyError: 'x'"
    """
    where = f" ({line})" if (line := line_of(error, path)) else ""
    return f"{in_short(error)}{where}"


def in_short(error: BaseException) -> str:
    """Class and message of an error of the user's code, at most MOST_CAUSE characters.

    >>> in_short(ValueError("x" * 1000))[:20], len(in_short(ValueError("x" * 1000)))
    ('ValueError: xxxxxxxx', 500)
    """
    try:
        return f"{type(error).__name__}: {error}"[:MOST_CAUSE]
    except Exception:  # its __str__ is the user's code, too
        return type(error).__name__


def import_file(path: Path, *, module: str, field: str, value: object = None) -> ModuleType:
    """Imports the user's file at this absolute path as `module`. Raises ConfigError if it cannot be imported;
    `field` and `value`: the key that names it, for the message."""
    spec = importlib.util.spec_from_file_location(module, path)
    if spec is None or spec.loader is None:
        raise ConfigError.one(field, value, "is not a Python file", "its name must end in .py")
    found = importlib.util.module_from_spec(spec)
    sys.modules[module] = found  # dataclasses and pickle look the module up by name
    try:
        with redirect_stdout(sys.stderr):  # a command's stdout is reserved for its report
            spec.loader.exec_module(found)
    except (Exception, SystemExit) as error:  # the user's file may raise anything; it becomes our message
        raise ConfigError.one(field, value, f"cannot be imported: {with_line(error, path)}") from error
    return found


def _parameters(arguments: ast.arguments) -> Parameters:
    in_order = [*arguments.posonlyargs, *arguments.args]
    optional = {argument.arg for argument in in_order[len(in_order) - len(arguments.defaults) :]}
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    optional |= {argument.arg for argument, default in named if default is not None}
    names = tuple(argument.arg for argument in [*in_order, *arguments.kwonlyargs])
    return Parameters(names, frozenset(optional))


@cache
def _module(path: Path) -> ModuleType:
    """The file as a module, imported once in a process."""
    name = f"hydraflow_own_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    return import_file(path, module=name, field=str(path))
