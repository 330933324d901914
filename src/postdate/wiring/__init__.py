"""From addresses and settings to adapters and endpoints. The only room that names the adapters."""

from postdate.wiring.adapters import (
    BuiltInStore,
    BuiltInTransport,
    check_store,
    check_transport,
    file_of,
    open_store,
    open_transport,
    taken_by_store,
)
from postdate.wiring.causes import advice_for
from postdate.wiring.observers import queue_observer, store_observer
from postdate.wiring.plant import (
    Plant,
    build_endpoint,
    check_addresses,
    delay_exchange,
    delayed_delivery,
    opened,
    own_queues,
    store_settings,
    transport_settings,
)
from postdate.wiring.sagas import open_saga_store
from postdate.wiring.scripts import setup_sql

__all__ = [
    "BuiltInStore",
    "BuiltInTransport",
    "Plant",
    "advice_for",
    "build_endpoint",
    "check_addresses",
    "check_store",
    "check_transport",
    "delay_exchange",
    "delayed_delivery",
    "file_of",
    "open_saga_store",
    "open_store",
    "open_transport",
    "opened",
    "own_queues",
    "queue_observer",
    "setup_sql",
    "store_observer",
    "store_settings",
    "taken_by_store",
    "transport_settings",
]
