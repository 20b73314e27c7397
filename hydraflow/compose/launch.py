"""Runs an entry point with the configuration of its command line, or with each configuration of a sweep.

In: the arguments of the process, a schema, a function to run. Out: an exit code; all mistakes in one message
on stderr, with exit code 2. Left out on purpose: composing and checking a configuration (`loading.py`).
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import hydra
import yaml
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.hydra import Hydra
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hydraflow.compose.arguments import CONFIG_PATH, Arguments, CommandLineOption, split
from hydraflow.compose.command import Command
from hydraflow.compose.command_words import public_words
from hydraflow.compose.hydra_errors import translated, unusable_path
from hydraflow.compose.keys import describe, known_keys, nearest_keys, wrapped
from hydraflow.compose.loading import VERSION_BASE, ComposedConfig, EntryPoint, finish, register
from hydraflow.compose.overrides import PreparedCommandLine, config_folder, groups_in, prepare, swept_keys
from hydraflow.compose.own_files import take, unreadable
from hydraflow.errors import ConfigError, HydraflowError
from hydraflow.redact import public_text
from hydraflow.system.interrupts import INTERRUPTED, TERMINATED, is_hidden_interrupt, say_interrupted
from hydraflow.system.printing import make_printable, reader_may_leave

Config = TypeVar("Config")
Run = Callable[[Config, Command], int | None]

_QUIET = {
    "hydra/job_logging": "none",
    "hydra/hydra_logging": "none",
    "hydra.run.dir": ".",
    "hydra.output_subdir": "null",
    "hydra.sweep.subdir": ".",
}
"""Hydra writes no logs, folders or copies of the configuration; a sweep writes one multirun.yaml."""
_COMPLETION = r"""_hydraflow_completion()
{
    local words=($COMP_LINE)
    if [[ "${words[1]}" != "-m" || "${words[2]}" != hydraflow.* ]]; then
        COMPREPLY=($(compgen -o default -- "${COMP_WORDS[COMP_CWORD]}"))
        return
    fi
    local line="app ${words[*]:3}"
    [[ "$COMP_LINE" == *" " ]] && line="$line "
    local word=""
    [[ "$COMP_LINE" == *" " ]] || word="${words[-1]}"
    local found="$(COMP_LINE="$line" "${words[0]}" -m "${words[2]}" -sc query=bash 2>/dev/null)"
    COMPREPLY=($(compgen -W "$found" -- "$word"))
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
complete -o nospace -o default -F _hydraflow_completion python python3"""
"""Bash code for `eval "$(python -m hydraflow.main_ppo -sc install=bash)"`. Hydra's own code completes
`python file.py` and installed programs; this completes `python -m hydraflow.<name>`, with Hydra's
candidates."""


def launch(entry: EntryPoint[Config], run: Run[Config]) -> int:
    """Calls `run(config, command)` for the command line, or for each configuration of a sweep; returns the
    first exit code that is not 0, else 0.

    Use: `command(lambda: launch(EntryPoint("ppo", PPOConfig), run))` with `command` of
    `system/interrupts.py`; plain `sys.exit` for a command that starts no processes.
    """
    make_printable()
    arguments = split(sys.argv[1:], entry.options)
    if arguments.has("--help", "-h"):
        return run_guarded(partial(_print_help, entry, arguments.overrides))
    if arguments.has("--shell-completion", "-sc") and arguments.overrides == ["install=bash"]:
        print(_COMPLETION)
        return 0
    entry = replace(entry, switches=arguments.switches, words=tuple(public_words(sys.orig_argv)))
    launched = _Launch(entry, arguments, run)
    code = run_guarded(launched.run, entry.show_error)
    return code or next((code for code in launched.codes if code), 0)


def run_guarded(
    work: Callable[[], int | None], show_error: Callable[[HydraflowError], None] | None = None
) -> int:
    """Runs `work` and returns its exit code. For user errors, prints the message on stderr, or by
    `show_error`, and returns the error's exit code.

    HYDRAFLOW_FULL_ERROR=1 in the environment also prints the stack trace. Internal errors propagate.
    """
    try:
        return work() or 0
    except HydraflowError as error:
        if os.environ.get("HYDRAFLOW_FULL_ERROR") == "1":
            print(public_text(traceback.format_exc()), end="", file=sys.stderr)
        if show_error is not None:
            show_error(error)
        else:
            print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return say_interrupted()
    except Exception as error:
        if is_hidden_interrupt(error):
            return say_interrupted()
        raise


def _print_help(entry: EntryPoint[Any], words: Sequence[str]) -> int:
    """`words`: keys or sections to describe; none: all of them. Raises ConfigError for an unknown one."""
    if words == ["verl"]:
        from hydraflow.compose.verl_page import page  # only this needs the tables

        text = page(entry.schema)
    elif words:
        text = "\n".join(_help_on(entry.schema, word.lstrip("+~").partition("=")[0]) for word in words)
    else:
        text = help_text(entry.config_name, entry.schema, entry.options)
    with reader_may_leave():
        print(text)
    return 0


def _help_on(schema: type, name: str) -> str:
    if name in known_keys(schema):
        return describe(schema, name).lstrip("\n")
    remedies = [f"--help {key}" for key in nearest_keys(schema, name)]
    remedy = " or ".join(remedies) or "--help lists all keys"
    raise ConfigError.one(f"--help {name}", None, "there is no such key", remedy)


def help_text(config_name: str, schema: type, options: Sequence[CommandLineOption] = ()) -> str:
    """The text of `--help`: usage, groups and their choices, every key with its default and meaning."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    is_ours = spec and spec.name.startswith("hydraflow.")
    command = f"python -m {spec.name}" if spec and is_ours else schema.__doc__  # commands share schemas
    groups = groups_in([config_folder(config_name)], schema).items()
    lines = [
        f"{command} [options] [key=value ...]",
        *wrapped(
            "Settings: key=value, one for each key below; lists as key=[a,b]; +key=value and ++key=value mean"
            " the same.",
            rest=10,
        ),
        *wrapped(
            "Options:  --cfg job prints the configuration; --multirun runs key=a,b once for each value;"
            " --config-dir DIR and --config-name NAME take your own YAML file (start it with `defaults:"
            f" [{config_name}, _self_]`); --info shows where values come from; --help KEY describes"
            " a key or a section; --help verl lists how each of verl's keys is handled; --hydra-help lists"
            " the rest.",
            rest=10,
        ),
        *(line for one in options for line in _help_of(one)),
        *(["\nGroups:"] if groups else []),
        *(f"  {group}={'|'.join(choices)}" for group, choices in groups),
        "",
        *wrapped(
            "Keys, with the defaults for your own data. The recipe, which runs without any, sets others:"
            " --cfg job shows what is in force."
            if config_name == "ppo"
            else "Keys:"
        ),
        "",
    ]
    return "\n".join(lines) + describe(schema)


def _help_of(option: CommandLineOption) -> list[str]:
    name = f"{option.name} {option.value}".rstrip()
    paragraphs = f"{name}  {option.doc}".splitlines()
    return [line for text in paragraphs for line in wrapped(text.strip(), first=10, rest=12)]


class _Launch(Generic[Config]):
    """Runs a command line through Hydra, which calls `_composed` with each configuration."""

    def __init__(self, entry: EntryPoint[Config], arguments: Arguments, run: Run[Config]):
        self.entry, self.arguments, self._run_job = entry, arguments, run
        self.codes: list[int] = []
        """The exit code of each job."""
        self._prepared = PreparedCommandLine()
        self._shown: tuple[str, bool] | None = None
        """For `--cfg job`: see `_take_what_to_show`."""
        self._has_composed = False

    def run(self) -> None:
        """Runs each configuration, or handles Hydra's own options."""
        entry, arguments = self.entry, self.arguments
        _require_working_folder()
        folders = take(arguments, config_folder(entry.config_name), entry.schema)
        self._shown = _take_what_to_show(arguments)
        self._prepared = prepare(entry.config_name, entry.schema, arguments, folders)
        problems = self._prepared.problems
        if problems and (arguments.multirun or not arguments.runs):
            raise ConfigError(problems)
        register(entry, folders)
        folder = str(config_folder(entry.config_name))
        main = hydra.main(version_base=VERSION_BASE, config_path=folder, config_name=entry.config_name)
        sys.argv[1:] = self._words_for_hydra()
        # otherwise Hydra prints errors itself and exits with 1
        os.environ["HYDRA_FULL_ERROR"] = "1"
        # it logs each run of a sweep with all of its settings, and these may hold secrets
        logging.getLogger(BasicLauncher.__module__).setLevel(logging.WARNING)
        if prints := arguments.has("--info", "-i"):
            logging.raiseExceptions = False  # Hydra prints with a logger, and the reader may leave
        try:
            with reader_may_leave() if prints else nullcontext(), self._composed_once():
                main(self._composed)()
        except HydraflowError:
            raise
        except SystemExit as error:
            if self._has_composed or error.code != 1:
                raise
            self.codes.append(ConfigError.exit_code)  # Hydra has printed what it cannot show
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            if self._has_composed:
                raise  # from the job, not from reading the configuration
            raise ConfigError([*problems, unreadable(error, self._prepared.folders)]) from error
        except (HydraException, OmegaConfBaseException, ValueError, RecursionError) as error:
            if self._has_composed and not isinstance(error, HydraException | OmegaConfBaseException):
                raise
            # before composition, ValueError and RecursionError also come from Hydra, about a defaults list
            raise ConfigError([*problems, translated(error, self._prepared.files)]) from error
        except OSError as error:
            if self._has_composed or error.filename is None:
                raise  # from the job
            raise ConfigError([*problems, unusable_path(error, sweeps=arguments.multirun)]) from error

    @contextmanager
    def _composed_once(self) -> Iterator[None]:
        """Skips the composition, 0.2 s, that Hydra does only to read `hydra.mode`, unless the command line or
        a file of the user's could set it."""
        own = self._prepared.folders or self.arguments.has(*CONFIG_PATH)  # pkg://... is no folder
        read = Hydra.get_mode
        if not own and not any(word.lstrip("+~").startswith("hydra") for word in self._prepared.words):
            Hydra.get_mode = lambda *_, **__: None  # type: ignore[method-assign]
        try:
            yield
        finally:
            Hydra.get_mode = read  # type: ignore[method-assign]

    def _words_for_hydra(self) -> list[str]:
        words = self._prepared.words
        if self.arguments.has("--shell-completion", "-sc"):
            return [*self.arguments.options, *self.arguments.overrides]
        if self.arguments.has("--hydra-help", "--version"):  # these compose no configuration
            return self.arguments.options
        keys = {word.partition("=")[0].lstrip("+") for word in words}
        quiet = _QUIET | {"hydra.job.name": self.entry.config_name}
        return [
            *self.arguments.options,
            *words,
            *(f"{key}={value}" for key, value in quiet.items() if key not in keys),
        ]

    def _composed(self, composed: DictConfig) -> int:
        """Shows a composed configuration, or runs with it; returns the exit code."""
        self._has_composed = True
        facts = HydraConfig.get()
        sweep = Path(facts.sweep.dir) / "multirun.yaml"
        if facts.mode == RunMode.MULTIRUN and sweep.is_file():
            sweep.chmod(0o600)  # Hydra wrote the overrides to it, and they may hold secrets
        if facts.mode == RunMode.MULTIRUN and self._shown is None:
            keys = swept_keys(self._prepared.words)
            swept = [str(word) for word in facts.overrides.task if word.lstrip("+").partition("=")[0] in keys]
            own = " ".join(word.lstrip("+") for word in public_words(swept)) or "nothing is swept"
            print(f"run {facts.job.num} of the sweep: {own}", file=sys.stderr)
        work = self._run_one if self._shown is None else self._show_one
        code = run_guarded(partial(work, composed, facts), self.entry.show_error)
        self.codes.append(code)
        if code in (INTERRUPTED, TERMINATED):
            sys.exit(code)
        return code

    def _run_one(self, composed: DictConfig, facts: HydraConf) -> int:
        one = self._finished(composed, facts)
        if not self.entry.tolerant:
            print(*(f"note: {note}\n" for note in one.command.notes), sep="", end="", file=sys.stderr)
        return self._run_job(one.config, one.command) or 0

    def _show_one(self, composed: DictConfig, facts: HydraConf) -> int:
        assert self._shown is not None
        (package, resolve), one = self._shown, self._finished(composed, facts, only_keys=True)
        whole = OmegaConf.create(asdict(cast(Any, one.config)) if resolve else one.tree)
        section = OmegaConf.select(whole, package) if package not in ("", "_global_") else whole
        if section is None:
            raise ConfigError.one(f"--package {package}", None, "there is no such section", "--package data")
        header = f"# @package {package}\n" if package else ""
        text = OmegaConf.to_yaml(section) if OmegaConf.is_config(section) else f"{section}\n"
        with reader_may_leave():
            print(header + text, end="")
        return 0

    def _finished(
        self, composed: DictConfig, facts: HydraConf, *, only_keys: bool = False
    ) -> ComposedConfig[Config]:
        # `${...}` in an override can be resolved only in the configuration, not in this list
        words = cast("list[str]", OmegaConf.to_container(cast(Any, facts.overrides.task), resolve=False))
        name = str(facts.job.config_name)
        return finish(self.entry, composed, self._prepared, name, words, only_keys=only_keys)


def _require_working_folder() -> None:
    try:
        Path.cwd()
    except OSError as error:
        rule = f"this shell is in a folder that no longer exists ({error.strerror})"
        raise ConfigError.one("current folder", None, rule, "cd to a folder that exists") from None


def _take_what_to_show(arguments: Arguments) -> tuple[str, bool] | None:
    """For `--cfg job`: the section to show (empty: all) and whether to resolve interpolations. Hydra itself
    would show verl's keys as written; we show them translated."""
    if arguments.value("--cfg", "-c") != "job":
        return None
    arguments.take("--cfg", "-c")
    resolve = arguments.take("--resolve") is not None
    return arguments.take("--package", "-p") or "", resolve
