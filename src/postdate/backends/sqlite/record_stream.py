"""The stream of records in an SQLite file: writers take turns, so numbers are in the order of commits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from postdate.backends.sqlite.file import SqliteFile
from postdate.backends.sqlite.scanning import read_scan
from postdate.errors import StoreNotSetUp
from postdate.ports import Recording, RecordStreamStore, Scan, ScanPart


class SqliteRecordStream(RecordStreamStore):
    """See :class:`postdate.ports.scanning.RecordStreamStore`. A missing file is not created.

    Args:
        path: of the file.
        synchronous: as the other adapters on the file in this process have it.
        recording: likewise.
    """

    def __init__(self, path: str | Path, *, synchronous: str = "full", recording: Recording = Recording.ALL) -> None:
        self._file = SqliteFile.open(path, synchronous=synchronous, recording=recording, create=False)
        self._safe_end = 0
        self._closed = False

    @property
    @override
    def identity(self) -> str:
        """The path of the file: a copy elsewhere is another store."""
        return hashlib.sha256(f"sqlite {self._file.path}".encode()).hexdigest()[:24]

    @property
    @override
    def where(self) -> str:
        return f"SQLite {self._file.path}"

    @override
    def next_number(self) -> int:
        self._be_there()
        return self._file.read_blocking(
            lambda connection: int(connection.execute("SELECT coalesce(max(seq), 0) + 1 FROM record").fetchone()[0])
        )

    @override
    def safe_end(self) -> int:
        self._safe_end = max(self._safe_end, self.next_number())
        return self._safe_end

    @override
    def records(self, first: int, end: int, columns: Sequence[str], page: int) -> Iterable[list[tuple[Any, ...]]]:
        self._be_there()
        return read_scan(self._file, Scan("records", tuple(columns)), ScanPart(first, end), page)

    def _be_there(self) -> None:
        if not self._file.path.exists():
            raise StoreNotSetUp(f"there is no file {self._file.path}; create it with `postdate setup`, or name another")
        self._file.setup_blocking()  # a file that nobody has open has no log, which only a writer may create

    @override
    def close(self) -> None:
        closed, self._closed = self._closed, True
        if not closed:
            self._file.close()
