"""A checkpoint from elsewhere runs nothing when it is loaded; what torch writes is read as torch reads it."""

from __future__ import annotations

import enum
import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import rank_jobs as jobs
from engine.foreign import INDEX, OBJECT, REFUSED, WEIGHT, Payload, put_into_index, put_into_shard
from engine.pool import Ranks
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from hydraflow.engine import dcp_index
from hydraflow.engine.dcp_index import read_index
from hydraflow.engine.dcp_reader import RoleCheckpointReader
from hydraflow.errors import ConfigError, EnvironmentFault


@pytest.fixture
def checkpoint(tiny: str, tmp_path: Path) -> Path:
    """What one rank wrote after two steps."""
    jobs.write_checkpoint(tiny, {}, str(tmp_path / "actor"))
    return tmp_path / "actor"


def write_index(tmp_path: Path, content: bytes) -> Path:
    (tmp_path / "dcp").mkdir(exist_ok=True)
    (tmp_path / INDEX).write_bytes(content)
    return tmp_path


def test_code_in_the_index_is_not_run(checkpoint: Path, tiny: str, tmp_path: Path) -> None:
    put_into_index(checkpoint, tmp_path / "hacked")
    with pytest.raises(ConfigError, match=REFUSED) as caught:
        jobs.make_engine(tiny).load(checkpoint, jobs.CONTENTS)
    assert caught.value.exit_code == 2 and str(checkpoint / INDEX) in str(caught.value)
    assert not (tmp_path / "hacked").exists()


def test_a_weight_that_the_index_calls_an_object_is_not_unpickled(
    checkpoint: Path, tiny: str, tmp_path: Path
) -> None:
    put_into_shard(checkpoint, tmp_path / "hacked", as_object=True)
    with pytest.raises(ConfigError, match=OBJECT):
        jobs.make_engine(tiny).load(checkpoint, jobs.CONTENTS)
    assert not (tmp_path / "hacked").exists()


def test_code_in_a_shard_is_not_run(checkpoint: Path, tiny: str, tmp_path: Path) -> None:
    put_into_shard(checkpoint, tmp_path / "hacked", as_object=False)
    with pytest.raises(
        EnvironmentFault, match="rank 0: a shard holds more than tensors, which was not executed"
    ) as caught:
        jobs.make_engine(tiny).load(checkpoint, jobs.CONTENTS)
    assert "weights_only=False" not in str(caught.value), "torch's advice to trust the file"
    assert not (tmp_path / "hacked").exists()


VARIANTS: list[dict[str, Any]] = [{}, {"model": {"lora_rank": 2}}, {"head": "value"}]


@pytest.mark.parametrize("options", VARIANTS, ids=["policy", "lora", "value"])
def test_what_torch_writes_is_read_as_torch_reads_it(
    ranks: Ranks, tiny: str, tmp_path: Path, options: dict[str, Any]
) -> None:
    ranks.run(jobs.write_checkpoint, tiny, options, str(tmp_path))
    wanted: Metadata = pickle.loads((tmp_path / INDEX).read_bytes())
    got = RoleCheckpointReader(tmp_path).read_metadata()
    assert got.state_dict_metadata == wanted.state_dict_metadata
    assert got.storage_data == wanted.storage_data
    assert {place.relative_path for place in got.storage_data.values()} == {"__0_0.distcp", "__1_0.distcp"}


def test_enums_as_python_3_11_2_writes_them(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = pickle.loads((checkpoint / INDEX).read_bytes())
    wanted = read_index(checkpoint)
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", enum.pickle_by_enum_name)
    (checkpoint / INDEX).write_bytes(pickle.dumps(index))
    assert b"getattr" in (checkpoint / INDEX).read_bytes()
    assert read_index(checkpoint) == wanted


class Calls:
    """Pickles as a call of a function, or of what another call gives."""

    def __init__(self, function: Any, *arguments: Any):
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call

    def __call__(self) -> None:
        """pickle asks that it can be called."""


def global_name(module: str, name: str) -> bytes:
    """A pickle of protocol 4 that is nothing but this name, dots and all."""
    words = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name))
    return b"\x80\x04" + words + b"\x93."


