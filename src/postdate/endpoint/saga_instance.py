"""A saga instance while it handles one message: its requests, its state, and its pending timeouts.

Source: ADR 0016.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Annotated, Any, Final

import msgspec

from postdate.endpoint.handler_context import HandlerContext
from postdate.endpoint.outgoing import Outgoing, OutgoingMessages, originating_saga_headers, reply_saga_headers
from postdate.endpoint.sagas import SagaDefinition, SagaMethod, correlation_text
from postdate.endpoint.send_options import SendOptions
from postdate.errors import ConfigurationError, InvalidMessage, MessageError, SagaConflict
from postdate.messages import DelayedMessage, Headers
from postdate.ports import SagaChange, SagaChangeKind, SagaRecord

_FIRED_REMEMBERED: Final = 32
"""The largest number of handled timeouts, and of earlier instances, that an instance remembers."""


@dataclass(slots=True)
class PendingTimeout:
    """A timeout that was requested and is pending.

    ``message_id`` changes when the timeout is moved. ``type`` is the name of its type on the wire, and ``body`` is its
    JSON; both are needed to move it or to send it again. ``requested_by`` is the id of the message whose handler
    requested it.
    """

    message_id: str
    due: Annotated[datetime, msgspec.Meta(tz=True)]
    type: str
    body: msgspec.Raw
    requested_by: str = ""


@dataclass(frozen=True, slots=True)
class Originator:
    """The sender of the message that started an instance: its address for replies, and the headers of replies."""

    address: str
    headers: Mapping[str, str]


def originator_of(headers: Mapping[str, str]) -> Originator | None:
    """Return the originator of a message; ``None``: the message has no address for replies."""
    address = headers.get(Headers.REPLY_TO_ADDRESS)
    if not address:
        return None
    correlation = headers.get(Headers.CORRELATION_ID) or headers.get(Headers.MESSAGE_ID, "")
    correlation_headers = {Headers.CORRELATION_ID: correlation} if correlation else {}
    return Originator(address, {**correlation_headers, **reply_saga_headers(headers)})


@dataclass(slots=True)
class SagaDetails:
    """The data of Postdate about an instance, stored beside its state.

    Args:
        timeouts: pending timeouts, by the id that :meth:`Saga.request_timeout` returned.
        fired: message ids of the last timeouts that were handled. If the process was killed after the state was stored
            and before the messages were sent, the timeout is handled again. Empty if both are one transaction.
        completed_by: id of the message that completed the instance, until the record is removed. ``None`` if state and
            messages are one transaction.
        before: ids of completed instances with the same correlation value that were set aside when this one started, by
            the id of the message that completed each. That message may be received again.
        originator: the sender of the message that started the instance; ``None``: it had no address for replies.
    """

    timeouts: dict[str, PendingTimeout] = field(default_factory=dict[str, PendingTimeout])
    fired: list[str] = field(default_factory=list[str])
    completed_by: str | None = None
    before: dict[str, str] = field(default_factory=dict[str, str])
    originator: Originator | None = None

    def timeout_of(self, message_id: str) -> str | None:
        """Return the id of the pending timeout that was sent with ``message_id``, or ``None``."""
        return next((key for key, each in self.timeouts.items() if each.message_id == message_id), None)

    def has_timeout(self, message_id: str) -> bool:
        """Return whether to handle a timeout: it is pending, or was handled lately and may be unfinished."""
        return message_id in self.fired or self.timeout_of(message_id) is not None

    def remember_handled(self, message_id: str, *, remember: bool) -> None:
        """Remove a handled timeout from the pending ones; ``remember`` it if its handling may have to be repeated."""
        timeout_id = self.timeout_of(message_id)
        if timeout_id is not None:
            del self.timeouts[timeout_id]
            if remember:
                self.fired = [*self.fired, message_id][-_FIRED_REMEMBERED:]

    def before_of_next(self, saga_id: str) -> dict[str, str]:
        """Return :attr:`before` for the next instance. This instance, with ``saga_id``, is set aside."""
        before = self.before if self.completed_by is None else {**self.before, self.completed_by: saga_id}
        return dict(list(before.items())[-_FIRED_REMEMBERED:])

    def is_over_for(self, message_id: str) -> bool:
        """Return whether the instance was completed by another message than ``message_id``."""
        return self.completed_by is not None and self.completed_by != message_id


def encode_details(details: SagaDetails) -> str:
    return msgspec.json.encode(details).decode()


def decode_details(text: str, saga: str) -> SagaDetails:
    try:
        return msgspec.json.decode(text, type=SagaDetails)
    except msgspec.MsgspecError as error:
        raise InvalidMessage(f"the stored state of {saga} cannot be read: {error}") from error


@dataclass(slots=True)
class SagaInstance:
    """A saga instance while it handles one message. It collects the requests of its :class:`Saga`.

    ``record`` is the record as it was loaded; its version is 0 for a new instance. ``leftover`` is a completed instance
    of the same correlation that was not removed yet: the message that completed it may still be received again.
    """

    definition: SagaDefinition
    record: SagaRecord
    state: Any
    details: SagaDetails
    context: HandlerContext
    messages: OutgoingMessages
    leftover: SagaRecord | None = None
    is_completed: bool = False
    is_preloaded: bool = False
    """Whether the record was loaded by :meth:`Sagas.preload`, some time before the message is handled."""
    _has_ended: bool = False
    revoked_ids: list[str] = field(default_factory=list[str])
    """Message ids of timeouts that were revoked after they had been sent."""
    _repeatable_ids: list[str] = field(default_factory=list[str])

    async def run(self, method: SagaMethod, message: object) -> None:
        for timeout_id, pending in self.details.timeouts.items():
            # Requested in an earlier attempt at this message, which may not have sent the timeout.
            if pending.requested_by == self.context.message_id:
                self._send_timeout(self._create_timeout(self._content(pending), None, pending.due, pending.message_id))
                self._repeatable_ids.append(timeout_id)
        saga = self.definition.saga(self.record.saga_id, self.state, self)
        self.context.saga = originating_saga_headers(self.record.saga_id, self.definition.name)
        try:
            await getattr(saga, method.method)(message, self.context)
        finally:
            self.context.saga, self._has_ended = {}, True
        self.state = saga.state

    # --- methods of `_Requests`, see `Saga` --------------------------------------------------------------------------

    def request(self, timeout: object, within: timedelta | None, at: datetime | None) -> str:
        if inspect.isclass(timeout):
            timeout = timeout()
        if type(timeout) not in self.definition.timeouts:
            name = type(timeout).__name__
            raise ConfigurationError(
                f"saga {self.definition.name} requests a timeout {name} that it does not handle; mark a method with "
                f"@handles_timeout({name})"
            )
        outgoing = self._create_timeout(timeout, within, at)
        repeated_id = self._find_repeated_request(outgoing)
        if repeated_id is not None:
            return repeated_id
        self.details.timeouts[outgoing.message_id] = self._send_timeout(outgoing)
        return outgoing.message_id

    def _create_timeout(
        self, timeout: object, within: timedelta | None, at: datetime | None, message_id: str | None = None
    ) -> Outgoing:
        if within is None and at is None:
            raise InvalidMessage("a timeout needs its time: within=timedelta(…), or at=datetime(…, tzinfo=…)")
        self._check_in_handler("request")
        headers = {
            Headers.IS_SAGA_TIMEOUT_MESSAGE: "True",
            Headers.SAGA_ID: self.record.saga_id,
            Headers.SAGA_TYPE: self.definition.name,
        }
        options = SendOptions(self.messages.endpoint, within, at, headers=headers, message_id=message_id)
        return self.messages.create(timeout, options, self.context.headers)

    def _check_in_handler(self, verb: str) -> None:
        if self._has_ended:
            raise MessageError(
                f"the handler of message {self.context.message_id!r} has ended: it can {verb} nothing any more"
            )

    def _send_timeout(self, outgoing: Outgoing) -> PendingTimeout:
        """Send a timeout when the message is completed; return its entry."""
        self.context.outgoing.append(outgoing)
        due = outgoing.due if isinstance(outgoing, DelayedMessage) else self.messages.clock.now()
        kind, body = outgoing.headers[Headers.ENCLOSED_MESSAGE_TYPES], msgspec.Raw(outgoing.body)
        return PendingTimeout(outgoing.message_id, due, kind, body, self.context.message_id)

    def _find_repeated_request(self, outgoing: Outgoing) -> str | None:
        """Return the id of the same timeout, if it was requested when this message was handled before."""
        for timeout_id in self._repeatable_ids:
            pending = self.details.timeouts.get(timeout_id)
            kind = outgoing.headers[Headers.ENCLOSED_MESSAGE_TYPES]
            if pending is not None and (pending.type, bytes(pending.body)) == (kind, outgoing.body):
                self._repeatable_ids.remove(timeout_id)
                return timeout_id
        return None

    def _content(self, pending: PendingTimeout) -> object:
        return self.messages.types.decode({Headers.ENCLOSED_MESSAGE_TYPES: pending.type}, bytes(pending.body))

    def cancel(self, timeout_id: str) -> bool:
        self._check_in_handler("cancel")
        return self._cancel(timeout_id)

    def _cancel(self, timeout_id: str) -> bool:
        pending = self.details.timeouts.pop(timeout_id, None)
        if pending is not None:
            self._revoke(pending.message_id)
        return pending is not None

    def move(self, timeout_id: str, within: timedelta | None, at: datetime | None) -> bool:
        """Move a timeout: another message replaces the first one, which is revoked."""
        pending = self.details.timeouts.get(timeout_id)
        if pending is None:
            return False
        self.details.timeouts[timeout_id] = self._send_timeout(self._create_timeout(self._content(pending), within, at))
        self._revoke(pending.message_id)
        return True

    def reply_to_originator(self, message: object, headers: Mapping[str, str] | None) -> str:
        originator = self.details.originator
        if originator is None:
            raise InvalidMessage(
                f"there is no receiver for a reply of {name_of(self.record)}: the message that started it has no "
                f"header "
                f"{Headers.REPLY_TO_ADDRESS!r}"
            )
        self._check_in_handler("send")
        reply_headers = {Headers.MESSAGE_INTENT: "Reply", **self.context.saga, **originator.headers, **(headers or {})}
        options = SendOptions(originator.address, headers=reply_headers)
        outgoing = self.messages.create(message, options, self.context.headers)
        self.context.outgoing.append(outgoing)
        return outgoing.message_id

    def pending_dues(self) -> Mapping[str, datetime]:
        return {timeout_id: each.due for timeout_id, each in self.details.timeouts.items()}

    def complete(self) -> None:
        self._check_in_handler("complete")
        self.is_completed = True

    def _revoke(self, message_id: str) -> None:
        """Drop a timeout that was not sent yet. A timeout that was sent is cancelled in the store later."""
        remaining = [each for each in self.context.outgoing if each.message_id != message_id]
        if len(remaining) < len(self.context.outgoing):
            self.context.outgoing[:] = remaining
        else:
            self.revoked_ids.append(message_id)

    # --- for the endpoint ---------------------------------------------------------------------------------------------

    def changes(self, completed_by: str | None) -> Sequence[SagaChange]:
        """Return the changes to store. A completed instance is removed, or marked as ``completed_by`` a message."""
        name = self.definition.correlated_by
        value = correlation_text(getattr(self.state, name), name, type(self.state).__name__)
        if value != self.record.correlation.value:
            raise InvalidMessage(
                f"{name_of(self.record)} changed its {name} to {value!r}: messages find the saga by this property, "
                f"so it must not change"
            )
        set_aside_changes = [] if self.leftover is None else [SagaChange(SagaChangeKind.SET_ASIDE, self.leftover)]
        if self.is_completed:
            for timeout_id in list(self.details.timeouts):
                self._cancel(timeout_id)
            if not self.record.version:  # the instance was never stored
                if self.is_preloaded:  # and no write would show that another process created it
                    raise SagaConflict(f"{name_of(self.record)} may have been created meanwhile")
                return []
            if completed_by is None:
                return [SagaChange(SagaChangeKind.COMPLETED, self.record)]
            self.details.completed_by = completed_by
        kind = SagaChangeKind.UPDATED if self.record.version else SagaChangeKind.CREATED
        record, state = self.record, self._encode_state()
        saga_record = SagaRecord(
            record.saga_id, record.saga_type, record.correlation, state, encode_details(self.details), record.version
        )
        return [*set_aside_changes, SagaChange(kind, saga_record)]

    def _encode_state(self) -> str:
        try:
            text = msgspec.json.encode(self.state)
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            raise InvalidMessage(f"the state of {name_of(self.record)} cannot be written as JSON: {error}") from error
        try:  # a state that cannot be decoded would fail every later message of the instance
            msgspec.json.decode(text, type=self.definition.state_type)
        except msgspec.MsgspecError as error:
            kind = self.definition.state_type.__name__
            raise InvalidMessage(
                f"the state of {name_of(self.record)} could not be read as {kind} again: {error}; JSON has no NaN "
                f"and no "
                f"infinity, and every property must have a value of its type"
            ) from error
        return text.decode()


def name_of(record: SagaRecord) -> str:
    return f"{record.saga_type} {record.correlation.property}={record.correlation.value!r}"
