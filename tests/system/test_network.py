"""Interfaces as this machine really has them."""

import socket

import pytest

from hydraflow.errors import ConfigError
from hydraflow.system.network import interface_of, interfaces, node_address, unreachable

LOOPBACK = "127.0.0.1"


def test_the_loopback_is_found_by_name_and_address() -> None:
    assert interfaces()["lo"] == LOOPBACK
    assert interface_of(LOOPBACK) == "lo"
    assert interface_of("192.0.2.77") is None


def test_the_named_interface_is_taken() -> None:
    assert node_address(environ={"HYDRAFLOW_NETWORK_INTERFACE": "lo"}) == LOOPBACK


def test_an_interface_that_is_not_here_is_refused_with_those_that_are() -> None:
    with pytest.raises(
        ConfigError,
        match=rf"HYDRAFLOW_NETWORK_INTERFACE=ib7: {socket.gethostname()} has no such .* lo \(127.0.0.1\)",
    ):
        node_address(environ={"HYDRAFLOW_NETWORK_INTERFACE": "ib7"})


def test_without_a_name_it_is_the_way_to_the_other_node_and_never_the_loopback_where_there_is_another() -> (
    None
):
    others = [address for name, address in interfaces().items() if name != "lo"]
    found = node_address("name.that.nobody.has.invalid", environ={})
    assert found in others or (not others and found == LOOPBACK)
    for own in others[:1]:
        assert node_address(own, environ={}) == own


@pytest.mark.parametrize("address", ["a..b:80", "no-port"])
def test_what_is_no_address_is_said(address: str) -> None:
    assert unreachable(address, 0.1)
