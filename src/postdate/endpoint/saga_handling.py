"""How messages find saga instances, and how what became of these is kept. Source: specification 5, 4.10; ADR 0016."""

from __future__ import annotations

import inspect
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Protocol

import msgspec

from postdate.clock import Clock
from postdate.endpoint.saga_timeouts import PendingTimeout, SagaDetails, decoded, encoded
from postdate.endpoint.sagas import Saga, SagaDefinition, SagaMethod, SagaRole, as_text
from postdate.endpoint.sending import SendOptions
from postdate.endpoint.serialization import MessageTypes, type_name
from postdate.errors import (
    ConfigurationError,
    InvalidMessage,
    MessageError,
    PostdateError,
    SagaConflict,
    UnknownMessageType,
    UnsupportedTransactionMode,
)
from postdate.messages import DelayedMessage, Envelope, Headers
from postdate.ports import AdministrableStore, SagaChange, SagaFate, SagaRecord, SagaStore, TransactionMode, Work
from postdate.ports.sagas import Correlation, EnlistingSagaStore
from postdate.ports.transports import Transport

log = logging.getLogger("postdate.sagas")

Outgoing = Envelope | DelayedMessage


class Handling(Protocol):
    """What is needed of a :class:`~postdate.HandlerContext`."""

    outgoing: list[Outgoing]
    work: list[Work]
    afterwards: list[Callable[[], Awaitable[None]]]

    @property
    def headers(self) -> Mapping[str, str]:
        """Of the message."""
        ...

    @property
    def message_id(self) -> str:
        """Of the message, however often it is delivered."""
        ...


@dataclass(frozen=True, slots=True)
class SagaSurroundings:
    """What sagas need of their endpoint.

    Args:
        endpoint: its name, which is where timeouts go.
        transport: of its queues.
        delays: where delayed messages wait; ``None``: nothing can be delayed.
        clock: tells the time.
        types: of messages.
        outgoing: makes what is sent of a message; sends nothing.
    """

    endpoint: str
    transport: Transport
    delays: object | None
    clock: Clock
    types: MessageTypes
    outgoing: Callable[[object, SendOptions, Mapping[str, str]], Outgoing]


def enlisting_sagas(store: SagaStore, transport: Transport) -> EnlistingSagaStore | None:
    """Return the store if it can share a transaction with the transport."""
    database = store.capabilities.database
    if database is None or database != transport.capabilities.database or not isinstance(store, EnlistingSagaStore):
        return None
    return store


def check_saga_mode(store: SagaStore, transport: Transport, mode: TransactionMode) -> None:
    """Refuse a transaction mode whose promise sagas cannot keep there.

    Raises:
        UnsupportedTransactionMode: says what can be asked for instead.
    """
    if mode is TransactionMode.TRANSACTION_SCOPE and enlisting_sagas(store, transport) is None:
        raise UnsupportedTransactionMode(
            f"transaction mode 'transaction_scope' promises exactly once, for which {type(store).__name__} and "
            f"{type(transport).__name__} must be on the same database; use the same one, or another mode"
        )


