"""The one place where errors of MariaDB become errors of Postdate."""

from __future__ import annotations

import struct
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

import pymysql

from postdate.backends.rowlocks import Conflict
from postdate.backends.rowlocks.errors import Meanings, meaning_of, told
from postdate.backends.rowlocks.parts import DuplicateKey
from postdate.errors import (
    MessageTooLarge,
    PostdateError,
    StoreError,
    StoreFull,
    StoreNotSetUp,
    StoreNotWritable,
    StoreReadOnly,
    StoreTroubled,
    StoreUnreachable,
)


class LockedTooLong(Conflict):
    """Another transaction held a row lock for longer than we wait."""


_MEANINGS: Final[Meanings] = {
    LockedTooLong: frozenset({1205}),
    DuplicateKey: frozenset({1062}),
    Conflict: frozenset({1213, 1020}),  # deadlock; record has changed since last read
    StoreNotSetUp: frozenset({1049, 1051, 1054, 1146}),
    StoreFull: frozenset({1021, 1038, 1041, 1114}),
    StoreNotWritable: frozenset({1044, 1045, 1142, 1143, 1227, 1698}),
    StoreReadOnly: frozenset({1290, 1792, 1836, 4047}),
    MessageTooLarge: frozenset({1153, 1301}),
    # General, but about what was asked for: a text that is none of its character set, or not comparable; more than one
    # statement, transaction or undo record may be; a row that no partition is for.
    StoreError: frozenset({1197, 1267, 1270, 1271, 1300, 1366, 1526, 1705, 1713}),
    # The server goes, is full of connections, or ended ours. What the driver itself says follows below.
    StoreUnreachable: frozenset(
        {1040, 1053, 1077, 1079, 1080, 1129, 1152, 1158, 1159, 1160, 1161, 1184, 1203, 1226, 1927}
    ),
    # It ended our statement, or gave up by itself. Classes: connection, a general error, login, transaction, ended.
    StoreTroubled: frozenset({"08", "HY", "28", "40", "70"}),
}
"""Errors about the server. Other classes are about the statement, or come from a trigger."""


def translate(error: pymysql.Error, where: str) -> PostdateError:
    number, said = _number_and_text(error)
    # Some general errors are about the data, such as a text that its column cannot have: the driver knows which.
    is_of_data = isinstance(error, pymysql.DataError | pymysql.IntegrityError | pymysql.NotSupportedError)
    state: str = "" if is_of_data else getattr(error, "sqlstate", None) or ""
    meaning = meaning_of((number, state[:2]), _MEANINGS)
    if meaning is not None:
        return told(meaning, said, where)
    # Without a number it is the driver that speaks: the packets are out of order.
    is_out_of_order = number == 0 and isinstance(error, pymysql.err.InternalError)
    if 2000 <= number < 2100 or isinstance(error, pymysql.err.InterfaceError) or is_out_of_order:
        return StoreUnreachable(f"{where}: {said}")
    return StoreError(f"{where}: {said} ({number})")


def _number_and_text(error: pymysql.Error) -> tuple[int, str]:
    number = error.args[0] if error.args and isinstance(error.args[0], int) else 0
    said = str(error.args[1]) if len(error.args) > 1 else str(error)
    return number, said.strip().partition("\n")[0] or type(error).__name__


@contextmanager
def translated(where: str, seconds: float | None = None) -> Generator[None]:
    """Raise errors of MariaDB, and of its connection, as errors of Postdate; ``seconds``: the limit on its answer."""
    try:
        yield
    except pymysql.Error as error:
        if isinstance(error.__context__, TimeoutError) and seconds is not None:  # the driver has ended the connection
            raise StoreUnreachable(f"{where}: did not answer within {seconds:g} s") from error
        raise translate(error, where) from error
    except (OSError, EOFError) as error:
        raise StoreUnreachable(f"{where}: {error or type(error).__name__}") from error
    except (AssertionError, IndexError, struct.error) as error:  # how the driver takes a packet that is cut short
        raise StoreUnreachable(f"{where}: the answer cannot be read ({error!r})") from error
