"""Which adapter can do what, as a table that is reviewed as a diff."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from postdate.ports import (
    AdministrableStore,
    ClaimingStore,
    DelayedMessageStore,
    EnlistingStore,
    InspectableStore,
    MovingStore,
    ScannableStore,
    SetsUp,
    TakingReceiver,
    TransactionMode,
    Transport,
)

_STORE_PORTS = {
    "works in batches, with claims": ClaimingStore,
    "is set up by `postdate setup`": SetsUp,
    "shares a transaction with queues in its database": EnlistingStore,
    "moves due messages inside the database": MovingStore,
    "shows what waits and what happened": InspectableStore,
    "cancels and reschedules": AdministrableStore,
    "is scanned in parallel": ScannableStore,
}


def capability_matrix(stores: Mapping[str, DelayedMessageStore], transports: Mapping[str, Transport]) -> str:
    """Return two Markdown tables: capabilities against stores, and against transports.

    Args:
        stores: by the name under which users know them, in the order of the columns.
        transports: likewise.
    """
    store_rows = _rows([_store_cells(store) for store in stores.values()])
    transport_rows = _rows([_transport_cells(transport) for transport in transports.values()])
    return f"{_table('store', list(stores), store_rows)}\n{_table('transport', list(transports), transport_rows)}"


def _rows(columns: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    return {name: [column[name] for column in columns] for name in columns[0]}


def _store_cells(store: DelayedMessageStore) -> dict[str, str]:
    can = store.capabilities
    return {
        "durable": _yes(can.durable),
        "shared by several processes": _yes(can.shared),
        "precision of due times": f"{can.time_precision.total_seconds() * 1_000_000:g} µs",
        "largest message": f"{can.largest_message_bytes:,} bytes",
        **{f"mode `{mode.value}`": _yes(mode in can.transaction_modes) for mode in TransactionMode},
        **{name: _yes(isinstance(store, port)) for name, port in _STORE_PORTS.items()},
    }


def _transport_cells(transport: Transport) -> dict[str, str]:
    can = transport.capabilities
    return {
        "durable": _yes(can.durable),
        "largest message": f"{can.largest_message_bytes:,} bytes",
        **{f"mode `{mode.value}`": _yes(mode in can.transaction_modes) for mode in TransactionMode},
        "shares a transaction with a store in its database": _yes(can.database is not None),
        "discards expired messages itself": _yes(can.expires_messages),
        "takes one message out of a queue by its id": _yes(isinstance(transport.receiver("any"), TakingReceiver)),
    }


def _yes(can: bool) -> str:
    return "yes" if can else "no"


def _table(what: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    lines = [f"| {what} | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    return "\n".join(lines) + "\n"