class Sagas:
    """The sagas of one endpoint.

    Args:
        store: where instances are kept.
        around: see :class:`SagaSurroundings`.
    """

    def __init__(self, store: SagaStore, around: SagaSurroundings) -> None:
        self.store, self._around = store, around
        self._enlisting = enlisting_sagas(store, around.transport)
        self._by_name: dict[str, SagaDefinition] = {}

    def add(self, saga: type[Saga[Any]]) -> SagaDefinition:
        """Register a saga.

        Raises:
            ConfigurationError: it is no saga, is there already, or has timeouts that nothing can delay.
        """
        definition = getattr(saga, "definition", None)
        if not isinstance(definition, SagaDefinition) or definition.saga is not saga:
            raise ConfigurationError(f"{saga!r} is no saga; write class …(Saga[StateOfMine], correlated_by='…')")
        if definition.name in self._by_name:
            raise ConfigurationError(f"endpoint {self._around.endpoint!r} has a saga {definition.name!r} already")
        if definition.timeouts and self._around.delays is None:
            raise ConfigurationError(
                f"saga {definition.name} has timeouts, and endpoint {self._around.endpoint!r} no delayed message "
                f"store; pass delayed_delivery=DelayedDelivery(store) when you create it"
            )
        self._by_name[definition.name] = definition
        return definition

    def handles(self, message_type: type[Any]) -> bool:
        """Return whether a saga takes messages of a type."""
        return any(message_type in each.messages for each in self._by_name.values())

    # --- messages -------------------------------------------------------------------------------------------------

    async def handle(self, message: object, context: Handling) -> None:
        """Let every saga that takes the message handle it.

        Raises:
            SagaConflict: an instance was changed meanwhile; nothing was kept, and the message is to be handled again.
        """
        found: list[_Instance] = []
        for definition in self._by_name.values():
            method = definition.messages.get(type(message))
            if method is None:
                continue
            instance = await self._instance_for(definition, method, message, context)
            if instance is None:
                await definition.saga.not_found(message, context)
            else:
                await instance.run(method, message)
                found.append(instance)
        await self._keep(found, context)

    async def _instance_for(
        self, definition: SagaDefinition, method: SagaMethod, message: object, context: Handling
    ) -> _Instance | None:
        value, text = definition.correlation_of(message, method)
        correlation = Correlation(definition.correlated_by, text)
        record = await self.store.find(definition.name, correlation)
        leftover: SagaRecord | None = None
        if record is not None:
            details = decoded(record.details, _name(record))
            if not details.is_over_for(context.message_id):
                return self._loaded(definition, record, details, context)
            leftover = record
        if method.role is not SagaRole.STARTS:
            return None
        record = SagaRecord(str(uuid.uuid4()), definition.name, correlation, "")
        state = definition.new_state(value)
        return _Instance(definition, record, state, SagaDetails(), context, self._around, leftover)

    # --- timeouts -------------------------------------------------------------------------------------------------

    async def handle_timeout(self, timeout: object, context: Handling) -> None:
        """Let the saga instance that the headers name handle its timeout.

        Raises:
            UnknownMessageType: no such saga here, or it handles no timeouts of this type.
            InvalidMessage: the id in the headers is none.
            SagaConflict: see :meth:`handle`.
        """
        definition, method = self._timeout_method(timeout, context.headers)
        saga_id = _saga_id(context.headers)
        record = await self.store.load(definition.name, saga_id)
        details = None if record is None else decoded(record.details, _name(record))
        if record is None or details is None or details.is_over_for(context.message_id):
            log.info("timeout %s of %s %s, which is completed: ignored", context.message_id, definition.name, saga_id)
            return
        if not details.expects(context.message_id):
            log.info(
                "timeout %s of %s %s was cancelled, moved or handled before: ignored",
                context.message_id,
                definition.name,
                saga_id,
            )
            return
        instance = self._loaded(definition, record, details, context)
        details.came(context.message_id, remember=self._enlisting is None)
        await instance.run(method, timeout)
        await self._keep([instance], context)

    def _timeout_method(self, timeout: object, headers: Mapping[str, str]) -> tuple[SagaDefinition, SagaMethod]:
        name = headers.get(Headers.SAGA_TYPE, "").split(",")[0].strip()
        definition = self._by_name.get(name)
        if definition is None:
            known = ", ".join(sorted(self._by_name)) or "none"
            raise UnknownMessageType(f"a timeout for saga {name!r}, which is not here; sagas here: {known}")
        method = definition.timeouts.get(type(timeout))
        if method is None:
            raise UnknownMessageType(f"saga {name} handles no timeouts of type {type_name(type(timeout))}")
        return definition, method

    def _loaded(
        self, definition: SagaDefinition, record: SagaRecord, details: SagaDetails, context: Handling
    ) -> _Instance:
        try:
            state = msgspec.json.decode(record.state, type=definition.state_type)
        except msgspec.MsgspecError as error:
            kind = definition.state_type.__name__
            raise InvalidMessage(f"the state of {_name(record)} is no {kind} any more: {error}") from error
        return _Instance(definition, record, state, details, context, self._around)

    # --- keeping --------------------------------------------------------------------------------------------------

    async def _keep(self, instances: Sequence[_Instance], context: Handling) -> None:
        """Keep what became of instances: with the end of their message, or before its messages leave."""
        completed_by = None if self._enlisting is not None else context.message_id
        changes = [change for each in instances for change in each.changes(completed_by)]
        if changes and self._enlisting is not None:
            context.work.append(self._enlisting.applying(changes))
        elif changes:
            await self.store.apply(changes)
        revoked = [message_id for each in instances for message_id in each.revoked()]
        if revoked:
            context.afterwards.append(lambda: self._cancel(revoked))
        if completed_by is not None:
            over = [each.kept_record() for each in instances if each.is_completed and each.record.version]
            if over:
                context.afterwards.append(lambda: self._remove(over))

    async def _cancel(self, message_ids: Sequence[str]) -> None:
        """Take revoked timeouts out of the store where they wait: to save room; what comes anyway is ignored."""
        store = self._around.delays
        if not isinstance(store, AdministrableStore):
            return
        try:
            for message_id in message_ids:
                await store.cancel(message_id, self._around.clock.now())
        except PostdateError as error:
            log.info("revoked timeouts stay in the store until they are due and ignored: %s", error)

    async def _remove(self, records: Sequence[SagaRecord]) -> None:
        """Remove what was marked as completed; what stays is taken for completed all the same."""
        try:
            await self.store.apply([SagaChange(SagaFate.COMPLETED, record) for record in records])
        except SagaConflict:  # removed already, or another instance took its place
            return
        except PostdateError as error:
            log.info("completed sagas stay in their store until others take their places: %s", error)


