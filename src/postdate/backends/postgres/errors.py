"""The one place where errors of PostgreSQL become errors of Postdate."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import psycopg

from postdate.errors import (
    PostdateError,
    StoreError,
    StoreFull,
    StoreNotSetUp,
    StoreNotWritable,
    StoreUnavailable,
    StoreUnreachable,
    TransportUnavailable,
    TransportUnreachable,
)

_PASSING_CLASSES = frozenset({"08", "40", "53", "55", "57", "58", "XX"})
"""Connection, serialization, resources, object not in the state, intervention, system: later it may go well."""

_CONFLICTS = frozenset({"40001", "40P01", "22012"})
"""Serialization, deadlock, and the division by zero with which a move says that a row changed under its hands."""

_UNREACHABLE = frozenset({"53300", "57P01", "57P02", "57P03", "57P05", "25P03", "25P04", "55P03", "57014"})
"""No connection is free, the server is going down or coming up, or it has ended a session, a wait for a lock or a
statement because that took too long by a setting of the role: no answer in time, and nothing about what was asked."""

_FULL = frozenset({"53100", "53200"})
_MISSING = frozenset({"42P01", "3F000", "42703", "42704", "3D000"})
_FORBIDDEN = frozenset({"42501", "25006", "28000", "28P01"})


def is_conflict(error: psycopg.Error) -> bool:
    """Return whether the transaction lost against another and may be tried again at once."""
    return error.sqlstate in _CONFLICTS


AFTER_AN_UPGRADE = "after an upgrade run the statements of `postdate setup --print-sql` again, grants included"


def is_refused(error: psycopg.Error) -> bool:
    """Return whether a table is not there for this role, as after an upgrade without its statements and grants."""
    return error.sqlstate in _MISSING | _FORBIDDEN


def translate(error: psycopg.Error, where: str) -> PostdateError:
    """Return what went wrong with the database ``where`` (without its password) and what to do about it."""
    said, state = str(error).strip().partition("\n")[0], error.sqlstate or ""
    if state in _MISSING:
        return StoreNotSetUp(f"{where} lacks tables of Postdate ({said}); run `postdate setup`")
    if state in _FULL:
        return StoreFull(f"{where} has no room ({said}); nothing was written; make room and go on")
    if state in _FORBIDDEN:
        return StoreNotWritable(f"{where} refuses ({said}); check user, password and grants; {AFTER_AN_UPGRADE}")
    if state in _UNREACHABLE or state[:2] == "08" or (not state and isinstance(error, psycopg.OperationalError)):
        return StoreUnreachable(f"{where}: {said or type(error).__name__}")
    if state[:2] in _PASSING_CLASSES:
        return StoreUnavailable(f"{where}: {said or type(error).__name__}")
    return StoreError(f"{where}: {said}")


def of_queues(error: StoreUnavailable) -> TransportUnavailable:
    """Return what a failure of the database means for the queues in it."""
    kind = TransportUnreachable if isinstance(error, StoreUnreachable) else TransportUnavailable
    return kind(str(error))


@contextmanager
def translated(where: str) -> Generator[None]:
    """Raise errors of PostgreSQL as errors of Postdate."""
    try:
        yield
    except psycopg.Error as error:
        raise translate(error, where) from error
