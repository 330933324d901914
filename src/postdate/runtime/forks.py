"""What a process holds at a fork, and with what its child begins: the one place that tells Python of forks.

A child inherits memory, descriptors, and locks in whatever state, but no threads. So whatever of ours holds any of
these is registered here, weakly:

- a :class:`ForkAware` object is asked to be quiet before the fork, and to begin anew in the child;
- a lock made by :func:`lock` or :func:`rlock` is free in the child, whichever thread held it;
- the connection of :func:`own` is replaced in the child by one to nowhere: the child cannot speak on it, and does not
  keep it open when the parent dies.

Hooks run for ``os.fork``, ``os.forkpty``, ``multiprocessing`` (``fork``) and ``subprocess`` with ``preexec_fn``; other
subprocesses are none of these. A fork made in C, of which Python is not told (uWSGI), is noticed by
:func:`check_process` at the next use; then nothing was quiet. Source: ADR 40.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol, TypeVar, cast
from weakref import WeakSet

# Python asks in reverse order of registration: locks of files must be usable while other threads finish what they do.
import filelock  # noqa: F401  # pyright: ignore[reportUnusedImport]

QUIET_WITHIN_SECONDS: Final = 10.0
"""A fork waits at most so long, in all, for other threads to finish what they do."""

log = logging.getLogger("postdate.forks")


class ForkAware:
    """Holds what a child must not inherit. Register it with :func:`register`. No method may wait without a bound."""

    def before_fork(self, deadline: float) -> None:
        """Be quiet until :meth:`after_fork_in_parent`, in the thread that forks.

        Args:
            deadline: monotonic seconds; do not wait any longer for other threads.
        """

    def after_fork_in_parent(self) -> None:
        """Go on, in the thread that forked; also after :meth:`before_fork` raised."""

    def after_fork_in_child(self) -> None:
        """Forget what belongs to the parent. No other thread runs; :meth:`before_fork` may not have been called."""


class HasDescriptor(Protocol):
    """A socket, or a connection on one."""

    def fileno(self) -> int: ...


_aware: Final = WeakSet[ForkAware]()
_locks: Final = WeakSet[Any]()
_connections: Final = WeakSet[Any]()
_forking = threading.Lock()
"""Held from before a fork until after it: there is one at a time."""

_registering = threading.RLock()
"""Held for a moment; and from when all are quiet until after the fork, so that nothing new begins meanwhile."""

_beginning = threading.Lock()
"""For the threads of a child whose fork Python was not told of: one of them begins anew, others wait for it."""

_pid = os.getpid()
_of_parents: Final = list[object]()

T = TypeVar("T")
A = TypeVar("A", bound=ForkAware)
C = TypeVar("C", bound=HasDescriptor)


def register(aware: A) -> A:
    """Have an object told of forks for as long as it exists."""
    with _registering:
        _aware.add(aware)
    return aware


def lock() -> threading.Lock:
    """Return a lock that is free in the child of a fork."""
    return _renewed(threading.Lock())


def rlock() -> threading.RLock:
    """Return a re-entrant lock that is free in the child of a fork."""
    return _renewed(threading.RLock())


def is_owned(lock: threading.RLock) -> bool:
    """Return whether this thread has the lock."""
    owned: bool = cast("Any", lock)._is_owned()  # noqa: SLF001 - as threading.Condition asks its own
    return owned


def _renewed(made: T) -> T:
    with _registering:
        _locks.add(made)
    return made


def own(connection: C) -> C:
    """Keep a connection to this process: see the module."""
    with _registering:
        _connections.add(connection)
    return connection


def keep_for_ever(thing: object) -> None:
    """Never let a thing of the parent end in this child, not even with the interpreter: they share it."""
    _of_parents.append(thing)
    with suppress(ImportError, AttributeError):
        import ctypes

        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


Identity = tuple[int, int]
"""Device and inode number of a file."""


def open_descriptors() -> dict[int, Identity]:
    """Return the descriptors that this process has open, and of which files; none where the system does not tell."""
    descriptors = dict[int, Identity]()
    with suppress(OSError):
        for name in os.listdir("/dev/fd"):  # noqa: PTH208 - only names are needed
            with suppress(OSError, ValueError):  # that of the listing itself is closed by now
                status = os.fstat(int(name))
                descriptors[int(name)] = status.st_dev, status.st_ino
    return descriptors


def blank(descriptor: int) -> None:
    """Have a descriptor lead nowhere, in this process only. Its number stays in use, so it cannot become another's."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    try:
        os.dup2(nowhere, descriptor, inheritable=False)
    finally:
        os.close(nowhere)


def check_process() -> None:
    """Begin anew if this is the child of a fork that Python was not told of."""
    if os.getpid() != _pid:
        with _beginning:
            if os.getpid() != _pid:
                _after_in_child()


# --- hooks: what one of them raises would be printed by Python, and forgotten ----------------------------------------


class _Fork:
    """One fork. ``quiet``: whoever was asked to be quiet, by its ``id``; ``is_alone``: this module's locks are held."""

    def __init__(self) -> None:
        self.quiet = dict[int, ForkAware]()
        self.is_alone = False


_present = threading.local()
"""``fork``: that of this thread."""


def _before() -> None:
    _present.fork = fork = _Fork()
    deadline = time.monotonic() + QUIET_WITHIN_SECONDS

    def ask(aware: ForkAware) -> None:
        fork.quiet[id(aware)] = aware
        aware.before_fork(deadline)

    fork.is_alone = _forking.acquire(timeout=QUIET_WITHIN_SECONDS)
    while fork.is_alone:
        _registering.acquire()
        if not (affected := [aware for aware in _aware if id(aware) not in fork.quiet]):
            return
        _registering.release()  # a thread that is not quiet yet may need it
        for aware in affected:
            _guarded(ask, aware)


def _after_in_parent() -> None:
    fork: _Fork | None = getattr(_present, "fork", None)
    if fork is None:  # this module was imported while a thread forked
        return
    for aware in fork.quiet.values():
        _guarded(lambda each: each.after_fork_in_parent(), aware)
    if fork.is_alone:
        _registering.release()
        _forking.release()
    del _present.fork


def _after_in_child() -> None:
    global _pid, _forking, _registering  # noqa: PLW0603 - they are of the process
    _forking, _registering = threading.Lock(), threading.RLock()
    for each in list(_locks):
        each._at_fork_reinit()  # noqa: SLF001 - what threading itself does with its own
    for connection in list(_connections):
        with suppress(Exception):  # it is closed
            blank(connection.fileno())
    _connections.clear()
    for aware in list(_aware):
        _guarded(lambda each: each.after_fork_in_child(), aware)
    _pid = os.getpid()


def _guarded(tell: Callable[[ForkAware], None], aware: ForkAware) -> None:
    try:
        tell(aware)
    except BaseException:
        log.exception("%r could not be told of a fork", aware)


if sys.platform != "win32":
    os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
