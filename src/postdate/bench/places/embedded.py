"""One SQLite file with store and queues."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio

from postdate.backends.sqlite.file import SqliteFile, Transaction
from postdate.backends.sqlite.store import SqliteStore
from postdate.bench.limits.sleep import event_loop_floor
from postdate.bench.limits.sqlite import sqlite_insert_limit, sqlite_move_limit, sqlite_receive_limit, sqlite_version
from postdate.bench.places.place import ReceivedPlace, StorePlace
from postdate.bench.result import Lateness
from postdate.bench.site import Opening

_TAKE = """
    DELETE FROM queue_message WHERE seq IN (
        SELECT seq FROM queue_message WHERE queue_id = (SELECT queue_id FROM queue WHERE name = ?)
        ORDER BY seq LIMIT ?)
    RETURNING message_id, content
"""
_ANY = "SELECT 1 FROM queue_message WHERE queue_id = (SELECT queue_id FROM queue WHERE name = ?) LIMIT 1"


class EmbeddedPlace(StorePlace, ReceivedPlace):
    """A file in a folder that is made for the run and removed after it.

    Args:
        run: see :class:`Place`.
        folder: on the disk to be measured.
        synchronous: ``full`` or ``normal``, of the file and the limit alike.
        recording: how much the store records.
    """

    name = "sqlite"
    is_server = False

    def __init__(self, run: str, folder: Path, synchronous: str, recording: str) -> None:
        super().__init__(run)
        self._folder, self._synchronous, self._recording = folder / run, synchronous, recording
        self._path = self._folder / "bench.db"
        self._opened: SqliteStore | None = None

    def __enter__(self) -> Self:
        self._folder.mkdir()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._opened is not None:
            self._opened.file.close()
        shutil.rmtree(self._folder)  # now, not at the end: the next run may need the room

    @property
    def store(self) -> Opening:
        """See :class:`StorePlace`."""
        return Opening(f"sqlite:///{self._path}", self._settings)

    @property
    def transport(self) -> Opening:
        """See :class:`QueuePlace`."""
        return Opening(f"local:///{self._path}", self._settings)

    @property
    def _settings(self) -> dict[str, str]:
        return {"synchronous": self._synchronous, "recording": self._recording}

    @property
    def _file(self) -> SqliteFile:
        if self._opened is None:
            self._opened = SqliteStore(self._path, synchronous=self._synchronous)
        return self._opened.file

    def facts(self) -> Mapping[str, str]:
        """See :class:`Place`."""
        return {"version": sqlite_version(), "synchronous": self._synchronous}

    def settle(self) -> None:
        """See :class:`Place`."""
        self._file.checkpoint_blocking()

    def insert_limit(self, n: int, batch: int) -> float:
        """See :class:`StorePlace`."""
        return sqlite_insert_limit(self._folder, n, batch, self._synchronous)

    def move_limit(self, n: int) -> float:
        """See :class:`QueuePlace`."""
        return sqlite_move_limit(self._folder, n, self._synchronous)

    def receive_limit(self, queue: str, n: int) -> float:
        """See :class:`ReceivedPlace`."""
        return sqlite_receive_limit(self._path, queue, n, self._synchronous)

    def is_empty(self, queue: str) -> bool:
        """See :class:`ReceivedPlace`."""
        return self._file.read_blocking(lambda c: c.execute(_ANY, [queue]).fetchone()) is None

    def floor(self, rate: int, seconds: float) -> Lateness:
        """See :class:`QueuePlace`: of an event loop that only sleeps, which is what the service is made of."""
        return anyio.run(event_loop_floor, rate, seconds)

    def arrived(self, queue: str) -> Iterator[str]:
        """See :class:`QueuePlace`."""
        select = "SELECT message_id FROM queue_message WHERE queue_id = (SELECT queue_id FROM queue WHERE name = ?)"
        rows = self._file.read_blocking(lambda c: c.execute(select, [queue]).fetchall())
        return (message_id for (message_id,) in rows)

    def take(self, queue: str, limit: int) -> list[str]:
        """See :class:`QueuePlace`."""

        def take(tx: Transaction) -> list[str]:
            taken = tx.execute(_TAKE, (queue, limit)).fetchall()
            tx.executemany("DELETE FROM content WHERE seq = ?", [(content,) for _, content in taken])
            return [message_id for message_id, _ in taken]

        return self._file.write_blocking(take)
