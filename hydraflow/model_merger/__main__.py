"""python -m hydraflow.model_merger merge|test|info|split: sharded checkpoints to Hugging Face directories and
back.

In: the command line. Out: the exit code: 0 success, 1 `test` found a difference or `info` a missing part, 2 a
mistake found before anything was written, 3 a fault found later, 130 interrupted.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hydraflow.errors import ConfigError, EnvironmentFault, HydraflowError
from hydraflow.model_merger import arguments
from hydraflow.system.interrupts import INTERRUPTED
from hydraflow.system.printing import make_printable, reader_may_leave

if TYPE_CHECKING:
    from hydraflow.model_merger.outputs import MergeOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code."""
    make_printable()
    args = arguments.parser().parse_args(argv)
    try:
        return _COMMANDS[args.command](args)
    except HydraflowError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(error, file=sys.stderr)
        return EnvironmentFault.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _merge(args: Namespace) -> int:
    from hydraflow.model_merger.merge import merge

    if args.private and args.hf_upload_path is None:
        rule = "applies to an upload, but none was requested"
        raise ConfigError.one("--private", None, rule, "--hf_upload_path <repository>")
    files = dict(most_bytes=args.max_shard_size, overwrite=args.overwrite, **_source(args))
    hub, options = dict(upload_to=args.hf_upload_path, private=args.private), _merge_options(args)
    _print(*merge(args.local_dir, args.target_dir, merge_options=options, **hub, **files))
    return 0


def _test(args: Namespace) -> int:
    from hydraflow.model_merger.compare import compare

    found = compare(args.local_dir, args.test_hf_dir, merge_options=_merge_options(args), **_source(args))
    _print(*found.lines())
    return 0 if found.same else 1


def _info(args: Namespace) -> int:
    from hydraflow.model_merger.info import facts_of, lines

    facts = facts_of(args.local_dir, verify=args.verify, **_source(args))
    text = "\n\n".join("\n".join(lines(model)) for model in facts)
    _print(json.dumps(facts, indent=2) if args.json else text)
    return 1 if any(model["problems"] for model in facts) else 0


def _split(args: Namespace) -> int:
    from hydraflow.model_merger.split import split

    options = {name: value for name, value in vars(args).items() if name != "command"}
    _print(*split(**options))
    return 0


def _print(*lines: str) -> None:
    with reader_may_leave():
        print(*lines, sep="\n")


def _source(args: Namespace) -> dict[str, Any]:
    return {"backend": args.backend, "hf_model_path": args.hf_model_path}


def _merge_options(args: Namespace) -> MergeOptions:
    from hydraflow.model_merger.outputs import MergeOptions

    names = ("dtype", "is_value_model", "tie_word_embedding", "trust_remote_code", "lora_alpha")
    return MergeOptions(**{name: getattr(args, name) for name in names}, lora=getattr(args, "lora", "merged"))


_COMMANDS: dict[str, Callable[[Namespace], int]] = {
    "merge": _merge,
    "test": _test,
    "info": _info,
    "split": _split,
}

if __name__ == "__main__":
    sys.exit(main())
