"""A saga instance while it handles one message: what its saga requests, and the changes to be kept afterwards.

Its pending timeouts, and who began it, are the part of its record that is Postdate's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec

from postdate.endpoint.outgoing import HandlerContext, Outgoing, OutgoingMessages, SendOptions, sent_by_saga, to_saga_of
from postdate.endpoint.sagas import SagaDefinition, SagaMethod, as_text
from postdate.errors import ConfigurationError, InvalidMessage, MessageError
from postdate.messages import DelayedMessage, Headers
from postdate.ports import SagaChange, SagaFate, SagaRecord

_FIRED_REMEMBERED: Final = 32


@dataclass(slots=True)
class PendingTimeout:
    """A timeout that was requested and has not come.

    ``message_id`` is another after it was moved. ``type`` is its name on the wire, ``body`` JSON, to move it and to
    send it again. ``requested_by`` is the id of the message whose handler requested it.
    """

    message_id: str
    due: datetime
    type: str
    body: msgspec.Raw
    requested_by: str = ""


@dataclass(frozen=True, slots=True)
class Originator:
    """Who sent the message that began an instance: the address for replies, and the headers that these get."""

    address: str
    headers: Mapping[str, str]


def originator_of(headers: Mapping[str, str]) -> Originator | None:
    """Return who sent a message; ``None``: it wants no reply."""
    address = headers.get(Headers.REPLY_TO_ADDRESS)
    if not address:
        return None
    correlation = headers.get(Headers.CORRELATION_ID) or headers.get(Headers.MESSAGE_ID, "")
    about = {Headers.CORRELATION_ID: correlation} if correlation else {}
    return Originator(address, {**about, **to_saga_of(headers)})


@dataclass(slots=True)
class SagaDetails:
    """What Postdate remembers of an instance.

    Args:
        timeouts: those pending, by the id that :meth:`Saga.request_timeout` returned.
        fired: message ids of the last timeouts that came, so that one whose handling was kept and whose messages were
            not sent (a killed process) is handled again; only where these two are not one transaction.
        completed_by: id of the message that completed it, until the record is removed; likewise.
        originator: who sent the message that began it; ``None``: nobody who wants a reply.
    """

    timeouts: dict[str, PendingTimeout] = field(default_factory=dict[str, PendingTimeout])
    fired: list[str] = field(default_factory=list[str])
    completed_by: str | None = None
    originator: Originator | None = None

    def timeout_of(self, message_id: str) -> str | None:
        """Return the id of the pending timeout that travels under ``message_id``, or ``None``."""
        return next((key for key, each in self.timeouts.items() if each.message_id == message_id), None)

    def expects(self, message_id: str) -> bool:
        """Return whether to handle a timeout: it is pending, or came just now and may be unfinished."""
        return message_id in self.fired or self.timeout_of(message_id) is not None

    def came(self, message_id: str, *, remember: bool) -> None:
        """Note that a timeout was handled; ``remember`` it where that may have to be repeated."""
        timeout_id = self.timeout_of(message_id)
        if timeout_id is not None:
            del self.timeouts[timeout_id]
            if remember:
                self.fired = [*self.fired, message_id][-_FIRED_REMEMBERED:]

    def is_over_for(self, message_id: str) -> bool:
        """Return whether the instance was completed by another message than ``message_id``."""
        return self.completed_by is not None and self.completed_by != message_id


def encoded(details: SagaDetails) -> str:
    return msgspec.json.encode(details).decode()


def decoded(text: str, saga: str) -> SagaDetails:
    try:
        return msgspec.json.decode(text, type=SagaDetails)
    except msgspec.MsgspecError as error:
        raise InvalidMessage(f"what is kept of {saga} cannot be read: {error}") from error


@dataclass(slots=True)
class SagaInstance:
    """A saga instance while it handles one message; collects what its :class:`Saga` requests.

    ``record`` is as it was loaded; version 0: new. ``details`` are Postdate's own. ``leftover`` is a completed instance
    of the same correlation that was not removed yet.
    """

    definition: SagaDefinition
    record: SagaRecord
    state: Any
    details: SagaDetails
    context: HandlerContext
    messages: OutgoingMessages
    leftover: SagaRecord | None = None
    is_completed: bool = False
    _has_ended: bool = False
    revoked: list[str] = field(default_factory=list[str])
    """Message ids of timeouts that were revoked after they had left."""
    _again: list[str] = field(default_factory=list[str])

    async def run(self, method: SagaMethod, message: object) -> None:
        for timeout_id, pending in self.details.timeouts.items():
            if pending.requested_by == self.context.message_id:  # in an earlier attempt: it may not have left
                self._leaves(self._made(self._content(pending), None, pending.due, pending.message_id))
                self._again.append(timeout_id)
        saga = self.definition.saga(self.record.saga_id, self.state, self)
        self.context.saga = sent_by_saga(self.record.saga_id, self.definition.name)
        try:
            await getattr(saga, method.method)(message, self.context)
        finally:
            self.context.saga = {}
        self.state = saga.state
        self._has_ended = True

    # --- for the saga: see there ------------------------------------------------------------------------------------

    def request(self, timeout: object, within: timedelta | None, at: datetime | None) -> str:
        if inspect.isclass(timeout):
            timeout = timeout()
        if type(timeout) not in self.definition.timeouts:
            name = type(timeout).__name__
            raise ConfigurationError(
                f"saga {self.definition.name} requests a timeout {name} that it would not handle; mark a method with "
                f"@handles_timeout({name})"
            )
        outgoing = self._made(timeout, within, at)
        again = self._requested_before(outgoing)
        if again is not None:
            return again
        self.details.timeouts[outgoing.message_id] = self._leaves(outgoing)
        return outgoing.message_id

    def _made(
        self, timeout: object, within: timedelta | None, at: datetime | None, message_id: str | None = None
    ) -> Outgoing:
        if within is None and at is None:
            raise InvalidMessage("a timeout needs its time: within=timedelta(…), or at=datetime(…, tzinfo=…)")
        self._check_not_ended("request")
        headers = {
            Headers.IS_SAGA_TIMEOUT_MESSAGE: "True",
            Headers.SAGA_ID: self.record.saga_id,
            Headers.SAGA_TYPE: self.definition.name,
        }
        options = SendOptions(self.messages.endpoint, within, at, headers=headers, message_id=message_id)
        return self.messages.make(timeout, options, self.context.headers)

    def _check_not_ended(self, verb: str) -> None:
        if self._has_ended:
            raise MessageError(
                f"the handler of message {self.context.message_id!r} has ended: it can {verb} nothing any more"
            )

    def _leaves(self, outgoing: Outgoing) -> PendingTimeout:
        """Have a timeout sent with the end of the message."""
        self.context.outgoing.append(outgoing)
        due = outgoing.due if isinstance(outgoing, DelayedMessage) else self.messages.clock.now()
        kind, body = outgoing.headers[Headers.ENCLOSED_MESSAGE_TYPES], msgspec.Raw(outgoing.body)
        return PendingTimeout(outgoing.message_id, due, kind, body, self.context.message_id)

    def _requested_before(self, outgoing: Outgoing) -> str | None:
        """Return the id of the same timeout, if it was requested when this message was handled before."""
        for timeout_id in self._again:
            pending = self.details.timeouts.get(timeout_id)
            kind = outgoing.headers[Headers.ENCLOSED_MESSAGE_TYPES]
            if pending is not None and (pending.type, bytes(pending.body)) == (kind, outgoing.body):
                self._again.remove(timeout_id)
                return timeout_id
        return None

    def _content(self, pending: PendingTimeout) -> object:
        return self.messages.types.decode({Headers.ENCLOSED_MESSAGE_TYPES: pending.type}, bytes(pending.body))

    def cancel(self, timeout_id: str) -> bool:
        pending = self.details.timeouts.pop(timeout_id, None)
        if pending is not None:
            self._revoke(pending.message_id)
        return pending is not None

    def move(self, timeout_id: str, within: timedelta | None, at: datetime | None) -> bool:
        """Another message takes the place of the first, which counts no more."""
        pending = self.details.timeouts.get(timeout_id)
        if pending is None:
            return False
        self.details.timeouts[timeout_id] = self._leaves(self._made(self._content(pending), within, at))
        self._revoke(pending.message_id)
        return True

    def reply_to_originator(self, message: object, headers: Mapping[str, str] | None) -> str:
        originator = self.details.originator
        if originator is None:
            raise InvalidMessage(
                f"nobody waits for a reply of {name_of(self.record)}: the message that began it has no header "
                f"{Headers.REPLY_TO_ADDRESS!r}"
            )
        self._check_not_ended("send")
        own = {Headers.MESSAGE_INTENT: "Reply", **self.context.saga, **originator.headers, **(headers or {})}
        options = SendOptions(originator.address, headers=own)
        outgoing = self.messages.make(message, options, self.context.headers)
        self.context.outgoing.append(outgoing)
        return outgoing.message_id

    def pending(self) -> Mapping[str, datetime]:
        return {timeout_id: each.due for timeout_id, each in self.details.timeouts.items()}

    def complete(self) -> None:
        self.is_completed = True

    def _revoke(self, message_id: str) -> None:
        """Drop a timeout that has not left; one that has is to be taken out of the store afterwards."""
        left = [each for each in self.context.outgoing if each.message_id != message_id]
        if len(left) < len(self.context.outgoing):
            self.context.outgoing[:] = left
        else:
            self.revoked.append(message_id)

    # --- for the endpoint ---------------------------------------------------------------------------------------------

    def changes(self, completed_by: str | None) -> Sequence[SagaChange]:
        """Return the changes to be kept; a completed instance is removed, or marked ``completed_by`` a message."""
        name = self.definition.correlated_by
        value = as_text(getattr(self.state, name), name, type(self.state).__name__)
        if value != self.record.correlation.value:
            raise InvalidMessage(
                f"{name_of(self.record)} changed its {name} to {value!r}: messages find it by that, so it must stay"
            )
        replaced = [] if self.leftover is None else [SagaChange(SagaFate.COMPLETED, self.leftover)]
        if self.is_completed:
            for timeout_id in list(self.details.timeouts):
                self.cancel(timeout_id)
            if not self.record.version:  # it was never kept
                return replaced
            if completed_by is None:
                return [SagaChange(SagaFate.COMPLETED, self.record)]
            self.details.completed_by = completed_by
        fate = SagaFate.UPDATED if self.record.version else SagaFate.CREATED
        kept = replace(self.record, state=self._encoded_state(), details=encoded(self.details))
        return [*replaced, SagaChange(fate, kept)]

    def _encoded_state(self) -> str:
        try:
            text = msgspec.json.encode(self.state)
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            raise InvalidMessage(f"the state of {name_of(self.record)} cannot be written as JSON: {error}") from error
        try:  # what cannot be read again would fail every later message of the instance
            msgspec.json.decode(text, type=self.definition.state_type)
        except msgspec.MsgspecError as error:
            kind = self.definition.state_type.__name__
            raise InvalidMessage(
                f"the state of {name_of(self.record)} would come back as no {kind}: {error}; JSON has no NaN and no "
                f"infinity, and every property must have a value of its type"
            ) from error
        return text.decode()


def name_of(record: SagaRecord) -> str:
    return f"{record.saga_type} {record.correlation.property}={record.correlation.value!r}"
