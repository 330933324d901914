"""From addresses and settings to adapters and endpoints."""

from postdate.wiring.adapters import (
    check_store,
    check_transport,
    file_of,
    libraries,
    looks_into,
    open_store,
    open_transport,
    taken_by_store,
)
from postdate.wiring.application import is_wanted, open_outbox, open_saga_store, place_of
from postdate.wiring.causes import advice_for, naming, placing_errors
from postdate.wiring.deployment import (
    OpenDeployment,
    build_endpoint,
    build_endpoints,
    check_addresses,
    delay_exchange,
    delayed_delivery,
    intake_queues,
    opened,
    own_queues,
    store_observer,
    store_settings,
    transport_settings,
)
from postdate.wiring.scripts import setup_sql
from postdate.wiring.timeouts import dispatcher_queues, managed_endpoints, open_timeouts, timeout_manager

__all__ = [
    "OpenDeployment",
    "advice_for",
    "build_endpoint",
    "build_endpoints",
    "check_addresses",
    "check_store",
    "check_transport",
    "delay_exchange",
    "delayed_delivery",
    "dispatcher_queues",
    "file_of",
    "intake_queues",
    "is_wanted",
    "libraries",
    "looks_into",
    "managed_endpoints",
    "naming",
    "open_outbox",
    "open_saga_store",
    "open_store",
    "open_timeouts",
    "open_transport",
    "opened",
    "own_queues",
    "place_of",
    "placing_errors",
    "setup_sql",
    "store_observer",
    "store_settings",
    "taken_by_store",
    "timeout_manager",
    "transport_settings",
]
