"""How messages find saga instances, and how changes of these are kept. Source: specification 5, 4.10; ADR 0016."""

from __future__ import annotations

import logging
import uuid
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec

from postdate.core.dispatcher import sharing
from postdate.core.guard import calling_store
from postdate.core.outages import Suspects
from postdate.core.recoverability import BORNE, is_outage
from postdate.endpoint.message_types import type_name
from postdate.endpoint.outgoing import HandlerContext, OutgoingMessages
from postdate.endpoint.saga_instance import SagaDetails, SagaInstance, decoded, name_of, originator_of
from postdate.endpoint.sagas import Saga, SagaDefinition, SagaMethod, SagaRole
from postdate.endpoint.settings import check_scope
from postdate.errors import (
    ConfigurationError,
    InvalidMessage,
    PostdateError,
    SagaConflict,
    StoreUnreachable,
    UnknownMessageType,
    UnsupportedTransactionMode,
)
from postdate.messages import Headers
from postdate.ports import (
    AdministrableStore,
    Correlation,
    OutboxStore,
    SagaChange,
    SagaFate,
    SagaRecord,
    SagaStore,
    TransactionMode,
    Transport,
)

log = logging.getLogger("postdate.sagas")


class OwnStoreUnreachable(StoreUnreachable):
    """A store of the endpoint is out of reach: no message is to blame, so none is given up for it."""


@contextmanager
def calling_own_store(suspects: Suspects, message_id: str) -> Generator[None]:
    """Turn an outage of a store of the endpoint into :class:`OwnStoreUnreachable`, unless it is of a single row."""
    try:
        yield
    except PostdateError as error:
        if is_outage(error) and suspects.met(message_id, error) <= BORNE:
            raise OwnStoreUnreachable(str(error)) from error
        raise
    else:
        suspects.worked(message_id)


def check_saga_mode(store: SagaStore, transport: Transport, mode: TransactionMode) -> None:
    """Refuse a transaction mode whose promise sagas cannot keep there."""
    if mode is TransactionMode.NONE:
        raise UnsupportedTransactionMode(
            "sagas cannot be in transaction mode 'none', in which messages leave at once: when two messages change one "
            "instance, one of them is decided again, and what it had sent cannot be taken back; use 'receive_only'"
        )
    shared = sharing(store, store.capabilities.database, transport.capabilities.database)
    check_scope(mode, store, transport, is_one=shared is not None)


def check_saga_outbox(store: SagaStore, outbox: OutboxStore) -> None:
    """Refuse sagas whose state would be kept beside the commit of the outbox, and so changed again by a duplicate."""
    if sharing(store, store.capabilities.database, outbox.database) is None:
        raise ConfigurationError(
            f"an outbox promises that each message is handled once, for which sagas must be kept in its database: "
            f"{type(store).__name__} cannot write in the transactions of {type(outbox).__name__}; use a store of the "
            f"same kind, on the same file, or with the same address and schema"
        )


