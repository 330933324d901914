"""The stores of an audit, and what is known about their records: what both engines have in common, without Spark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from postdate.errors import PipelineError
from postdate.pipeline.stores import StoreSpec, open_spec
from postdate.ports.scanning import PRUNED_ID, PrunableStore, PrunedCounts, pruned_details

CAME_BACK = "came back from the error queue"
"""Detail of the *rescheduled* record of a message that was stored again after it had failed."""

SENT_AGAIN = "retried as "
"""Start of the detail of a *retried* record whose message continues as another message."""

ASKED_FOR_BY_ID = 1_000
"""Up to this number of suspicious messages, the store is asked only for their records."""


@dataclass(frozen=True, slots=True)
class AuditedStore:
    """A store and the name of its endpoint. ``has_snapshot``: the store is read from a snapshot."""

    name: str
    store: StoreSpec
    has_snapshot: bool = False


def endpoints_of(store: StoreSpec) -> tuple[StoreSpec, ...]:
    """Return all stores of the database of ``store``, in the order of their names. This runs on the driver.

    Args:
        store: any store of the database, with the schema that the stores share. A file is one store.

    Raises:
        StoreError: the database is missing or unreachable.
    """
    with open_spec(store) as opened_store:
        scannable = opened_store.require_scannable()
        tables = scannable.tables_of_stores() if isinstance(scannable, PrunableStore) else ()
    stores = (replace(store, table=each, endpoint=each.removesuffix(".timeouts") or each) for each in tables)
    return tuple(stores) or (store,)


def name_stores(stores: Sequence[StoreSpec]) -> tuple[AuditedStore, ...]:
    """Name each store after its endpoint, with the address if two endpoints have the same name.

    Refuse a store that is given twice.
    """
    keys = [(store.address, store.schema, _table(store)) for store in stores]
    repeated = [store for number, store in enumerate(stores) if keys[number] in keys[:number]]
    if repeated:
        raise PipelineError(
            f"the store {_table(repeated[0])} in {repeated[0].redacted_address} is named twice; name each store once"
        )
    names = [_table(store).removesuffix(".timeouts") or _table(store) for store in stores]
    return tuple(
        AuditedStore(name if names.count(name) == 1 else f"{name} in {store.redacted_address}", store)
        for name, store in zip(names, stores, strict=True)
    )


def _table(store: StoreSpec) -> str:
    return store.table or f"{store.endpoint}.timeouts"


def read_pruned_counts(endpoints: Sequence[AuditedStore]) -> PrunedCounts:
    """Return what retention has removed from all stores until now, which is later than they were read.

    A removed record of one store may belong to a message of another store, so the results are added up.
    """
    markers = list[tuple[datetime | None, str]]()
    for endpoint in endpoints:
        with open_spec(endpoint.store) as store:
            markers += pruned_details(store.call(lambda itself: itself.history(PRUNED_ID)))
    return PrunedCounts.of(markers)