NAMED = {
    "a function": ("builtins", "eval"),
    "a function of a module that has allowed names": ("torch.serialization", "load"),
    "what an allowed name leads to": (
        "torch.distributed.checkpoint.filesystem",
        "_StorageInfo.__init__.__globals__",
    ),
    "a name of torch that is no type of numbers": ("torch", "load"),
}


@pytest.mark.parametrize("named", NAMED)
def test_any_other_name_is_refused(tmp_path: Path, named: str) -> None:
    with pytest.raises(ConfigError, match="which no index holds; nothing was executed"):
        read_index(write_index(tmp_path, global_name(*NAMED[named])))


def test_allowed_names_do_nothing_when_they_are_called(tmp_path: Path) -> None:
    """getattr is allowed, since some versions of Python write enums with it, and stands for nothing."""
    reach = Calls(getattr, torch.Size, "__subclasses__")
    found = dcp_index._InertUnpickler(io.BytesIO(pickle.dumps(reach))).load()
    assert type(found).__name__ == "getattr" and not vars(found)
    with pytest.raises(ConfigError, match="not callable"):
        read_index(write_index(tmp_path, pickle.dumps(Calls(reach))))
    with pytest.raises(ConfigError, match="holds a PosixPath, not the index"):
        read_index(write_index(tmp_path, pickle.dumps(Path("/etc"))))


@pytest.mark.parametrize("opcode", [b"r\xff\xff\xff\x7f", b"p2147483647\n"])
def test_a_short_file_takes_little_memory(tmp_path: Path, opcode: bytes) -> None:
    """Pickle would fill its table of values up to that number: 32 GB."""
    with pytest.raises(ConfigError, match="its memo index 2147483647 is too large for"):
        read_index(write_index(tmp_path, b"\x80\x02N" + opcode + b"."))


def test_an_index_without_end_is_not_read(tmp_path: Path) -> None:
    os.truncate(write_index(tmp_path, b"") / INDEX, 2**40)
    with pytest.raises(
        ConfigError, match="is not the index of a distributed checkpoint: it has 1099511627776 bytes"
    ):
        read_index(tmp_path)


def _name_another_file(index: Metadata) -> None:
    next(iter(index.storage_data.values())).relative_path = "../secret"


def _start_before_the_file(index: Metadata) -> None:
    next(iter(index.storage_data.values())).offset = -1


def _compress(index: Metadata) -> None:
    next(iter(index.storage_data.values())).transform_descriptors = ["stream.zstd/1"]


def _lose_a_piece(index: Metadata) -> None:
    index.storage_data.pop(next(iter(index.storage_data)))


def _size_in_words(index: Metadata) -> None:
    index.state_dict_metadata[WEIGHT].size = "large"


def _no_type(index: Metadata) -> None:
    index.state_dict_metadata[WEIGHT].properties.dtype = "float32"


WRONG = {
    _name_another_file: "names the file '../secret', which is not beside it",
    _start_before_the_file: "expected a size, found a negative number",
    _compress: "is compressed or otherwise transformed",
    _lose_a_piece: "that is in no file",
    _size_in_words: "expected a shape, found a str",
    _no_type: f"the dtype of {WEIGHT} is a str",
}


@pytest.mark.parametrize("spoil", WRONG, ids=lambda spoil: spoil.__name__.strip("_"))
def test_values_that_make_no_sense_are_refused(checkpoint: Path, spoil: Any) -> None:
    index: Metadata = pickle.loads((checkpoint / INDEX).read_bytes())
    spoil(index)
    (checkpoint / INDEX).write_bytes(pickle.dumps(index))
    with pytest.raises(ConfigError, match=WRONG[spoil]):
        read_index(checkpoint)


def test_the_payload_of_these_tests_runs(tmp_path: Path) -> None:
    """Else they would pass whatever reads it."""
    pickle.loads(pickle.dumps(Payload(tmp_path / "hacked")))
    assert (tmp_path / "hacked").is_dir()
