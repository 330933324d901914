"""The one place where errors of SQL Server become errors of Postdate."""

from __future__ import annotations

import struct
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from postdate.backends.rowlocks import Conflict
from postdate.backends.rowlocks.errors import Meanings, meaning_of, told
from postdate.backends.sqlserver.channel import Refused
from postdate.errors import (
    PostdateError,
    StoreError,
    StoreFull,
    StoreNotSetUp,
    StoreNotWritable,
    StoreReadOnly,
    StoreTroubled,
    StoreUnreachable,
)

_MEANINGS: Final[Meanings] = {
    # Deadlock, lock request timed out, update conflict under snapshot isolation, lost a race for one id.
    Conflict: frozenset({1205, 1222, 2601, 2627, 3960}),
    StoreNotSetUp: frozenset({207, 208, 911, 2812, 4902}),
    StoreFull: frozenset({1101, 1105, 3257, 9002, 40544}),
    StoreNotWritable: frozenset({229, 230, 262, 297, 300, 916, 2760, 6102, 15247, 18452, 18456}),
    StoreReadOnly: frozenset({3906, 3908, 978}),
    # The server goes or comes, or has ended our session; or the database (4060) does not exist, or not yet.
    StoreUnreachable: frozenset(
        {64, 233, 596, 921, 922, 927, 976, 983, 4014, 6005, 10053, 10054, 10060, 11001, 4060, 17142, 17187, 40143}
        | {40197, 40540, 40613}
    ),
    # It is busy.
    StoreTroubled: frozenset({601, 1204, 3980, 4221, 10928, 10929, 40501, 49918, 49919, 49920}),
}


def translate(error: Exception, where: str) -> PostdateError:
    if isinstance(error, TimeoutError) and not error.args and isinstance(error.__cause__, Exception):
        return translate(error.__cause__, where)  # the driver gave up trying; this is why
    number = getattr(error, "number", 0) or getattr(error, "msg_no", 0)
    said = str(getattr(error, "text", "") or error).strip().partition("\n")[0] or type(error).__name__
    meaning = meaning_of((number,), _MEANINGS)
    if meaning is None and getattr(error, "severity", 0) > 16:  # without resources, or with an error of its own
        meaning = StoreTroubled
    if meaning is not None:
        return told(meaning, said, where)
    if not number:  # not said by the server: the connection is gone, or never was
        return StoreUnreachable(f"{where}: {said}")
    return StoreError(f"{where}: {said} ({number})")


@contextmanager
def translated(where: str) -> Generator[None]:
    from pytds import Error  # pyright: ignore[reportMissingTypeStubs] - it has none

    try:
        yield
    except (Error, Refused, OSError, EOFError) as error:
        raise translate(error, where) from error
    except (AssertionError, IndexError, struct.error) as error:  # how the driver takes a packet that is cut short
        raise StoreUnreachable(f"{where}: the answer cannot be read ({error!r})") from error
