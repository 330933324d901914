"""Looks at stores and queues, for an operator; ``None`` where an adapter does not offer one."""

from __future__ import annotations

from postdate.ports import (
    ClaimingStore,
    ObservableStore,
    ObservableTransport,
    QueueObserver,
    StoreObserver,
    Transport,
)


def store_observer(store: ClaimingStore) -> StoreObserver | None:
    """Return a look at a store, or ``None`` where there is none; nothing is read yet."""
    if isinstance(store, ObservableStore):
        return store.observer()
    from postdate.embedded.observation import FileObserver
    from postdate.stores.sqlite import SqliteStore

    return FileObserver(store.file) if isinstance(store, SqliteStore) else None


def queue_observer(transport: Transport) -> QueueObserver | None:
    """Return a look at queues, or ``None`` where there is none; nothing is read yet."""
    if isinstance(transport, ObservableTransport):
        return transport.observer()
    from postdate.embedded.observation import FileObserver
    from postdate.transports.local import LocalTransport

    return FileObserver(transport.file) if isinstance(transport, LocalTransport) else None
