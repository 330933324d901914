"""The bytes in which outboxes keep what handlers sent, between the commit and the dispatch.

Every instant is absolute, so that a late or repeated dispatch does not delay a message any longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import msgspec

from postdate.clock import from_microseconds, to_microseconds
from postdate.errors import StoreError
from postdate.messages import DelayedMessage, Envelope
from postdate.ports.endpoint import Operation

_VERSION: Final = 1
_MICROSECOND: Final = timedelta(microseconds=1)


class _KeptOperation(msgspec.Struct, omit_defaults=True):
    """One operation; instants are microseconds since 1970 UTC, spans microseconds."""

    destination: str
    message_id: str
    headers: dict[str, str]
    body: bytes
    delayed: bool = False
    due: int | None = None
    expires_at: int | None = None
    time_to_be_received: int | None = None
    use_dead_letter_queue: bool | None = None


class _KeptOperations(msgspec.Struct):
    version: int
    operations: list[_KeptOperation]


def encode_operations(operations: Sequence[Operation]) -> bytes:
    return msgspec.msgpack.encode(_KeptOperations(_VERSION, [_kept(each) for each in operations]))


def decode_operations(encoded: bytes) -> tuple[Operation, ...]:
    """Return the operations of :func:`encode_operations`. Raises `StoreError` if damaged, or of a later version."""
    try:
        kept = msgspec.msgpack.decode(encoded, type=_KeptOperations)
    except msgspec.MsgspecError as error:
        raise StoreError(f"the operations of a message in the outbox are damaged: {error}") from error
    if kept.version != _VERSION:
        raise StoreError(f"the outbox was written by a newer Postdate (version {kept.version}): upgrade Postdate here")
    return tuple(_operation(each) for each in kept.operations)


def _kept(operation: Operation) -> _KeptOperation:
    kept = _KeptOperation(operation.destination, operation.message_id, dict(operation.headers), operation.body)
    kept.due = None if operation.due is None else to_microseconds(operation.due)
    kept.expires_at = None if operation.expires_at is None else to_microseconds(operation.expires_at)
    if isinstance(operation, DelayedMessage):
        kept.delayed = True
        return kept
    span = operation.time_to_be_received
    kept.time_to_be_received = None if span is None else span // _MICROSECOND
    kept.use_dead_letter_queue = operation.use_dead_letter_queue
    return kept


def _operation(kept: _KeptOperation) -> Operation:
    due = None if kept.due is None else from_microseconds(kept.due)
    expires_at = None if kept.expires_at is None else from_microseconds(kept.expires_at)
    if kept.delayed and due is not None:
        return DelayedMessage(kept.message_id, due, kept.destination, kept.headers, kept.body, expires_at)
    span = None if kept.time_to_be_received is None else kept.time_to_be_received * _MICROSECOND
    return Envelope(
        kept.destination,
        kept.message_id,
        kept.headers,
        kept.body,
        expires_at,
        due=due,
        time_to_be_received=span,
        use_dead_letter_queue=kept.use_dead_letter_queue,
    )
