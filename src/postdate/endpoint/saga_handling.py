"""Handling of messages by saga instances: finds the instances, collects their requests, and stores their changes.

Source: specification 5, 4.10; ADR 0016.
"""

from __future__ import annotations

import inspect
import logging
import uuid
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from postdate.core.health.attempts import Attempts
from postdate.core.health.deadlines import translate_store_errors
from postdate.core.recoverability import MOST_OWN_FAILURES, is_outage
from postdate.core.simple_store import sharing_store
from postdate.endpoint.handler_context import HandlerContext
from postdate.endpoint.message_types import type_name
from postdate.endpoint.outgoing import Outgoing, OutgoingMessages, originating_saga_headers, reply_saga_headers
from postdate.endpoint.sagas import Saga, SagaDefinition, SagaMethod, SagaRole, correlation_text
from postdate.endpoint.send_options import SendOptions
from postdate.errors import (
    ConfigurationError,
    InvalidMessage,
    MessageError,
    PostdateError,
    SagaConflict,
    StoreUnreachable,
    UnknownMessageType,
)
from postdate.messages import DelayedMessage, Headers
from postdate.ports import (
    AdministrableStore,
    Correlation,
    SagaChange,
    SagaChangeKind,
    SagaRecord,
    SagaStore,
)
from postdate.runtime.bounded import Bounded

log = logging.getLogger("postdate.sagas")


class OwnStoreUnreachable(StoreUnreachable):
    """A store of the endpoint is out of reach. No message has caused it, so none is moved to the error queue for it."""


@contextmanager
def translate_own_store_errors(attempts: Attempts, message_id: str) -> Generator[None]:
    """Turn an outage of a store of the endpoint into :class:`OwnStoreUnreachable`, unless one message causes it."""
    try:
        yield
    except PostdateError as error:
        if is_outage(error) and attempts.report_own_failure(message_id, error) <= MOST_OWN_FAILURES:
            raise OwnStoreUnreachable(str(error)) from error
        raise
    else:
        attempts.report_success(message_id)


_FIRED_REMEMBERED: Final = 32
"""The largest number of handled timeouts, and of earlier instances, that an instance remembers."""

_NONE_BEFORE: Final = '"before":{}'
"""Details with this text have no earlier instances. Nearly all have none, and need not be decoded to know it."""

_MOST_PRELOADED: Final = 2_000
"""The largest number of instances that are remembered by :meth:`Sagas.preload`."""


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
        raise InvalidMessage(f"what is kept of {saga} cannot be read: {error}") from error


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
                f"saga {self.definition.name} requests a timeout {name} that it would not handle; mark a method with "
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
                f"nobody waits for a reply of {name_of(self.record)}: the message that began it has no header "
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
                f"{name_of(self.record)} changed its {name} to {value!r}: messages find it by that, so it must stay"
            )
        set_aside_changes = [] if self.leftover is None else [SagaChange(SagaChangeKind.SET_ASIDE, self.leftover)]
        if self.is_completed:
            for timeout_id in list(self.details.timeouts):
                self.cancel(timeout_id)
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
                f"the state of {name_of(self.record)} would come back as no {kind}: {error}; JSON has no NaN and no "
                f"infinity, and every property must have a value of its type"
            ) from error
        return text.decode()


def name_of(record: SagaRecord) -> str:
    return f"{record.saga_type} {record.correlation.property}={record.correlation.value!r}"


class _PreloadedInstance(NamedTuple):
    """The correlation value of a message, and the record of its instance, if there is one."""

    message: object
    value: object
    correlation: Correlation
    record: SagaRecord | None


