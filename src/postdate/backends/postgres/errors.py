"""The translation of PostgreSQL's errors into errors of Postdate, in one place."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

import psycopg

from postdate import errors
from postdate.backends.postgres.sessions import POOLED
from postdate.backends.sql.row_locks.parts import Meanings, error_of, meaning_of

_CONFLICTS = frozenset({"40001", "40P01", "22012"})
"""Serialization, deadlock, and the division by zero by which a move reports a row that was changed meanwhile."""

_MISSING = frozenset({"42P01", "3F000", "42703", "42704", "3D000"})
_FORBIDDEN = frozenset({"42501", "28000", "28P01"})

_MEANINGS: Final[Meanings] = {
    errors.StoreNotSetUp: _MISSING,
    errors.StoreNotWritable: _FORBIDDEN,
    errors.StoreReadOnly: frozenset({"25006"}),
    errors.StoreFull: frozenset({"53100", "53200"}),
    # Classes: connection; resources, as when no connection is free; intervention, as when the server stops or starts,
    # or ends a statement. The single codes: sessions and waits for locks that the server ended because of a timeout
    # setting.
    errors.StoreUnreachable: frozenset({"08", "53", "57", "25P03", "25P04", "55P03"}),
    # A conflict that is reported as a data error: see _CONFLICTS.
    errors.StoreTroubled: frozenset({"22012"}),
    # Data and constraints, also of a trigger or a function that the application added: 09, 21, 22, 23, 27, 38, 39, 44,
    # P0. Limits of the server, such as the size of an index row: 54. The state of a transaction of the application,
    # such as one that has failed already: 25.
    errors.StoreError: frozenset({"09", "21", "22", "23", "25", "27", "38", "39", "44", "54", "P0"}),
}
"""Our error for each SQLSTATE or its class; for every other class it is `StoreTroubled`.

An error counts against a message only where PostgreSQL's documentation says that it is about data. Statements are
constant, so a syntax error, a missing function or a changed cached plan is about the server, too. Source: ADR 50.
"""


def is_conflict(error: psycopg.Error) -> bool:
    """Return whether a transaction had a conflict with another one and may be repeated at once."""
    return error.sqlstate in _CONFLICTS


AFTER_AN_UPGRADE = "after an upgrade run the statements of `postdate setup --print-sql` again, grants included"


def translate(error: psycopg.Error, where: str) -> errors.PostdateError:
    text, state = str(error).strip().partition("\n")[0] or type(error).__name__, error.sqlstate or ""
    meaning = (
        _meaning_of_driver(error) if not state else meaning_of((state, state[:2]), _MEANINGS) or errors.StoreTroubled
    )
    if not state and "unsupported startup parameter" in text:  # the settings of each session; see sessions.py
        text = POOLED
    translated = error_of(meaning, text, where)
    return (
        errors.StoreNotWritable(f"{translated}; {AFTER_AN_UPGRADE}")
        if meaning is errors.StoreNotWritable
        else translated
    )


def _meaning_of_driver(error: psycopg.Error) -> type[errors.PostdateError]:
    """Return the meaning of an error without a SQLSTATE: the driver raised it, not the server."""
    if isinstance(error, psycopg.OperationalError):
        return errors.StoreUnreachable
    # A value that the driver cannot send, such as a text with a NUL. Any other error is a problem of the driver itself.
    is_about_values = isinstance(error, psycopg.DataError | psycopg.ProgrammingError | psycopg.NotSupportedError)
    return errors.StoreError if is_about_values else errors.StoreTroubled


def transport_error_of(error: errors.StoreUnavailable) -> errors.TransportUnavailable:
    """Return the transport's error for a failure of the database."""
    kind = errors.TransportUnreachable if error.outage else errors.TransportUnavailable
    translated = kind(str(error))
    translated.__cause__ = error  # In a list of errors, too: the store's error may be about a single row.
    return translated


@contextmanager
def translate_queue_errors() -> Generator[None]:
    try:
        yield
    except errors.StoreUnavailable as error:
        raise transport_error_of(error) from error


@contextmanager
def translate_errors(where: str) -> Generator[None]:
    try:
        yield
    except psycopg.Error as error:
        raise translate(error, where) from error


@contextmanager
def translate_missing_tables(where: str) -> Generator[None]:
    """Raise `StoreNotSetUp` if a statement on a connection of the application found a table missing.

    The connection may be of any driver: all of them have the SQLSTATE in an attribute. SQLAlchemy wraps their errors.
    """
    try:
        yield
    except Exception as error:
        cause = getattr(error, "orig", error)
        if getattr(cause, "sqlstate", None) not in _MISSING:
            raise
        raise error_of(errors.StoreNotSetUp, errors.first_line(cause), where) from error
