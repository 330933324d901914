"""What a MariaDB server says of itself, for operators."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from postdate.backends.mariadb.connection import MariaDbSession
from postdate.backends.mariadb.names import Names
from postdate.backends.mariadb.setup import marks, steps
from postdate.clock import from_microseconds
from postdate.errors import StoreNotSetUp, StoreNotWritable
from postdate.persistence.migrations import standing
from postdate.ports import OldSnapshot, ServerFacts

_SETTINGS: Final = ("innodb_flush_log_at_trx_commit", "sync_binlog", "log_bin", "max_allowed_packet")
_OLD_SECONDS: Final = 60
# A transaction at READ COMMITTED looks anew with each statement and keeps nothing.
_OLD_SNAPSHOTS: Final = (
    "SELECT t.trx_mysql_thread_id, p.user, TIMESTAMPDIFF(SECOND, t.trx_started, SYSDATE()), "
    "COALESCE(t.trx_operation_state, p.command) FROM information_schema.innodb_trx AS t "
    "LEFT JOIN information_schema.processlist AS p ON p.id = t.trx_mysql_thread_id "
    "WHERE t.trx_isolation_level IN ('REPEATABLE READ', 'SERIALIZABLE') "
    "AND t.trx_started <= SYSDATE() - INTERVAL %(old)s SECOND ORDER BY t.trx_started"
)


def server_facts(session: MariaDbSession, names: Names) -> ServerFacts:
    """Return what the server says of itself; needs no tables."""
    asked = ", ".join(f"@@{name}" for name in _SETTINGS)
    ((version, isolation, now, *found),) = session.rows(
        f"SELECT VERSION(), @@tx_isolation, CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS SIGNED), {asked}"
    )
    settings = {"isolation": isolation, **dict(zip(_SETTINGS, map(str, found), strict=True))}
    try:
        done = marks(session, names)
    except StoreNotSetUp:
        done = list[tuple[Any, ...]]()
    there, newest = standing(steps(names), done)
    return ServerFacts("MariaDB", version, from_microseconds(now), there, newest, settings)


def old_snapshots(session: MariaDbSession) -> Sequence[OldSnapshot]:
    """Return the transactions that keep the server from cleaning up, the oldest first; none without the right to."""
    try:
        found = session.rows(_OLD_SNAPSHOTS, {"old": _OLD_SECONDS})
    except StoreNotWritable:
        return []
    return [
        OldSnapshot(thread, "", user or "", timedelta(seconds=int(age)), state or "")
        for thread, user, age, state in found
    ]
