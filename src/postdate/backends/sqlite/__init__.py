"""A store, queues, sagas, an outbox and timeouts in one SQLite file, for one machine. Source: ADR 0003.

Differences from the other backends:

- Moving a due message into its queue is one transaction in one file, and so is handling it: exactly once.
- SQLite allows one writer at a time. The threads of a process pass their writes to a leader, which commits them
  together. Processes write one after the other.
- A claim is a row marked with the number of its process. Each process has a locked file of its own beside the
  database. When the process dies the lock ends, and the next process that checks releases its rows. There is no lease.
- Wake-ups are datagrams on the loopback interface.

Read ``store`` first, and ``moving`` for the SQL of a delivery; then ``transactions`` for grouped writes, and
``processes`` for claims.
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
        Meta(
            description="of a file: full: a commit survives a power loss; normal: a commit survives only the end "
            "of the process"
        ),
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
    timeouts=Adapter(
        "postdate.backends.sqlite.timeouts:SqliteTimeouts", PrefixedTables, from_store=_FILE, arguments=_CREATE
    ),
    records=Adapter("postdate.backends.sqlite.bulk:SqliteRecordStream", from_store=_FILE),
    timeouts_source=Adapter("postdate.backends.sqlite.timeouts_source:SqliteDialect"),
    library=Adapter("postdate.backends.sqlite.connection:library_facts"),
    file_facts=Adapter("postdate.backends.sqlite.observation:read_file_facts"),
    scripts=Adapter("postdate.backends.sqlite.database:scripts"),
)
