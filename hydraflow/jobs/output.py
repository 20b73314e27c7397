"""The output file of main_generate and main_eval: checked to be writable before the work, written only after
it.

In: `output.path`. Out: a temporary file beside it, which is renamed to it at the end. An existing file stays
until then.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydraflow.errors import ConfigError
from hydraflow.system.paths import expanded, require_writable, unwritable
from hydraflow.system.whole_files import replacing

KEY = "output.path"


@contextmanager
def output_file(path: str, *, ending: str = "") -> Iterator[Path]:
    """A file to write to, which is renamed to `path` if the block succeeds, else removed. ConfigError as in
    `require_output`."""
    require_output(path, ending=ending)
    target = expanded(path)
    with replacing(target) as unfinished:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            unfinished.touch()
        except OSError as error:
            raise unwritable(path, KEY, error) from error
        yield unfinished


def require_output(path: str, *, ending: str = "") -> None:
    """Raises ConfigError when `path` has another `ending` or cannot be written; leaves nothing behind."""
    target = expanded(path)
    if ending and target.suffix != ending and not os.path.isdir(target):
        raise ConfigError.one(KEY, path, f"must end in {ending}", f"{KEY}={target.with_suffix(ending)}")
    require_writable(path, KEY)
