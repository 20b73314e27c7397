"""The filter of system calls, run by an interpreter of its few operations, for both machines; the numbers are
those of Linux's headers."""

from __future__ import annotations

import errno
import struct

import pytest

from hydraflow.rewards.sandbox_calls import call_filter

ALLOWED, KILLED, FAILED = 0x7FFF0000, 0x80000000, 0x00050000
MACHINES = {
    "x86_64": (0xC000003E, {"read": 0, "ptrace": 101, "unshare": 272, "memfd_create": 319, "mount": 165,
                            "clone": 56, "clone3": 435, "socket": 41, "socketpair": 53, "modify_ldt": 154}),
    "aarch64": (0xC00000B7, {"read": 63, "ptrace": 117, "unshare": 97, "memfd_create": 279, "mount": 40,
                             "clone": 220, "clone3": 435, "socket": 198, "socketpair": 199}),
}  # fmt: skip
THREAD, FORK, NEW_USER, NEW_NET = 0x3D0F00, 17, 0x10000000, 0x40000000
INET, VSOCK, NETLINK = 2, 40, 16


def answer(program: bytes, number: int, argument: int = 0, *, architecture: int) -> int:
    """What a filter says of a call."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, argument, *[0] * 5)
    steps = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    at, loaded = 0, 0
    while True:
        operation, if_so, if_not, value = steps[at]
        at += 1
        match operation:
            case 0x06:
                return value
            case 0x20:
                (loaded,) = struct.unpack_from("=I", data, value)
                continue
            case 0x15:
                holds = loaded == value
            case 0x35:
                holds = loaded >= value
            case 0x45:
                holds = bool(loaded & value)
            case _:
                raise AssertionError(operation)
        at += if_so if holds else if_not


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_refused_and_what_is_not(machine: str) -> None:
    program, (architecture, numbers) = call_filter(machine), MACHINES[machine]
    assert len(program) % 8 == 0 and len(program) // 8 < 4096  # the most that the kernel takes

    def of(name: str, argument: int = 0) -> int:
        return answer(program, numbers[name], argument, architecture=architecture)

    not_permitted = FAILED | errno.EPERM
    for name in numbers.keys() - {"read", "clone", "clone3", "socket", "socketpair"}:
        assert of(name) == not_permitted, name
    assert of("read") == of("clone", THREAD) == of("clone", FORK) == of("socket", INET) == ALLOWED
    assert of("clone", FORK | NEW_USER) == of("clone", NEW_NET) == not_permitted
    assert of("clone3") == FAILED | errno.ENOSYS
    for name in ("socket", "socketpair"):
        assert of(name, VSOCK) == of(name, NETLINK) == FAILED | errno.EAFNOSUPPORT
    x86_32, others_read = 0x40000003, next(iter(numbers.values()))
    assert answer(program, others_read, architecture=x86_32) == KILLED
    assert answer(program, 0x40000000 + 59, architecture=architecture) == FAILED | errno.ENOSYS


def test_another_machine_has_none() -> None:
    with pytest.raises(ValueError, match="no filter of system calls for riscv64"):
        call_filter("riscv64")
