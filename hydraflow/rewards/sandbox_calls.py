"""System calls that a program in a sandbox may not make, as a seccomp filter.

Namespaces alone leave calls with which a program could take over the process that watches it and outlive its
time (ptrace and its kin), hold memory that no limit counts (memfd, System V and POSIX IPC), make namespaces
in which it has capabilities again, or reach parts of the kernel that no solution of a task needs. Out: a
classic BPF program, which the first process of a sandbox installs (`sandbox_program.py`). Left out on
purpose: a list of what is allowed, which would break with every new libc.
"""

from __future__ import annotations

import errno
import platform
import struct

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Machine -> its AUDIT_ARCH, and the index of its number in the pairs below."""
_REFUSED = {
    # another process: its memory, its registers, its files
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    # memory that is neither a process's own nor in /tmp
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    # large parts of the kernel
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "fanotify_init": (300, 262),
    "modify_ldt": (154, None),
}
"""Call -> its numbers. They fail with EPERM."""
_CLONE, _CLONE3 = (56, 220), (435, 435)
_NEW_NAMESPACES = 0x7E020000
"""The CLONE_NEW* flags of clone."""
_SOCKETS = ((41, 198), (53, 199))
"""socket, socketpair."""
_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET and AF_INET6: a network namespace holds these; not AF_VSOCK, which reaches a host."""
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # operations of BPF
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in seccomp_data on little-endian machines
_KILL, _FAIL, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_X32 = 0x40000000
"""From here on numbers are those of x86's 32-bit calls in a 64-bit process."""


def call_filter(machine: str | None = None) -> bytes:
    """The filter, as consecutive `struct sock_filter`s. `machine` None: this one. ValueError if there is no
    filter for it."""
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise ValueError(f"there is no filter of system calls for {machine}, only for x86_64 and aarch64")
    architecture, place = _ARCHITECTURES[machine]
    # equal: skips one step, the end of a program of another architecture
    steps = [_load(_ARCHITECTURE), (_EQUAL, 1, 0, architecture), _return(_KILL), _load(_NUMBER)]
    steps += [(_AT_LEAST, 0, 1, _X32), _fail(errno.ENOSYS)]
    for numbers in _REFUSED.values():
        if (number := numbers[place]) is not None:
            steps += [_if(number), _fail(errno.EPERM)]
    # clone3 has its flags in memory, where a filter cannot see them; on ENOSYS libc falls back to clone
    steps += [_if(_CLONE3[place]), _fail(errno.ENOSYS)]
    spawned = [_load(_FIRST_ARGUMENT), (_ANY_BIT, 0, 1, _NEW_NAMESPACES), _fail(errno.EPERM), _return(_ALLOW)]
    steps += [_if(_CLONE[place], len(spawned)), *spawned]
    opened = [_load(_FIRST_ARGUMENT)]
    for family in _FAMILIES:
        opened += [_if(family), _return(_ALLOW)]
    opened.append(_fail(errno.EAFNOSUPPORT))
    for numbers in _SOCKETS:
        steps += [_if(numbers[place], len(opened)), *opened]
    steps.append(_return(_ALLOW))
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


Step = tuple[int, int, int, int]
"""Operation, steps to skip if it holds, steps to skip if not, operand."""


def _load(place: int) -> Step:
    return _LOAD, 0, 0, place


def _if(value: int, steps: int = 1) -> Step:
    """Skips `steps` instructions unless the loaded value equals `value`."""
    return _EQUAL, 0, steps, value


def _return(what: int) -> Step:
    return _RETURN, 0, 0, what


def _fail(number: int) -> Step:
    return _return(_FAIL | number)
