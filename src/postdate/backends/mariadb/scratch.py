"""A place for ``postdate bench`` on MariaDB: a database."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager

from postdate.backends.mariadb.connection import MariaDbServer
from postdate.ports.backends import Scratch


@contextmanager
def scratch(address: str, run: str, queues: Sequence[str]) -> Generator[Scratch]:
    """Yield a database of the run; drop it afterwards."""
    del queues  # MariaDB has no queues.
    database, server = f"postdate_bench_{run}", MariaDbServer(address)
    with closing(server.connect()) as session:
        session.change(f"CREATE DATABASE {database}")
    try:
        yield Scratch(address, {"schema": database})
    finally:
        # A new session, because the one that created the database may have ended during the run.
        with closing(server.connect()) as session:
            session.change(f"DROP DATABASE {database}")
