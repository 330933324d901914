"""Handling of forks: connections, locks and files before a fork, and in the child after it.

Only this module registers hooks for forks with Python. A child inherits memory, descriptors, and locks in any state,
but no threads. So every object of Postdate with such things is registered here, by a weak reference:

- a :class:`ForkAware` object stops its activity before the fork, and is reset in the child;
- a lock made by :func:`lock` or :func:`rlock` is free in the child, whichever thread held it;
- the connection of :func:`register_connection` is replaced in the child by one to nowhere: the child cannot speak on
  it, and does not keep it open when the parent dies.

Hooks run for ``os.fork``, ``os.forkpty``, ``multiprocessing`` (``fork``) and ``subprocess`` with ``preexec_fn``. They
do not run for other subprocesses. A fork in C code that does not call Python's hooks (uWSGI) is noticed by
:func:`check_process` at the next use; in this case nothing was stopped before the fork. Source: ADR 40.
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

# Python calls hooks before a fork in reverse order of registration. filelock must register first, so that its locks are
# still usable while Postdate's hook waits for other threads.
import filelock  # noqa: F401  # pyright: ignore[reportUnusedImport]

QUIET_WITHIN_SECONDS: Final = 10.0
"""Longest time, in all, for which a fork waits for other threads to finish their activity."""

log = logging.getLogger("postdate.forks")


class ForkAware:
    """An object with things that a child must not inherit. Register it with :func:`register`.

    Every wait in these methods must have a limit.
    """

    def before_fork(self, deadline: float) -> None:
        """Stop all activity until :meth:`after_fork_in_parent`; called in the thread that forks.

        Args:
            deadline: monotonic seconds; do not wait any longer for other threads.
        """

    def after_fork_in_parent(self) -> None:
        """Continue, in the thread that forked; called even if :meth:`before_fork` raised an error."""

    def after_fork_in_child(self) -> None:
        """Forget everything that belongs to the parent. No other thread runs.

        :meth:`before_fork` was possibly not called.
        """


class HasDescriptor(Protocol):
    """A socket, or a connection on one."""

    def fileno(self) -> int: ...


_fork_aware: Final = WeakSet[ForkAware]()
_locks: Final = WeakSet[Any]()
_connections: Final = WeakSet[Any]()
_fork_lock = threading.Lock()
"""Held from before a fork until after it, so that only one thread forks at a time."""

_register_lock = threading.RLock()
"""Held for a moment by each registration. A fork holds it from when all activity has stopped until after the fork, so
that no new activity begins meanwhile."""

_reset_lock = threading.Lock()
"""For the threads of a child whose fork called no hooks: one thread resets everything, and the others wait for it."""

_pid = os.getpid()
_parent_objects: Final = list[object]()

T = TypeVar("T")
A = TypeVar("A", bound=ForkAware)
C = TypeVar("C", bound=HasDescriptor)


def register(aware: A) -> A:
    """Call the methods of an object at every fork, for as long as the object exists; return the object."""
    with _register_lock:
        _fork_aware.add(aware)
    return aware


def lock() -> threading.Lock:
    """Return a lock that is free in the child of a fork."""
    return _track_lock(threading.Lock())


def rlock() -> threading.RLock:
    """Return a re-entrant lock that is free in the child of a fork."""
    return _track_lock(threading.RLock())


def is_owned(lock: threading.RLock) -> bool:
    """Return whether this thread holds the lock."""
    owned: bool = cast("Any", lock)._is_owned()  # noqa: SLF001 - as threading.Condition asks its own
    return owned


def _track_lock(lock_object: T) -> T:
    with _register_lock:
        _locks.add(lock_object)
    return lock_object


def register_connection(connection: C) -> C:
    """Register a connection that only this process may use (see the module); return it."""
    with _register_lock:
        _connections.add(connection)
    return connection


def prevent_destruction(parent_object: object) -> None:
    """Never destroy an object of the parent in this child, not even when the interpreter ends.

    Its destructor would act on something that parent and child share.
    """
    _parent_objects.append(parent_object)
    with suppress(ImportError, AttributeError):
        import ctypes

        ctypes.pythonapi.Py_IncRef(ctypes.py_object(parent_object))


Identity = tuple[int, int]
"""Device and inode number of a file."""


def open_descriptors() -> dict[int, Identity]:
    """Return the open descriptors of this process with their files; empty where the system does not tell."""
    descriptors = dict[int, Identity]()
    with suppress(OSError):
        for name in os.listdir("/dev/fd"):  # noqa: PTH208 - only names are needed
            with suppress(OSError, ValueError):  # the descriptor of the listing itself is closed by now
                status = os.fstat(int(name))
                descriptors[int(name)] = status.st_dev, status.st_ino
    return descriptors


def redirect_to_null(descriptor: int) -> None:
    """Connect a descriptor to the null device, in this process only.

    The number of the descriptor stays in use, so no other file can get it.
    """
    null_device = os.open(os.devnull, os.O_RDWR)
    try:
        os.dup2(null_device, descriptor, inheritable=False)
    finally:
        os.close(null_device)


def check_process() -> None:
    """Reset everything if this is the child of a fork that called no hooks."""
    if os.getpid() != _pid:
        with _reset_lock:
            if os.getpid() != _pid:
                _after_fork_in_child()


# --- hooks: an exception in a hook would only be printed by Python, and the fork would go on --------------------------


class _Fork:
    """One fork.

    ``stopped_objects``: objects that were asked to stop, by ``id``; ``has_locks``: it holds the module's locks.
    """

    def __init__(self) -> None:
        self.stopped_objects = dict[int, ForkAware]()
        self.has_locks = False


_thread_local = threading.local()
"""Its attribute ``fork`` is the fork of this thread."""


def _before_fork() -> None:
    _thread_local.fork = fork = _Fork()
    deadline = time.monotonic() + QUIET_WITHIN_SECONDS

    def stop_activity(aware: ForkAware) -> None:
        fork.stopped_objects[id(aware)] = aware
        aware.before_fork(deadline)

    fork.has_locks = _fork_lock.acquire(timeout=QUIET_WITHIN_SECONDS)
    # Objects may be registered while others stop their activity. So repeat until none is left, and then return with the
    # lock held, so that no object is registered before the fork.
    while fork.has_locks:
        _register_lock.acquire()
        if not (affected := [aware for aware in _fork_aware if id(aware) not in fork.stopped_objects]):
            return
        _register_lock.release()  # a thread that has not stopped yet may need it
        for aware in affected:
            _call_safely(stop_activity, aware)


def _after_fork_in_parent() -> None:
    fork: _Fork | None = getattr(_thread_local, "fork", None)
    if fork is None:  # this module was imported while a thread forked, so _before() did not run
        return
    for aware in fork.stopped_objects.values():
        _call_safely(lambda each: each.after_fork_in_parent(), aware)
    if fork.has_locks:
        _register_lock.release()
        _fork_lock.release()
    del _thread_local.fork


def _after_fork_in_child() -> None:
    global _pid, _fork_lock, _register_lock  # noqa: PLW0603 - they are of the process
    _fork_lock, _register_lock = threading.Lock(), threading.RLock()
    for each in list(_locks):
        each._at_fork_reinit()  # noqa: SLF001 - threading itself does this with its own locks
    for connection in list(_connections):
        with suppress(Exception):  # the connection is closed
            redirect_to_null(connection.fileno())
    _connections.clear()
    for aware in list(_fork_aware):
        _call_safely(lambda each: each.after_fork_in_child(), aware)
    # Last, because until then check_process() makes other threads of the child wait for the end of this function.
    _pid = os.getpid()


def _call_safely(notify: Callable[[ForkAware], None], aware: ForkAware) -> None:
    try:
        notify(aware)
    except BaseException:
        log.exception("%r could not be told of a fork", aware)


if sys.platform != "win32":
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
