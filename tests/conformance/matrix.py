"""Which adapter can do what, as a table that is reviewed as a diff."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

from postdate import ports
from postdate.core.simple_store import enlisting_store
from postdate.endpoint.delayed_delivery import check_mode
from postdate.endpoint.settings import DelayedDelivery
from postdate.errors import UnsupportedTransactionMode
from postdate.ports.limits import LimitingStore

_STORE_PORTS = {
    "works in batches, with claims": ports.ClaimingStore,
    "marks rows that it cannot read": ports.UnreadableRows,
    "moves due messages inside the database, in one transaction with its queues": ports.MovingStore,
    "shows what waits and what happened, cancels and reschedules": ports.AdministrableStore,
    "replaces what waits under a key; its messages follow the clocks of a zone": ports.ReplacingStore,
    "keeps limits of destinations": LimitingStore,
    "is scanned in parallel": ports.ScannableStore,
    "has old records removed (retention)": ports.PrunableStore,
    "has its records followed as a stream, and prunes nothing that the stream has not passed": ports.StreamableStore,
}


def capability_matrix(
    stores: Mapping[str, ports.DelayedMessageStore], transports: Mapping[str, ports.Transport]
) -> str:
    """Return two Markdown tables: capabilities against stores, and against transports.

    Args:
        stores: by the name under which users know them, in the order of the columns.
        transports: likewise.
    """
    store_rows = _rows([_store_cells(store) for store in stores.values()])
    transport_rows = _rows([_transport_cells(transport) for transport in transports.values()])
    return f"{_table('store', list(stores), store_rows)}\n{_table('transport', list(transports), transport_rows)}"


def promise_matrix(stores: Mapping[str, ports.DelayedMessageStore], transports: Mapping[str, ports.Transport]) -> str:
    """Return a Markdown table: what each store with each transport promises in each transaction mode.

    It is made from the capabilities by the check that an endpoint does at its start: what is refused here is refused
    there.

    Args:
        stores: by the name under which users know them.
        transports: likewise.
    """
    rows = {
        f"{store_name} with {transport_name}": [promise(store, transport, mode) for mode in ports.TransactionMode]
        for store_name, store in stores.items()
        for transport_name, transport in transports.items()
    }
    return _table("store and transport", [f"`{mode.value}`" for mode in ports.TransactionMode], rows)


def promise(store: ports.DelayedMessageStore, transport: ports.Transport, mode: ports.TransactionMode) -> str:
    """Return how often a delayed message is handled, or why the mode is refused.

    Source: design.md section 4; specification 6, rows 49 to 51.
    """
    try:
        check_mode(DelayedDelivery(store), transport, mode)
    except UnsupportedTransactionMode:
        return f"refused: {_why_refused(store, transport, mode)}"
    together = enlisting_store(DelayedDelivery(store).claiming_store, transport) is not None
    promised = {
        ports.TransactionMode.TRANSACTION_SCOPE: "exactly once",
        # Off the queue before it is handled. Where sending and removing are two steps it may be in the queue twice.
        ports.TransactionMode.NONE: "at most once" if together else "at most once for each delivery",
    }
    lasts = ports.capabilities_of(store).durable and transport.capabilities.durable
    return promised.get(mode, "at least once") + ("" if lasts else ", while the process lives")


def _why_refused(store: ports.DelayedMessageStore, transport: ports.Transport, mode: ports.TransactionMode) -> str:
    if mode not in transport.capabilities.transaction_modes:
        return "not a mode of the transport"
    if mode not in ports.capabilities_of(store).transaction_modes:
        return "not a mode of the store"
    return "two databases"


def _rows(columns: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    return {name: [column[name] for column in columns] for name in columns[0]}


def _store_cells(store: ports.DelayedMessageStore) -> dict[str, str]:
    can = ports.capabilities_of(store)
    return {
        "durable": _yes(can.durable),
        "shared by several processes": _yes(can.shared),
        "precision of due times": f"{can.time_precision.total_seconds() * 1_000_000:g} µs",
        "largest message": f"{can.largest_message_bytes:,} bytes",
        "a frozen process holds for at most": _duration(can.holds_at_most),
        "has a clock that all services go by": _yes(can.has_clock),
        **{f"mode `{mode.value}`": _yes(mode in can.transaction_modes) for mode in ports.TransactionMode},
        **{name: _yes(isinstance(store, port)) for name, port in _STORE_PORTS.items()},
        "gives and takes Arrow batches": _yes(isinstance(store, ports.ScannableStore) and store.has_columns),
    }


def _transport_cells(transport: ports.Transport) -> dict[str, str]:
    can = transport.capabilities
    return {
        "durable": _yes(can.durable),
        "largest message": f"{can.largest_message_bytes:,} bytes",
        "largest headers": _bytes(can.largest_headers_bytes),
        **{f"mode `{mode.value}`": _yes(mode in can.transaction_modes) for mode in ports.TransactionMode},
        "shares a transaction with a store in its database": _yes(can.database is not None),
        "discards expired messages itself": _yes(can.expires_messages),
        "time to be received per message in a transaction": _yes(can.time_to_be_received_in_transactions),
        "keeps expired messages as dead letters": _yes(can.dead_letters),
        "marks rows that it cannot read": _yes(isinstance(transport, ports.UnreadableRows)),
        "takes all destinations in one call": _yes(can.pipelines),
        "takes one message out of a queue by its id": _yes(can.receives_by_id),
    }


def _duration(duration: timedelta | None) -> str:
    return "no limit" if duration is None else f"{duration.total_seconds():g} s"


def _bytes(limit: int | None) -> str:
    return "as the message" if limit is None else f"{limit:,} bytes"


def _yes(can: bool) -> str:
    return "yes" if can else "no"


def _table(what: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    lines = [f"| {what} | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    return "\n".join(lines) + "\n"