@dataclass(slots=True)
class _Instance:
    """A saga instance while it handles one message; what its :class:`Saga` requests is gathered here.

    Args:
        definition: of its saga.
        record: as it was loaded; version 0: new.
        state: of the application.
        details: of Postdate's own.
        context: of the message.
        around: the endpoint.
        leftover: a completed instance of the same correlation that was not removed yet.
    """

    definition: SagaDefinition
    record: SagaRecord
    state: Any
    details: SagaDetails
    context: Handling
    around: SagaSurroundings
    leftover: SagaRecord | None = None
    is_completed: bool = False
    _has_ended: bool = False
    _revoked: list[str] = field(default_factory=list[str])

    async def run(self, method: SagaMethod, message: object) -> None:
        """Call a method of the saga."""
        saga = self.definition.saga(self.record.saga_id, self.state, self)
        await getattr(saga, method.method)(message, self.context)
        self.state = saga.state
        self._has_ended = True

    # --- for the saga: see there ------------------------------------------------------------------------------------

    async def request(self, timeout: object, within: timedelta | None, at: datetime | None) -> str:
        """See :meth:`Saga.request_timeout`."""
        if inspect.isclass(timeout):
            timeout = timeout()
        if type(timeout) not in self.definition.timeouts:
            name = type(timeout).__name__
            raise ConfigurationError(
                f"saga {self.definition.name} requests a timeout {name} that it would not handle; mark a method with "
                f"@handles_timeout({name})"
            )
        pending = self._sent(timeout, within, at)
        self.details.timeouts[pending.message_id] = pending
        return pending.message_id

    def _sent(self, timeout: object, within: timedelta | None, at: datetime | None) -> PendingTimeout:
        if within is None and at is None:
            raise InvalidMessage("a timeout needs its time: within=timedelta(…), or at=datetime(…, tzinfo=…)")
        if self._has_ended:
            raise MessageError(
                f"the handler of message {self.context.message_id!r} has ended: it can request nothing any more"
            )
        headers = {
            Headers.IS_SAGA_TIMEOUT_MESSAGE: "True",
            Headers.SAGA_ID: self.record.saga_id,
            Headers.SAGA_TYPE: self.definition.name,
        }
        options = SendOptions(destination=self.around.endpoint, delay=within, deliver_at=at, headers=headers)
        outgoing = self.around.outgoing(timeout, options, self.context.headers)
        due = outgoing.due if isinstance(outgoing, DelayedMessage) else self.around.clock.now()
        self.context.outgoing.append(outgoing)
        kind = outgoing.headers[Headers.ENCLOSED_MESSAGE_TYPES]
        return PendingTimeout(outgoing.message_id, due, kind, msgspec.Raw(outgoing.body))

    def cancel(self, timeout_id: str) -> bool:
        """See :meth:`Saga.cancel_timeout`."""
        pending = self.details.timeouts.pop(timeout_id, None)
        if pending is not None:
            self._revoke(pending.message_id)
        return pending is not None

    async def move(self, timeout_id: str, within: timedelta | None, at: datetime | None) -> bool:
        """See :meth:`Saga.move_timeout`: another message takes the place of the first, which counts no more."""
        pending = self.details.timeouts.get(timeout_id)
        if pending is None:
            return False
        timeout = self.around.types.decode({Headers.ENCLOSED_MESSAGE_TYPES: pending.type}, bytes(pending.body))
        self.details.timeouts[timeout_id] = self._sent(timeout, within, at)
        self._revoke(pending.message_id)
        return True

    def pending(self) -> Mapping[str, datetime]:
        """See :attr:`Saga.pending_timeouts`."""
        return {timeout_id: each.due for timeout_id, each in self.details.timeouts.items()}

    def complete(self) -> None:
        """See :meth:`Saga.complete`."""
        self.is_completed = True

    def _revoke(self, message_id: str) -> None:
        """Have a timeout not sent, if it has not left, or taken out of the store afterwards."""
        left = [each for each in self.context.outgoing if each.message_id != message_id]
        if len(left) < len(self.context.outgoing):
            self.context.outgoing[:] = left
        else:
            self._revoked.append(message_id)

    # --- for the endpoint ---------------------------------------------------------------------------------------------

    def changes(self, completed_by: str | None) -> Sequence[SagaChange]:
        """Return what is to be kept.

        Args:
            completed_by: the message; ``None``: an instance that is completed is removed at once.
        """
        self._check_correlation()
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

    def _check_correlation(self) -> None:
        name = self.definition.correlated_by
        value = as_text(getattr(self.state, name), name, type(self.state).__name__)
        if value != self.record.correlation.value:
            raise InvalidMessage(
                f"{_name(self.record)} changed its {name} to {value!r}: messages find it by that, so it must stay"
            )

    def _encoded_state(self) -> str:
        try:
            return msgspec.json.encode(self.state).decode()
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            raise InvalidMessage(f"the state of {_name(self.record)} cannot be written as JSON: {error}") from error

    def revoked(self) -> Sequence[str]:
        """Return the message ids of timeouts that are to come no more and have left already."""
        return self._revoked

    def kept_record(self) -> SagaRecord:
        """Return the record in the version that it was kept in."""
        return replace(self.record, version=self.record.version + 1)


def is_saga_timeout(headers: Mapping[str, str]) -> bool:
    """Return whether a message is for the timeout handlers of sagas only."""
    return headers.get(Headers.IS_SAGA_TIMEOUT_MESSAGE, "").lower() == "true"


def _saga_id(headers: Mapping[str, str]) -> str:
    text = headers.get(Headers.SAGA_ID, "")
    try:
        return str(uuid.UUID(text))
    except ValueError as error:
        raise InvalidMessage(f"header {Headers.SAGA_ID} of a saga timeout is no UUID: {text!r}") from error


def _name(record: SagaRecord) -> str:
    return f"{record.saga_type} {record.correlation.property}={record.correlation.value!r}"
