"""The one file that main_generate and main_eval write: proven writable before the work, there only when the
work is done.

In: `output.path`. Out: a temporary file beside it, which is renamed to it at the end. An existing file stays
until then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydraflow.errors import ConfigError
from hydraflow.system.whole_files import prove_writable, replacing


@contextmanager
def output_file(path: str, *, ending: str = "") -> Iterator[Path]:
    """A file to write to. It is renamed to `path` if the block succeeds, else removed. ConfigError as in
    `require_output`."""
    require_output(path, ending=ending)
    target = Path(path).expanduser()
    with replacing(target) as unfinished:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            unfinished.touch()
        except OSError as error:
            raise _unwritable(path, error.strerror) from error
        yield unfinished


def require_output(path: str, *, ending: str = "") -> None:
    """Raises ConfigError when `path` has another `ending` or cannot be written; leaves nothing behind."""
    target = Path(path).expanduser()
    if target.is_dir():
        raise _unwritable(path, "it is a folder")
    if ending and target.suffix != ending:
        remedy = f"output.path={target.with_suffix(ending)}"
        raise ConfigError.one("output.path", path, f"must end in {ending}", remedy)
    try:
        prove_writable(target.absolute().parent)
    except OSError as error:
        raise _unwritable(path, error.strerror) from error


def _unwritable(path: str, reason: str | None) -> ConfigError:
    rule = f"cannot be written ({reason})"
    return ConfigError.one("output.path", path, rule, "output.path=<a file you may write>")