class Sagas:
    """The sagas of one endpoint. ``database`` is that of the transaction in which messages of handlers are sent."""

    def __init__(self, store: SagaStore, database: object | None, messages: OutgoingMessages) -> None:
        self.store, self._messages = store, messages
        self._enlisting_store = sharing_store(store, store.capabilities.database, database)
        self._by_name: dict[str, SagaDefinition] = {}
        self._attempts = defaultdict[object, Attempts](Attempts)
        """The attempts, by the kind of call to the store."""
        self._methods_by_type = defaultdict[type[Any], list[tuple[SagaDefinition, SagaMethod]]](list)
        self._preloaded = Bounded[tuple[str, str], _PreloadedInstance](_MOST_PRELOADED)
        """Instances that :meth:`preload` has found, by message id and saga name."""

    def add(self, saga: type[Saga[Any]]) -> SagaDefinition:
        definition = getattr(saga, "definition", None)
        if not isinstance(definition, SagaDefinition) or definition.saga is not saga:
            raise ConfigurationError(f"{saga!r} is no saga; write class …(Saga[StateOfMine], correlated_by='…')")
        if definition.name in self._by_name:
            raise ConfigurationError(f"endpoint {self._messages.endpoint!r} has a saga {definition.name!r} already")
        if definition.timeouts and not self._messages.can_delay:
            raise ConfigurationError(
                f"saga {definition.name} has timeouts, and endpoint {self._messages.endpoint!r} no delayed message "
                f"store; pass delayed_delivery=DelayedDelivery(store) when you create it"
            )
        self._by_name[definition.name] = definition
        for message_type, method in definition.messages.items():
            self._methods_by_type[message_type].append((definition, method))
        return definition

    def handles(self, message_type: type[Any]) -> bool:
        return message_type in self._methods_by_type

    def has_one_saga(self, message_type: type[Any]) -> bool:
        """Return whether only one saga handles messages of a type. Another saga could change a message first."""
        return len(self._methods_by_type.get(message_type, ())) == 1

    # --- messages -------------------------------------------------------------------------------------------------

    async def preload(self, messages: Mapping[str, object]) -> None:
        """Find the instances of messages that were received together, with one query for each saga.

        ``messages`` has the messages by id. A message whose instance is not found here finds it when it is handled.
        Raises :class:`PostdateError`.
        """
        by_saga = defaultdict[str, dict[str, tuple[str, object, object]]](dict)
        with suppress(Exception):
            for message_id, message in messages.items():
                ((definition, method),) = self._methods_by_type[type(message)]
                if method.role is not SagaRole.HANDLES_REPLIES:
                    value, text = definition.correlation_of(message, method)
                    by_saga[definition.name].setdefault(text, (message_id, message, value))
        for name, by_text in by_saga.items():
            correlations = [Correlation(self._by_name[name].correlated_by, text) for text in by_text]
            with translate_store_errors(self.store):
                records = await self.store.find_all(name, correlations) or ()
            for (id_, message, value), correlation, record in zip(
                by_text.values(), correlations, records, strict=False
            ):
                self._preloaded[id_, name] = _PreloadedInstance(message, value, correlation, record)

    def forget(self, message_id: str, message_type: type[Any]) -> None:
        """Forget the instances that :meth:`preload` has found for a message."""
        for definition, _ in self._methods_by_type.get(message_type, ()):
            self._preloaded.pop((message_id, definition.name), None)

    async def handle(self, message: object, context: HandlerContext) -> None:
        """Let every saga of the message's type handle it.

        Raises:
            SagaConflict: an instance was changed meanwhile. Nothing was stored, and the message must be handled again.
            OwnStoreUnreachable: a store is out of reach, which is no failure of the message.
        """
        instances: list[SagaInstance] = []
        for definition, method in self._methods_by_type.get(type(message), ()):
            if self._is_reply_to_another(definition, method, context.headers):
                continue
            if method.role is SagaRole.HANDLES_REPLIES:
                instance = await self._find_reply_instance(definition, context)
            else:
                instance = await self._find_instance(definition, method, message, context)
            if instance is None:
                await definition.saga.not_found(message, context)
            else:
                await instance.run(method, message)
                instances.append(instance)
        await self._store_changes(instances, context)

    async def _find_instance(
        self, definition: SagaDefinition, method: SagaMethod, message: object, context: HandlerContext
    ) -> SagaInstance | None:
        preloaded = self._preloaded.pop((context.message_id, definition.name), None)
        has_no_earlier = preloaded is None or preloaded.record is None or _NONE_BEFORE in preloaded.record.details
        if preloaded is not None and preloaded.message is message and has_no_earlier:
            instance = self._load_or_create(definition, method, preloaded, context)
            if instance is not None:
                instance.is_preloaded = True
                return instance  # else find it again: it may have been created since
        value, text = definition.correlation_of(message, method)
        correlation = Correlation(definition.correlated_by, text)
        with translate_own_store_errors(self._attempts[SagaStore.find], context.message_id):
            record = await self.store.find(definition.name, correlation)
        if record is not None and _NONE_BEFORE not in record.details:
            earlier_id = decode_details(record.details, name_of(record)).before.get(context.message_id)
            if earlier_id is not None:  # the message completed that instance, and was received again
                set_aside, details = await self._load(definition, earlier_id, context)
                return None if set_aside is None else self._decode_instance(definition, set_aside, details, context)
        return self._load_or_create(
            definition, method, _PreloadedInstance(message, value, correlation, record), context
        )

    def _load_or_create(
        self, definition: SagaDefinition, method: SagaMethod, preloaded: _PreloadedInstance, context: HandlerContext
    ) -> SagaInstance | None:
        """Return the instance that was found, or a new one if the message starts one."""
        leftover: SagaRecord | None = None
        before = dict[str, str]()
        if preloaded.record is not None:
            details = decode_details(preloaded.record.details, name_of(preloaded.record))
            if not details.is_over_for(context.message_id):
                return self._decode_instance(definition, preloaded.record, details, context)
            leftover, before = preloaded.record, details.before_of_next(preloaded.record.saga_id)
        if method.role is not SagaRole.STARTS:
            return None
        record = SagaRecord(str(uuid.uuid4()), definition.name, preloaded.correlation, "")
        state = definition.new_state(preloaded.value)
        details = SagaDetails(before=before, originator=originator_of(context.headers))
        return SagaInstance(definition, record, state, details, context, self._messages, leftover)

    # --- replies --------------------------------------------------------------------------------------------------

    def _is_reply_to_another(self, definition: SagaDefinition, method: SagaMethod, headers: Mapping[str, str]) -> bool:
        """Return whether a reply is for another saga of this endpoint, so that this saga ignores it."""
        another = self._by_name.get(_saga_type(headers))
        if method.role is not SagaRole.HANDLES_REPLIES or another is None or another is definition:
            return False
        other_method = another.messages.get(method.message_type)
        return other_method is not None and other_method.role is SagaRole.HANDLES_REPLIES

    async def _find_reply_instance(self, definition: SagaDefinition, context: HandlerContext) -> SagaInstance | None:
        """Return the instance to which a message replies, if it belongs to this saga and is not completed."""
        if _saga_type(context.headers) != definition.name:
            return None
        record, details = await self._load_from_headers(definition, context)
        return None if record is None else self._decode_instance(definition, record, details, context)

    async def _load_from_headers(
        self, definition: SagaDefinition, context: HandlerContext
    ) -> tuple[SagaRecord | None, SagaDetails]:
        """Return record and details of the instance that the headers name. The record is ``None`` if completed."""
        return await self._load(definition, _saga_id(context.headers), context)

    async def _load(
        self, definition: SagaDefinition, saga_id: str, context: HandlerContext
    ) -> tuple[SagaRecord | None, SagaDetails]:
        with translate_own_store_errors(self._attempts[SagaStore.load], context.message_id):
            record = await self.store.load(definition.name, saga_id)
        if record is None:
            return None, SagaDetails()
        details = decode_details(record.details, name_of(record))
        return (None if details.is_over_for(context.message_id) else record), details

    # --- timeouts -------------------------------------------------------------------------------------------------

    async def handle_timeout(self, timeout: object, context: HandlerContext) -> None:
        """Let the saga instance that the headers name handle its timeout. Raises the errors of :meth:`handle`."""
        definition, method = self._timeout_method(timeout, context.headers)
        record, details = await self._load_from_headers(definition, context)
        saga_id = context.headers[Headers.SAGA_ID]
        if record is None:
            log.info("timeout %s of %s %s, which is completed: ignored", context.message_id, definition.name, saga_id)
            return
        if not details.has_timeout(context.message_id):
            log.info(
                "timeout %s of %s %s was cancelled, moved or handled before: ignored",
                context.message_id,
                definition.name,
                saga_id,
            )
            return
        instance = self._decode_instance(definition, record, details, context)
        details.remember_handled(context.message_id, remember=self._enlisting_store is None)
        await instance.run(method, timeout)
        await self._store_changes([instance], context)

    def _timeout_method(self, timeout: object, headers: Mapping[str, str]) -> tuple[SagaDefinition, SagaMethod]:
        name = _saga_type(headers)
        definition = self._by_name.get(name)
        if definition is None:
            all_sagas = ", ".join(sorted(self._by_name)) or "none"
            raise UnknownMessageType(f"a timeout for saga {name!r}, which is not here; sagas here: {all_sagas}")
        method = definition.timeouts.get(type(timeout))
        if method is None:
            raise UnknownMessageType(f"saga {name} handles no timeouts of type {type_name(type(timeout))}")
        return definition, method

    def _decode_instance(
        self, definition: SagaDefinition, record: SagaRecord, details: SagaDetails, context: HandlerContext
    ) -> SagaInstance:
        try:
            state = msgspec.json.decode(record.state, type=definition.state_type)
        except msgspec.MsgspecError as error:
            kind = definition.state_type.__name__
            raise InvalidMessage(f"the state of {name_of(record)} is no {kind} any more: {error}") from error
        return SagaInstance(definition, record, state, details, context, self._messages)

    # --- storing --------------------------------------------------------------------------------------------------

    async def _store_changes(self, instances: Sequence[SagaInstance], context: HandlerContext) -> None:
        """Store changes of instances: in the transaction of the completion, or before the messages are sent."""
        completed_by = None if self._enlisting_store is not None else context.message_id
        changes = [change for each in instances for change in each.changes(completed_by)]
        if changes and self._enlisting_store is not None:
            context.work.append(self._enlisting_store.applying_work(changes))
        elif changes:
            kinds = frozenset(each.kind for each in changes)  # inserting rows may fail while updates succeed
            with translate_own_store_errors(self._attempts[kinds], context.message_id):
                await self.store.apply(changes)
        for each in instances:
            if each.is_completed and (order := self._messages.clear_order(uuid.UUID(each.record.saga_id))):
                context.outgoing.append(order)
        revoked_ids = [message_id for each in instances for message_id in each.revoked_ids]
        if revoked_ids:
            context.on_completed.append(lambda: self._cancel_revoked(revoked_ids))
        if completed_by is not None:
            # A completed instance with earlier instances stays until the next one starts, which must know them, too.
            removable = [each for each in instances if each.is_completed and not each.details.before]
            records = [each.record for each in removable if each.record.version]
            completed_records = [
                replace(each, version=each.version + 1) for each in records
            ]  # the version that was stored
            if completed_records:
                context.on_completed.append(lambda: self._remove_completed(completed_records, completed_by))

    async def _cancel_revoked(self, message_ids: Sequence[str]) -> None:
        """Cancel revoked timeouts in the store, to save space. A revoked timeout that is delivered is ignored."""
        store = self._messages.store
        if not isinstance(store, AdministrableStore):
            return
        try:
            with translate_store_errors(store):
                for message_id in message_ids:
                    await store.cancel(message_id, self._messages.clock.now())
        except PostdateError as error:
            log.info("revoked timeouts stay in the store until they are due and ignored: %s", error)

    async def _remove_completed(self, records: Sequence[SagaRecord], completed_by: str) -> None:
        """Remove records that were marked as completed. A record that stays counts as completed, too."""
        for record in records:  # one by one, as a single conflict would keep all records
            try:
                with translate_store_errors(self.store):
                    await self._remove_one(record, completed_by)
            except SagaConflict:  # removed already
                continue
            except PostdateError as error:
                log.info("a completed saga stays in its store until another takes its place: %s", error)

    async def _remove_one(self, record: SagaRecord, completed_by: str) -> None:
        try:
            await self.store.apply([SagaChange(SagaChangeKind.COMPLETED, record)])
        except SagaConflict:
            set_aside = await self.store.load(record.saga_type, record.saga_id)
            if set_aside is None or decode_details(set_aside.details, name_of(set_aside)).completed_by != completed_by:
                return
            await self.store.apply(
                [SagaChange(SagaChangeKind.COMPLETED, set_aside)]
            )  # another instance has set it aside meanwhile


def is_saga_timeout(headers: Mapping[str, str]) -> bool:
    """Return whether a message is for the timeout handlers of sagas only."""
    return headers.get(Headers.IS_SAGA_TIMEOUT_MESSAGE, "").lower() == "true"


def _saga_type(headers: Mapping[str, str]) -> str:
    """Return the name of the saga that a message is for, without the assembly that .NET adds."""
    return headers.get(Headers.SAGA_TYPE, "").split(",")[0].strip()


def _saga_id(headers: Mapping[str, str]) -> str:
    text = headers.get(Headers.SAGA_ID, "")
    try:
        return str(uuid.UUID(text))
    except ValueError as error:
        raise InvalidMessage(f"header {Headers.SAGA_ID} names no saga instance: {text!r} is no UUID") from error
