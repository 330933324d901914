"""Handling of messages by saga instances: finds the instances, calls them, and stores their changes.

Source: ADR 0016.
"""

from __future__ import annotations

import logging
import uuid
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Final, NamedTuple

import msgspec

from postdate.core.health.deadlines import translate_store_errors
from postdate.core.health.message_memory import MessageMemory
from postdate.core.recoverability import MOST_OWN_FAILURES, is_outage
from postdate.core.simple_store import sharing_store
from postdate.endpoint.handler_context import HandlerContext
from postdate.endpoint.message_types import type_name
from postdate.endpoint.outgoing import OutgoingMessages
from postdate.endpoint.saga_instance import SagaDetails, SagaInstance, decode_details, name_of, originator_of
from postdate.endpoint.sagas import Saga, SagaDefinition, SagaMethod, SagaRole
from postdate.errors import (
    ConfigurationError,
    InvalidMessage,
    PostdateError,
    SagaConflict,
    StoreUnreachable,
    UnknownMessageType,
)
from postdate.messages import Headers
from postdate.ports import AdministrableStore, Correlation, SagaChange, SagaChangeKind, SagaRecord, SagaStore
from postdate.runtime.bounded import Bounded

log = logging.getLogger("postdate.sagas")


class OwnStoreUnreachable(StoreUnreachable):
    """A store of the endpoint is out of reach. No message has caused it, so none is moved to the error queue for it."""


@contextmanager
def translate_own_store_errors(memory: MessageMemory, message_id: str) -> Generator[None]:
    """Turn an outage of a store of the endpoint into :class:`OwnStoreUnreachable`, unless one message causes it."""
    try:
        yield
    except PostdateError as error:
        if is_outage(error) and memory.report_own_failure(message_id, error) <= MOST_OWN_FAILURES:
            raise OwnStoreUnreachable(str(error)) from error
        raise
    else:
        memory.report_success(message_id)


_NONE_BEFORE: Final = '"before":{}'
"""Details with this text have no earlier instances. Nearly all have none, and need not be decoded to know it."""

_MOST_PRELOADED: Final = 2_000
"""The largest number of instances that are remembered by :meth:`Sagas.preload`."""


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
        self._memories = defaultdict[object, MessageMemory](MessageMemory)
        """The memories, by the kind of call to the store."""
        self._methods_by_type = defaultdict[type[Any], list[tuple[SagaDefinition, SagaMethod]]](list)
        self._preloaded = Bounded[tuple[str, str], _PreloadedInstance](_MOST_PRELOADED)
        """Instances that :meth:`preload` has found, by message id and saga name."""

    def add(self, saga: type[Saga[Any]]) -> SagaDefinition:
        definition = getattr(saga, "definition", None)
        if not isinstance(definition, SagaDefinition) or definition.saga is not saga:
            raise ConfigurationError(f"{saga!r} is not a saga; write class …(Saga[StateOfMine], correlated_by='…')")
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
        with translate_own_store_errors(self._memories[SagaStore.find], context.message_id):
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
        with translate_own_store_errors(self._memories[SagaStore.load], context.message_id):
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
            raise UnknownMessageType(
                f"a timeout for saga {name!r}, which this endpoint does not have; its sagas are: {all_sagas}"
            )
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
            raise InvalidMessage(
                f"the state of {name_of(record)} cannot be read as {kind} any more: {error}"
            ) from error
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
            with translate_own_store_errors(self._memories[kinds], context.message_id):
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
            # Another instance has set it aside meanwhile.
            await self.store.apply([SagaChange(SagaChangeKind.COMPLETED, set_aside)])


def _saga_type(headers: Mapping[str, str]) -> str:
    """Return the name of the saga that a message is for, without the assembly that .NET adds."""
    return headers.get(Headers.SAGA_TYPE, "").split(",")[0].strip()


def _saga_id(headers: Mapping[str, str]) -> str:
    text = headers.get(Headers.SAGA_ID, "")
    try:
        return str(uuid.UUID(text))
    except ValueError as error:
        raise InvalidMessage(f"header {Headers.SAGA_ID} names no saga instance: {text!r} is not a UUID") from error
