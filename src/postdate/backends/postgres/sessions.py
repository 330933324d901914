"""Names and settings of this process's sessions. Each name ends with the mark of the process.

All adapters of a process have the same mark, so one heartbeat is valid for all. If the sessions of a silent process are
ended, sessions without own heartbeats (of an outbox, of timeouts) are ended, too. Source: ADR 0054.
"""

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from postdate.backends.postgres.names import LONGEST_NAME_BYTES
from postdate.errors import ConfigurationError

_MARK_BYTES: Final = 8

POOLED: Final = (
    "a pooler such as pgbouncer answers there. Postdate needs sessions of its own, with settings, numbers and "
    "locks, which a pooler does not provide in any mode: name host and port of PostgreSQL itself"
)

_DEFAULTS: Final = {
    "connect_timeout": "5",
    # A server that has vanished is noticed after about 15 s.
    "keepalives_idle": "5",
    "keepalives_interval": "3",
    "keepalives_count": "3",
    "tcp_user_timeout": "15000",
}
_SETTINGS: Final = (
    "-c timezone=UTC "
    # Each statement of Postdate is meant to use an index and to stop early. A plan made while a table was small
    # must not become a scan of millions of rows later, so the session restricts the planner.
    "-c enable_seqscan=off -c enable_bitmapscan=off -c enable_sort=off -c jit=off "
    # A query over millions of messages uses one processor of the server, so that the others are free for deliveries.
    "-c max_parallel_workers_per_gather=0 "
    # One plan fits all values, and planning a move takes as long as moving one message.
    "-c plan_cache_mode=force_generic_plan "
    "-c idle_in_transaction_session_timeout=0 "
    # The server, too, notices within 15 s that this machine has vanished; by default it takes two hours.
    "-c tcp_keepalives_idle=5 -c tcp_keepalives_interval=3 -c tcp_keepalives_count=3"
)

_MEANING: Final = (
    "-c datestyle=ISO -c intervalstyle=postgres -c standard_conforming_strings=on "
    "-c default_transaction_isolation=read\\ committed"
)
"""What statements mean, and how values are written as text. No setting of a database or an address changes it."""


def mark() -> str:
    """Return the mark of this process, lower-case hexadecimal; the child of a fork has another mark."""
    return _mark_of(os.getpid())


@cache
def _mark_of(pid: int) -> str:
    return secrets.token_hex(_MARK_BYTES)


def session_name(name: str) -> str:
    """Return a session name: ``name``, shortened if necessary, and a suffix that shows an operator the process."""
    suffix = f"postdate {os.getpid()} {mark()}"  # the server cuts long names off at their end
    prefix = name.encode()[: LONGEST_NAME_BYTES - 1 - len(suffix)].decode(errors="ignore")
    return f"{prefix} {suffix}".strip()


def mark_condition(name: str, mark: str) -> str:
    """Return the SQL condition that the session name ``name`` ends with the mark ``mark`` (both expressions).

    The form of the mark is checked first, as it may be read from a table that other programs can write to.
    """
    digits = 2 * _MARK_BYTES
    return f"({mark} ~ '^[0-9a-f]{{{digits}}}$' AND right({name}, {digits}) = {mark})"


def check_unpooled(connection: psycopg.Connection[Any]) -> None:
    """Refuse a connection through a pooler; one round trip. Its process id differs from that of the server.

    A pooler in session mode is refused, too: there sessions begin without the settings of Postdate, and sessions of a
    silent process cannot be ended by their number. Raises `psycopg.OperationalError`, and closes the connection.
    """
    with ExitStack() as cleanup:
        cleanup.callback(connection.close)
        if connection.execute("SELECT pg_backend_pid()").fetchone() != (connection.pgconn.backend_pid,):
            raise psycopg.OperationalError(POOLED)
        cleanup.pop_all()


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """How to connect to one database.

    Args:
        conninfo: for statements of Postdate; it contains the password.
        options: the settings in it.
        for_applications: for sessions of handlers: the settings of the application, keep-alives to notice a vanished
            server, and a name by which the session is ended with a frozen process.
        shown: host, port and database, for texts.
        identity: equal for two addresses of the same database.
    """

    conninfo: str = field(repr=False)
    options: str = field(repr=False)
    for_applications: str = field(repr=False)
    shown: str
    identity: tuple[str, ...]


def address_of(url: str) -> ConnectionSettings:
    """Return how to connect to the database at ``url``. Raises `ConfigurationError`."""
    try:
        url_parts = conninfo_to_dict(url)
    except psycopg.ProgrammingError:  # not chained: its text may contain a part of a password that is not escaped
        raise ConfigurationError(
            "the address of the PostgreSQL database cannot be read; write postgresql://user:password@host:port/database"
        ) from None
    parts = {key: str(value) for key, value in url_parts.items() if value is not None}
    settings = {**_DEFAULTS, **parts}
    settings["options"] = options = f"{_SETTINGS} {settings.get('options', '')} {_MEANING}"
    # The name shows an operator which process has a row lock.
    settings["application_name"] = session_name(settings.get("application_name", ""))
    # The environment or the connection string may name an encoding that lacks characters.
    settings["client_encoding"] = "UTF8"
    of_applications = {**_DEFAULTS, "client_encoding": "UTF8", **parts}
    of_applications["application_name"] = session_name(parts.get("application_name", "outbox"))
    host, port = settings.get("host", ""), settings.get("port", "5432")
    database = settings.get("dbname", settings.get("user", ""))
    # Any difference makes two databases. For one database with two addresses only the shared transaction is lost.
    elsewhere = [settings.get(name, "") for name in ("hostaddr", "service")]
    return ConnectionSettings(
        make_conninfo("", **settings),
        options,
        make_conninfo("", **of_applications),
        f"PostgreSQL {host or 'local'}:{port}/{database}",
        ("postgres", host, *elsewhere, port, database),
    )
