"""Faults at the system calls by which a forked process writes: an error, a short write, or SIGKILL, at a chosen call.

A filter of seccomp stops the process at each call that can change the file system, from whatever library it comes:
Python, NumPy, zarr's threads, tifffile, memory maps. The process that forked it reads the call's paths and decides.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import pickle
import platform
import re
import select
import signal
import socket
import struct
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

# ---- the calls -------------------------------------------------------------------------------------------------------
# Numbers of x86-64. `fd`: the file is the first argument. Digits: the arguments that are paths; "at" before a digit:
# the argument before it is the folder that the path starts at.
_CALLS: dict[int, tuple[str, tuple[str, ...]]] = {
    1: ("write", ("fd",)),
    2: ("open", ("0",)),
    9: ("mmap", ("fd4",)),
    18: ("pwrite", ("fd",)),
    20: ("writev", ("fd",)),
    26: ("msync", ("map",)),
    40: ("sendfile", ("fd",)),
    74: ("fsync", ("fd",)),
    75: ("fdatasync", ("fd",)),
    76: ("truncate", ("0",)),
    77: ("ftruncate", ("fd",)),
    82: ("rename", ("0", "1")),
    83: ("mkdir", ("0",)),
    84: ("rmdir", ("0",)),
    85: ("creat", ("0",)),
    86: ("link", ("0", "1")),
    87: ("unlink", ("0",)),
    88: ("symlink", ("1",)),
    90: ("chmod", ("0",)),
    91: ("fchmod", ("fd",)),
    257: ("openat", ("at1",)),
    258: ("mkdirat", ("at1",)),
    263: ("unlinkat", ("at1",)),
    264: ("renameat", ("at1", "at3")),
    265: ("linkat", ("at1", "at3")),
    266: ("symlinkat", ("at2",)),
    268: ("fchmodat", ("at1",)),
    285: ("fallocate", ("fd",)),
    296: ("pwritev", ("fd",)),
    316: ("renameat2", ("at1", "at3")),
    326: ("copy_file_range", ("fd2",)),
    328: ("pwritev2", ("fd",)),
}
# Calls that make a file or a folder smaller: they succeed on a full disk.
_REMOVING = ("unlink", "unlinkat", "rmdir")
# Calls that need no room on the disk.
_ROOMLESS = (*_REMOVING, "fsync", "fdatasync", "msync", "mmap", "rename", "renameat", "renameat2", "chmod", "fchmod")
_OPENS_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Call(NamedTuple):
    """A system call that can change the file system.

    Attributes:
        name: Name of the call.
        paths: The paths that it names or whose open file it changes.
    """

    name: str
    paths: tuple[str, ...]


class Outcome(NamedTuple):
    """What became of a process.

    Attributes:
        kind: "returned", "raised" or "killed".
        value: What the function returned.
        error: The class, errno and text of what it raised, causes not included; empty if it returned or was killed.
        calls: The calls inside the folder that was watched, in order.
        outside: The paths outside it that were written to.
    """

    kind: str
    value: Any = None
    error: tuple[str, int | None, str] = ("", None, "")
    calls: tuple[Call, ...] = ()
    outside: tuple[str, ...] = ()


# What is done at a call: None lets it happen, a number fails with that errno, "kill" ends the process before it,
# "torn" ends it when half of the bytes were written, and "short" writes half of the bytes.
Action = int | str | None
# Decides on the call with an index.
Decide = Callable[[int, Call], Action]


def at(index: int, action: Action) -> Decide:
    """Do this at one call."""
    return lambda position, call: action if position == index else None


def from_call(index: int, code: int) -> Decide:
    """Fail from one call on, as a disk does that is full, has become read-only, or is broken."""
    # A quota is a full disk, which fails calls that need room alone; a broken or a read-only one fails all.
    spared = _ROOMLESS if code in (errno.ENOSPC, errno.EDQUOT) else ()
    return lambda position, call: code if position >= index and call.name not in spared else None


# ---- the filter ------------------------------------------------------------------------------------------------------
_SECCOMP, _PIDFD_GETFD = 317, 438
_SET_MODE_FILTER, _NEW_LISTENER, _NO_NEW_PRIVILEGES = 1, 8, 38
_RECEIVE, _SEND, _IS_VALID, _CONTINUE = 0xC0502100, 0xC0182101, 0x40082102, 1
_ALLOW, _NOTIFY, _X86_64 = 0x7FFF0000, 0x7FC00000, 0xC000003E
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER, _ARCHITECTURE = 0, 4


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _filter_program() -> bytes:
    """A filter that notifies of `_CALLS`: of opening for writing alone, and of shared maps that are written alone."""
    blocks: list[list[tuple[int, int, int, int]]] = [[(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, _X86_64)]]
    blocks[0] += [(_RETURN, 0, 0, _ALLOW), (_LOAD, 0, 0, _NUMBER)]
    flags = {"open": [(1, _OPENS_TO_WRITE)], "openat": [(2, _OPENS_TO_WRITE)], "mmap": [(2, 2), (3, 1)]}
    for number, (name, _) in _CALLS.items():
        tests = [step for index, bits in flags.get(name, []) for step in ((_LOAD, index), (_ANY_BIT, bits))]
        block = [(_EQUAL, 0, len(tests) + 1 + bool(tests), number)]
        for place, (kind, value) in enumerate(tests):
            last = len(tests) - place  # from the step after this one to the step that allows
            # An argument's lower half is 16 + 8 i bytes from the start of what a filter reads.
            block.append((_LOAD, 0, 0, 16 + 8 * value) if kind == _LOAD else (_ANY_BIT, 0, last, value))
        block.append((_RETURN, 0, 0, _NOTIFY))
        if tests:
            block.append((_RETURN, 0, 0, _ALLOW))
        blocks.append(block)
    steps = [step for block in blocks for step in block] + [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def _install_filter() -> int:
    """Install the filter in this process, for good; return the file by which another process is told of the calls."""
    program = _filter_program()
    content = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(content))
    if _libc().prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    listener = _libc().syscall(_SECCOMP, _SET_MODE_FILTER, _NEW_LISTENER, ctypes.create_string_buffer(head, len(head)))
    if listener < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return listener


@cache
def problem() -> str | None:
    """Return why faults cannot be injected on this machine, or None."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "system calls are stopped on Linux on x86-64 alone"
    try:
        ran = run(lambda: 3, Path(__file__).parent, at(0, None))
    except OSError as error:
        return f"this machine lets no process filter its system calls: {error}"
    return None if ran.value == 3 else f"this machine lets no process filter its system calls: {ran.error[2]}"


