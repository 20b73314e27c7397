"""Ports and Ray's addresses, with real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkup.given import configured, findings, states

from hydraflow.checkup.context import CheckContext
from hydraflow.checkup.finding import State
from hydraflow.checkup.network import free_ports, judge_ray, named_clusters, own_addresses, unreachable


@pytest.fixture
def silent() -> str:
    """An address at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def answering(ray_session: None) -> str:
    """The address of a Ray that runs."""
    import ray

    return str(ray.get_runtime_context().gcs_address)


@pytest.fixture
def stranger() -> Iterator[str]:
    """An address at which something else listens: it answers every line with one of its own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(
            target=lambda: server.accept()[0].sendall(b"220 mail ready\r\n"), daemon=True
        ).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_this_machine_reaches_itself() -> None:
    assert own_addresses()[0] == "127.0.0.1"
    assert states(findings(CheckContext(configured()), "ports")) == [State.OK]


def test_an_address_that_is_not_this_machine_s() -> None:
    assert unreachable("198.51.100.1") is not None  # set aside for documentation
    assert unreachable("127.0.0.1") is None


def test_free_ports_are_counted(tmp_path: Path) -> None:
    (tmp_path / "sys/net/ipv4").mkdir(parents=True)
    (tmp_path / "net").mkdir()
    (tmp_path / "sys/net/ipv4/ip_local_port_range").write_text("32768\t32777\n")
    held = [
        "  sl  local_address rem_address",
        "0: 0100007F:8000 0:0 0A",
        "1: 0100007F:8001 0:0 0A",
        "2: 0100007F:0050 0:0 0A",
    ]
    (tmp_path / "net/tcp").write_text("\n".join(held) + "\n")
    assert free_ports(tmp_path) == 8  # 32768 to 32777 without 0x8000 and 0x8001; port 80 is not of the range


def started(folder: Path, address: str) -> Path:
    """What `ray start` leaves behind."""
    (folder / "ray").mkdir()
    (folder / "ray" / "ray_current_cluster").write_text(address)
    return folder


def test_a_stale_address_keeps_a_run_from_joining(tmp_path: Path, silent: str) -> None:
    found = judge_ray("auto", environ={"RAY_ADDRESS": silent}, folder=tmp_path)
    assert found.state is State.PROBLEM
    assert silent in found.evidence and found.remedy == "unset RAY_ADDRESS, or ray_init.address=local"
    by_file = judge_ray("auto", environ={}, folder=started(tmp_path, silent))
    assert by_file.state is State.PROBLEM and by_file.remedy.startswith("rm ")
    named = judge_ray(silent, environ={}, folder=tmp_path)
    assert (named.state, named.remedy) == (State.PROBLEM, "ray_init.address=local")


def test_a_stale_address_is_only_worth_a_note_to_a_run_of_its_own(tmp_path: Path, silent: str) -> None:
    found = judge_ray("local", environ={"RAY_ADDRESS": silent}, folder=tmp_path)
    assert (found.state, found.remedy) == (State.NOTE, "unset RAY_ADDRESS")
    assert judge_ray("local", environ={}, folder=tmp_path).state is State.OK


def test_a_cluster_that_answers(tmp_path: Path, answering: str, silent: str) -> None:
    assert judge_ray("auto", environ={}, folder=started(tmp_path, answering)).state is State.OK
    beside = judge_ray("local", environ={}, folder=tmp_path)
    assert beside.state is State.NOTE and "beside it" in beside.evidence
    assert judge_ray(answering, environ={"RAY_ADDRESS": silent}, folder=tmp_path).state is State.OK


def test_a_port_that_is_somebody_else_s_now(tmp_path: Path, stranger: str) -> None:
    found = judge_ray(stranger, environ={}, folder=tmp_path)
    assert found.state is State.PROBLEM and "where no Ray answers" in found.evidence


def test_the_environment_comes_before_the_file(tmp_path: Path, silent: str) -> None:
    found = named_clusters({"RAY_ADDRESS": "a:1"}, started(tmp_path, silent))
    assert list(found.values()) == ["a:1", silent]


def test_an_address_that_is_none(tmp_path: Path) -> None:
    assert "host:port" in judge_ray("somewhere", environ={}, folder=tmp_path).evidence
