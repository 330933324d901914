"""One SQLite file, which store, queues, sagas, outbox and timeouts share (ADR 0003).

Start with ``file``: the handle that all of them share in one process. It writes and reads by ``transactions``, on the
two connections of ``access``. ``registration`` is this process among the others that use the file, and ``upkeep`` is
what it does every second. ``store`` and ``transport`` are SQL in such transactions; due messages go by ``moving``.
"""

from dataclasses import dataclass
from typing import Annotated, Final, Literal

from msgspec import Meta

from postdate.ports.backends import Adapter, Addresses, Backend, Place
from postdate.ports.common import Recording
from postdate.ports.settings import HoldsAtMost, HowMuchIsRecorded, LargestMessageBytes, LimitedMessages, PrefixedTables

_FILE: Final = frozenset({"synchronous", "recording"})
_CREATE: Final = frozenset({"create"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreInFile:
    """Settings of the store."""

    synchronous: Annotated[
        Literal["full", "normal"],
        Meta(description="of a file: full: a commit survives loss of power; normal: any end of the process"),
    ] = "full"
    recording: HowMuchIsRecorded = Recording.ALL
    largest_message_bytes: LargestMessageBytes = None
    holds_at_most: HoldsAtMost = None


BACKEND: Final = Backend(
    product="SQLite",
    place=Place.FILE,
    addresses=Addresses(("sqlite",), "sqlite:///file.db"),
    queue_addresses=Addresses(("local",), "local:///file.db", aliases=("sqlite",)),
    store=Adapter("postdate.backends.sqlite.store:SqliteStore", StoreInFile, arguments=_CREATE),
    transport=Adapter(
        "postdate.backends.sqlite.transport:LocalTransport",
        LimitedMessages,
        from_store=_FILE | {"holds_at_most"},
        arguments=_CREATE | {"expiry", "clock"},
    ),
    sagas=Adapter("postdate.backends.sqlite.sagas:SqliteSagaStore", from_store=_FILE, arguments=_CREATE),
    outbox=Adapter("postdate.backends.sqlite.outbox:SqliteOutbox", from_store=frozenset({"synchronous"})),
    timeouts=Adapter("postdate.backends.sqlite.timeouts:SqliteTimeouts", PrefixedTables, from_store=_FILE),
    records=Adapter("postdate.backends.sqlite.bulk:SqliteRecordStream", from_store=_FILE),
    timeouts_source=Adapter("postdate.backends.sqlite.timeouts_source:SqliteDialect"),
    library=Adapter("postdate.backends.sqlite.connection:library_facts"),
    file_facts=Adapter("postdate.backends.sqlite.observation:look_at"),
    scripts=Adapter("postdate.backends.sqlite.database:scripts"),
)