# ---- the process that is watched -------------------------------------------------------------------------------------
def run(function: Callable[[], Any], folder: Path, decide: Decide, *, seconds: float = 60, threads: int = 1) -> Outcome:
    """Call a function in a forked process, and decide at each call by which it changes files in a folder.

    Args:
        function: What is called; what it returns is pickled.
        folder: Calls that name a path inside it are counted, and those alone fail.
        decide: What is done at the call with an index.
        seconds: Time after which the process is ended and a `TimeoutError` raised.
        threads: Threads of torch in the process.
    """
    ours, theirs = socket.socketpair()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads, which are idle, are not forked
        process = os.fork()
    if process == 0:
        ours.close()
        _call_and_exit(function, theirs, threads)
    theirs.close()
    try:
        return _supervise(process, ours, folder, decide, seconds)
    finally:
        ours.close()
        try:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def _call_and_exit(function: Callable[[], Any], channel: socket.socket, threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    sys.dont_write_bytecode = True
    try:
        listener = _install_filter()
        socket.send_fds(channel, [b"f"], [listener])
        os.close(listener)
    except OSError as error:
        channel.sendall(b"x" + str(error).encode())
        os._exit(1)
    try:
        outcome = Outcome("returned", function())
    except BaseException as error:  # noqa: BLE001
        outcome = Outcome("raised", error=(type(error).__name__, getattr(error, "errno", None), str(error)))
    channel.sendall(pickle.dumps(outcome))
    channel.shutdown(socket.SHUT_RDWR)
    os._exit(0)


def _supervise(process: int, channel: socket.socket, folder: Path, decide: Decide, seconds: float) -> Outcome:
    message, files, _, _ = socket.recv_fds(channel, 4096, 1)
    if not files:
        raise OSError(errno.EPERM, message[1:].decode() or "the process ended before it was watched")
    listener, handle = files[0], os.pidfd_open(process)
    calls: list[Call] = []
    outside: list[str] = []
    received: list[bytes] = []
    poll, deadline = select.poll(), time.perf_counter() + seconds
    for file in (listener, handle, channel.fileno()):
        poll.register(file, select.POLLIN)
    try:
        while True:
            ready = dict(poll.poll(1000))
            if time.perf_counter() > deadline:
                raise TimeoutError(f"no end after {seconds} seconds, at {calls[-3:]}")
            if ready.get(channel.fileno(), 0):
                received.append(channel.recv(2**20))
                if not received[-1]:
                    poll.unregister(channel.fileno())
            if ready.get(listener, 0) & select.POLLIN:
                _answer_call(listener, process, str(folder), decide, calls, outside)
            elif ready.get(handle, 0):
                break
    finally:
        os.close(listener)
        os.close(handle)
    status = os.waitpid(process, 0)[1]
    while chunk := channel.recv(2**20):
        received.append(chunk)
    content, code = b"".join(received), os.waitstatus_to_exitcode(status)
    outcome = pickle.loads(content) if content else Outcome("killed")
    if not content and code != -signal.SIGKILL:
        outcome = Outcome("raised", error=("ended", None, f"with status {code}"))
    return outcome._replace(calls=tuple(calls), outside=tuple(outside))


def _answer_call(
    listener: int, process: int, folder: str, decide: Decide, calls: list[Call], outside: list[str]
) -> None:
    notice = bytearray(80)
    try:
        fcntl.ioctl(listener, _RECEIVE, notice)
    except OSError:  # the process was killed meanwhile
        return
    identifier, thread = struct.unpack_from("QI", notice)
    number, arguments = struct.unpack_from("i", notice, 16)[0], struct.unpack_from("6Q", notice, 32)
    try:
        call = _describe(thread, number, arguments)
        fcntl.ioctl(listener, _IS_VALID, struct.pack("Q", identifier))
    except (FileNotFoundError, ProcessLookupError):  # its thread was killed before or while its paths were read
        return
    action: Action = None
    if any(path == folder or path.startswith(folder + "/") for path in call.paths):
        action = decide(len(calls), call)
        calls.append(call)
    else:
        outside.extend(filter(_is_a_file, call.paths))
    value, code, flags = 0, 0, _CONTINUE
    if action in ("torn", "short") and call.name == "write" and arguments[2] > 1:
        value, flags = _write_half(process, thread, arguments), 0
    elif isinstance(action, int):
        code, flags = -action, 0
    if action in ("kill", "torn"):
        os.kill(process, signal.SIGKILL)
        return
    try:
        fcntl.ioctl(listener, _SEND, struct.pack("QqiI", identifier, value, code, flags))
    except OSError:
        return


def _write_half(process: int, thread: int, arguments: Sequence[int]) -> int:
    handle = os.pidfd_open(process)
    try:
        file = _libc().syscall(_PIDFD_GETFD, handle, ctypes.c_int(arguments[0] & 0xFFFFFFFF), 0)
        if file < 0:
            raise OSError(ctypes.get_errno(), "pidfd_getfd")
        try:
            return os.write(file, _memory(thread, arguments[1], arguments[2] // 2))
        finally:
            os.close(file)
    finally:
        os.close(handle)


# ---- the paths of a call ---------------------------------------------------------------------------------------------
def _describe(thread: int, number: int, arguments: Sequence[int]) -> Call:
    name, places = _CALLS[number]
    return Call(name, tuple(path for place in places if (path := _named_path(thread, place, arguments)) is not None))


def _named_path(thread: int, place: str, arguments: Sequence[int]) -> str | None:
    if place == "map":
        return _mapped_file(thread, arguments[0])
    if place.startswith("fd"):
        return _link_of(f"/proc/{thread}/fd/{_signed(arguments[int(place[2:] or 0)])}")
    index = int(place[-1])
    path = os.fsdecode(_memory(thread, arguments[index], 4096).split(b"\0", 1)[0])
    start = _link_of(f"/proc/{thread}/cwd")
    if place.startswith("at") and _signed(arguments[index - 1]) >= 0:
        start = _link_of(f"/proc/{thread}/fd/{_signed(arguments[index - 1])}")
    return os.path.normpath(os.path.join(start or "/", path))


def _signed(number: int) -> int:
    return ctypes.c_int(number & 0xFFFFFFFF).value


def _link_of(path: str) -> str | None:
    try:
        return re.sub(r" \(deleted\)$", "", os.readlink(path))
    except OSError:
        return None


def _memory(thread: int, address: int, length: int) -> bytes:
    with open(f"/proc/{thread}/mem", "rb", 0) as file:
        file.seek(address)
        try:
            return file.read(length)
        except OSError:  # up to the end of the page
            file.seek(address)
            return file.read(min(length, 4096 - address % 4096))


def _mapped_file(thread: int, address: int) -> str | None:
    with open(f"/proc/{thread}/maps", encoding="utf-8") as file:
        for line in file:
            fields = line.rstrip("\n").split(maxsplit=5)
            low, high = (int(each, 16) for each in fields[0].split("-"))
            if low <= address < high:
                return fields[5] if len(fields) == 6 else None
    return None


def _is_a_file(path: str) -> bool:
    # No pipe, socket, device or entry of the kernel.
    return path.startswith("/") and not path.startswith(("/dev/", "/proc/", "/sys/"))
