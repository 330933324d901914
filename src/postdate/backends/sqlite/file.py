"""The handle of one SQLite file in this process, shared by all stores and transports on it.

`transactions` has its writes and reads, `access` its connections, `registration` its number among the processes, and
`upkeep` its work of every second.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

from postdate.backends.sqlite.access import FileAccess
from postdate.backends.sqlite.connection import absolute_path
from postdate.backends.sqlite.processes import SHORTEST_BOUND
from postdate.backends.sqlite.registration import Registration, unregister
from postdate.backends.sqlite.rows import QueueRules
from postdate.backends.sqlite.transactions import DEFAULT_RULES, FileTransactions
from postdate.backends.sqlite.upkeep import FileUpkeep
from postdate.errors import ConfigurationError, PostdateError
from postdate.ports import Recording
from postdate.runtime import forks
from postdate.runtime.threads import run_in_thread


class SqliteFile(FileTransactions):
    """The shared handle of one file in this process: call :meth:`close` once for each :meth:`open`."""

    _handles: ClassVar[dict[tuple[int, Path], SqliteFile]] = {}
    """Handles by process id and path. A child of a fork opens handles of its own; inherited ones reset themselves."""

    _open_lock: ClassVar[threading.Lock] = forks.lock()

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        synchronous: str = "full",
        recording: Recording = Recording.ALL,
        create: bool = True,
        rules: QueueRules | None = None,
        holds_at_most: timedelta | None = None,
    ) -> SqliteFile:
        """Return the handle of this process for ``path``. The file is not read or written before the first use.

        The arguments are those of :class:`postdate.SqliteStore`; ``rules`` are set by transports only. Without
        ``rules`` or ``holds_at_most``, the values of an earlier opener are used, or defaults.

        Raises:
            ConfigurationError: it is open already with other settings, or a setting is invalid.
        """
        if synchronous not in {"full", "normal"}:
            raise ConfigurationError(f"synchronous must be 'full' or 'normal', not {synchronous!r}")
        if holds_at_most is not None and holds_at_most < SHORTEST_BOUND:
            raise ConfigurationError(f"holds_at_most must be {SHORTEST_BOUND} or more, not {holds_at_most}")
        resolved_path = absolute_path(path)
        with cls._open_lock:
            if (file := cls._handles.get((os.getpid(), resolved_path))) is None:
                file = cls(resolved_path, synchronous=synchronous, recording=recording, create=create)
                cls._handles[os.getpid(), resolved_path] = file
            if (file.synchronous, file.recording) != (synchronous, recording):
                raise ConfigurationError(
                    f"{resolved_path} is open in this process with synchronous={file.synchronous!r} and "
                    f"recording={file.recording.value!r}; store and transport on one file need the same settings"
                )
            file._apply_settings(rules, holds_at_most)
            file._users += 1
        return file

    def __init__(self, path: Path, *, synchronous: str, recording: Recording, create: bool) -> None:
        registration = Registration(path)
        access = FileAccess(path, registration, synchronous=synchronous, create=create)
        super().__init__(path, recording, access, registration)
        self.synchronous = synchronous
        self._users = 0
        self._upkeep = FileUpkeep(self)

    def _apply_settings(self, rules: QueueRules | None, holds_at_most: timedelta | None) -> None:
        if rules is not None and self.rules is not DEFAULT_RULES and not self.rules.matches(rules):
            raise ConfigurationError(
                f"{self.path} is open in this process with {self.rules}; transports on one file need the same clock "
                f"and rules of expiry, not {rules}"
            )
        bound = self.registration.agreed_bound
        if holds_at_most is not None and bound not in {None, holds_at_most}:
            raise ConfigurationError(
                f"{self.path} is open in this process with holds_at_most={bound}; store and transport on "
                f"one file need the same, not {holds_at_most}"
            )
        if rules is not None and self.rules is DEFAULT_RULES:
            self.rules = rules
        self.registration.agreed_bound = bound or holds_at_most

    async def setup(self) -> None:
        await run_in_thread(self.access.setup)

    def close(self) -> None:
        """Close the handle for one user. The last user's call releases the claims and closes the file. Blocking."""
        forks.check_process()
        with self._open_lock:
            if self._users == 1:
                self.access.is_closing = True
                self._upkeep.stop()  # before the rest: a chore that began later would find the file closed
            self._users -= 1
            if self._users > 0:
                return
            self.access.is_closed = True
            if self._handles.get((os.getpid(), self.path)) is self:
                del self._handles[os.getpid(), self.path]
        self._upkeep.join()
        registration = self.registration
        registration.wakeups.stop_listening()
        with self.access.read_lock, self.access.write_lock:
            if registration.liveness is not None:
                # If the disk is full or not writable, the next process notices that this one has ended, and does it.
                with suppress(PostdateError):
                    self.access.is_closed = False  # the connection may have been closed for a fork: allow opening it
                    self.write_blocking(lambda tx: unregister(tx, tx.claimant))
                self.access.is_closed = True
            self.access.close_connections()
            if registration.liveness is not None:
                registration.liveness.close()
                registration.liveness = None
        registration.wakeups.close()


class OnFile:
    """An adapter on a file. It closes its handle once, when it is closed."""

    file: SqliteFile
    _closed = False

    async def close(self) -> None:
        was_closed, self._closed = self._closed, True
        if not was_closed:
            self.file.close()
