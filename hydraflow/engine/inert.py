"""Stand-ins for the types that pickled checkpoints name: they keep the file's values and do nothing.

In: names that a file may use. Out: records with the file's values. torch.distributed is not imported, so
files of other versions can be read.
"""

from __future__ import annotations

from typing import Any


class InertRecord:
    """An unpickled object of any type: its state, as attributes where it has names."""

    def __new__(cls, *_: Any, **__: Any) -> InertRecord:
        """Accepts any arguments, as unpickling may pass them."""
        return super().__new__(cls)

    state: Any = None
    """State that is not a dictionary of attributes."""

    def __setstate__(self, state: Any) -> None:
        """Called by pickle to restore the state."""
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state

    def __getattr__(self, name: str) -> Any:
        """For the type checker: attributes are those that the file sets. Called only for missing ones."""
        raise AttributeError(name)


def record_type(name: str) -> type[InertRecord]:
    return type(name, (InertRecord,), {})
