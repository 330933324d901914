"""Saga instances and the timeouts that they wait for. These functions read and never change them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from postdate.endpoint.saga_instance import PendingTimeout, SagaDetails, decode_details, name_of
from postdate.errors import InvalidMessage, StoreNotSetUp
from postdate.ports import SagaRecord, SagaStore
from postdate.wiring import OpenDeployment, address_of_section, file_of, open_saga_store

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KnownSaga:
    """A saga instance and the timeouts that it waits for, the next due first. ``problem``: why they cannot be read."""

    record: SagaRecord
    timeouts: Sequence[PendingTimeout]
    completed: bool
    problem: str


async def list_sagas(deployment: OpenDeployment, after: tuple[str, str], limit: int) -> Sequence[KnownSaga] | None:
    """Return the instances after a type and an id, in this order; ``None``: no sagas are stored here.

    Raises:
        ConfigurationError: the settings name no database that can store sagas.
    """
    records = await _query_sagas(deployment, lambda store: store.read_page(after, limit))
    return None if records is None else [_known_saga_of(each) for each in records]


async def show_saga(deployment: OpenDeployment, saga_type: str, saga_id: str) -> KnownSaga | None:
    """Return an instance; ``None``: there is none, for example because it has completed."""
    record = await _query_sagas(deployment, lambda store: store.load(saga_type, saga_id))
    return None if record is None else _known_saga_of(record)


async def _query_sagas(deployment: OpenDeployment, query: Callable[[SagaStore], Awaitable[T]]) -> T | None:
    file = file_of(address_of_section(deployment.settings.sagas, deployment.settings))
    if file is not None and not file.expanduser().exists():  # To open a missing file would create it.
        return None
    store = open_saga_store(deployment.settings, deployment.databases)
    try:
        return await query(store)
    except StoreNotSetUp:
        return None
    finally:
        await store.close()


def _known_saga_of(record: SagaRecord) -> KnownSaga:
    details, problem = SagaDetails(), ""
    try:
        details = decode_details(record.details, name_of(record))
    except InvalidMessage as error:
        problem = str(error)
    timeouts = sorted(details.timeouts.values(), key=lambda each: each.due)
    return KnownSaga(record, timeouts, details.completed_by is not None, problem)