class Sagas:
    """The sagas of one endpoint; ``database`` is that of the transaction in which messages of handlers leave."""

    def __init__(self, store: SagaStore, database: object | None, messages: OutgoingMessages) -> None:
        self.store, self._messages = store, messages
        self._enlisting = sharing(store, store.capabilities.database, database)
        self._by_name: dict[str, SagaDefinition] = {}
        self._suspects = defaultdict[object, Suspects](Suspects)
        """By the kind of call to the store."""

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
        return definition

    def handles(self, message_type: type[Any]) -> bool:
        return any(message_type in each.messages for each in self._by_name.values())

    # --- messages -------------------------------------------------------------------------------------------------

    async def handle(self, message: object, context: HandlerContext) -> None:
        """Let every saga of the message's type handle it.

        Raises:
            SagaConflict: an instance was changed meanwhile; nothing was kept, and the message is to be handled again.
            OwnStoreUnreachable: the message is not to blame.
        """
        found: list[SagaInstance] = []
        for definition in self._by_name.values():
            method = definition.messages.get(type(message))
            if method is None or self._replies_to_another(definition, method, context.headers):
                continue
            if method.role is SagaRole.TAKES_REPLIES:
                instance = await self._asking(definition, context)
            else:
                instance = await self._instance_for(definition, method, message, context)
            if instance is None:
                await definition.saga.not_found(message, context)
            else:
                await instance.run(method, message)
                found.append(instance)
        await self._keep(found, context)

    async def _instance_for(
        self, definition: SagaDefinition, method: SagaMethod, message: object, context: HandlerContext
    ) -> SagaInstance | None:
        value, text = definition.correlation_of(message, method)
        correlation = Correlation(definition.correlated_by, text)
        with calling_own_store(self._suspects[SagaStore.find], context.message_id):
            record = await self.store.find(definition.name, correlation)
        leftover: SagaRecord | None = None
        if record is not None:
            details = decoded(record.details, name_of(record))
            if not details.is_over_for(context.message_id):
                return self._loaded(definition, record, details, context)
            leftover = record
        if method.role is not SagaRole.STARTS:
            return None
        record = SagaRecord(str(uuid.uuid4()), definition.name, correlation, "")
        state = definition.new_state(value)
        details = SagaDetails(originator=originator_of(context.headers))
        return SagaInstance(definition, record, state, details, context, self._messages, leftover)

    # --- replies --------------------------------------------------------------------------------------------------

    def _replies_to_another(self, definition: SagaDefinition, method: SagaMethod, headers: Mapping[str, str]) -> bool:
        """Return whether a reply is for another saga here: then no instance of this one is looked for."""
        another = self._by_name.get(_saga_type(headers))
        if method.role is not SagaRole.TAKES_REPLIES or another is None or another is definition:
            return False
        theirs = another.messages.get(method.message_type)
        return theirs is not None and theirs.role is SagaRole.TAKES_REPLIES

    async def _asking(self, definition: SagaDefinition, context: HandlerContext) -> SagaInstance | None:
        """Return the instance to which a message replies, if it is one of this saga and has not ended."""
        if _saga_type(context.headers) != definition.name:
            return None
        record, details = await self._named(definition, context)
        return None if record is None else self._loaded(definition, record, details, context)

    async def _named(
        self, definition: SagaDefinition, context: HandlerContext
    ) -> tuple[SagaRecord | None, SagaDetails]:
        """Return record and details of the instance that the headers name; the record is ``None`` if it has ended."""
        with calling_own_store(self._suspects[SagaStore.load], context.message_id):
            record = await self.store.load(definition.name, _saga_id(context.headers))
        if record is None:
            return None, SagaDetails()
        details = decoded(record.details, name_of(record))
        return (None if details.is_over_for(context.message_id) else record), details

    # --- timeouts -------------------------------------------------------------------------------------------------

    async def handle_timeout(self, timeout: object, context: HandlerContext) -> None:
        """Let the saga instance that the headers name handle its timeout; errors are those of :meth:`handle`."""
        definition, method = self._timeout_method(timeout, context.headers)
        record, details = await self._named(definition, context)
        saga_id = context.headers[Headers.SAGA_ID]
        if record is None:
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
        name = _saga_type(headers)
        definition = self._by_name.get(name)
        if definition is None:
            known = ", ".join(sorted(self._by_name)) or "none"
            raise UnknownMessageType(f"a timeout for saga {name!r}, which is not here; sagas here: {known}")
        method = definition.timeouts.get(type(timeout))
        if method is None:
            raise UnknownMessageType(f"saga {name} handles no timeouts of type {type_name(type(timeout))}")
        return definition, method

    def _loaded(
        self, definition: SagaDefinition, record: SagaRecord, details: SagaDetails, context: HandlerContext
    ) -> SagaInstance:
        try:
            state = msgspec.json.decode(record.state, type=definition.state_type)
        except msgspec.MsgspecError as error:
            kind = definition.state_type.__name__
            raise InvalidMessage(f"the state of {name_of(record)} is no {kind} any more: {error}") from error
        return SagaInstance(definition, record, state, details, context, self._messages)

    # --- keeping --------------------------------------------------------------------------------------------------

    async def _keep(self, instances: Sequence[SagaInstance], context: HandlerContext) -> None:
        """Write changes of instances: with the end of their message, or before its messages leave."""
        completed_by = None if self._enlisting is not None else context.message_id
        changes = [change for each in instances for change in each.changes(completed_by)]
        if changes and self._enlisting is not None:
            context.work.append(self._enlisting.applying(changes))
        elif changes:
            kinds = frozenset(each.fate for each in changes)  # adding rows may fail where changing others does not
            with calling_own_store(self._suspects[kinds], context.message_id):
                await self.store.apply(changes)
        for each in instances:
            if each.is_completed and (order := self._messages.clear_timeouts(uuid.UUID(each.record.saga_id))):
                context.outgoing.append(order)
        revoked = [message_id for each in instances for message_id in each.revoked]
        if revoked:
            context.afterwards.append(lambda: self._cancel(revoked))
        if completed_by is not None:
            records = [each.record for each in instances if each.is_completed and each.record.version]
            over = [replace(each, version=each.version + 1) for each in records]  # the version that they are kept in
            if over:
                context.afterwards.append(lambda: self._remove(over))

    async def _cancel(self, message_ids: Sequence[str]) -> None:
        """Take revoked timeouts out of the store, to save room; one that comes anyway is ignored."""
        store = self._messages.store
        if not isinstance(store, AdministrableStore):
            return
        try:
            with calling_store(store):
                for message_id in message_ids:
                    await store.cancel(message_id, self._messages.clock.now())
        except PostdateError as error:
            log.info("revoked timeouts stay in the store until they are due and ignored: %s", error)

    async def _remove(self, records: Sequence[SagaRecord]) -> None:
        """Remove records that were marked as completed; one that stays counts as completed all the same."""
        try:
            with calling_store(self.store):
                await self.store.apply([SagaChange(SagaFate.COMPLETED, record) for record in records])
        except SagaConflict:  # removed already, or another instance took its place
            return
        except PostdateError as error:
            log.info("completed sagas stay in their store until others take their places: %s", error)


def is_saga_timeout(headers: Mapping[str, str]) -> bool:
    """Return whether a message is for the timeout handlers of sagas only."""
    return headers.get(Headers.IS_SAGA_TIMEOUT_MESSAGE, "").lower() == "true"


def _saga_type(headers: Mapping[str, str]) -> str:
    """Return the name of the saga that a message is for; without what .NET adds about the assembly."""
    return headers.get(Headers.SAGA_TYPE, "").split(",")[0].strip()


def _saga_id(headers: Mapping[str, str]) -> str:
    text = headers.get(Headers.SAGA_ID, "")
    try:
        return str(uuid.UUID(text))
    except ValueError as error:
        raise InvalidMessage(f"header {Headers.SAGA_ID} names no saga instance: {text!r} is no UUID") from error
