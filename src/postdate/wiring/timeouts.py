"""From settings to timeout managers and the storages of their timeouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from postdate.config import Settings
from postdate.endpoint.settings import ExternalTimeoutManager, TimeoutManager
from postdate.endpoint.timeout_manager import timeout_dispatcher_queue, timeout_manager_queue
from postdate.errors import ConfigurationError
from postdate.persistence.timeouts import table_name
from postdate.ports import TransportCapabilities
from postdate.ports.timeouts import TimeoutPersister
from postdate.wiring.adapters import AdapterRole, chosen_for, example_of, kind_of, open_adapter
from postdate.wiring.causes import naming
from postdate.wiring.databases import Databases


def check_timeout_managers(settings: Settings) -> None:
    """Refuse settings of timeout managers that do not fit together."""
    chosen, delays = settings.timeout_manager, settings.delayed_delivery
    if chosen.external_address is not None:
        origin = settings.origins.get("timeout_manager.external_address", "default")
        if chosen.address is not None:
            raise ConfigurationError(
                f"timeout_manager.external_address ({origin}) is for endpoints that have no timeout manager of their "
                f"own, and timeout_manager.address says where one keeps its timeouts: remove one of them"
            )
        if delays.enabled:
            raise ConfigurationError(
                f"timeout_manager.external_address ({origin}) and a delayed delivery of its own exclude each other: "
                f"remove it, or set delayed_delivery.enabled = false"
            )
    if chosen.address is None:
        for name in ("schema", "table_prefix", "endpoints"):
            if f"timeout_manager.{name}" in settings.origins:
                origin = settings.origins[f"timeout_manager.{name}"]
                raise ConfigurationError(
                    f"timeout_manager.{name} ({origin}) is set, and nothing says where timeouts are kept: add "
                    f"timeout_manager.address, such as {example_of('timeouts', 'postgresql')}"
                )
        return
    _storage(settings)
    _check_apart(settings)
    if chosen.table_prefix is not None and len(managed_endpoints(settings)) > 1:
        origin = settings.origins.get("timeout_manager.table_prefix", "default")
        raise ConfigurationError(
            f"timeout_manager.table_prefix ({origin}) names one table, and timeout_manager.endpoints are several, each "
            f"with a table of its own: run one service for each, or leave the prefix out"
        )


def _check_apart(settings: Settings) -> None:
    """Refuse endpoints that would share a table or a queue, since names ignore case and points."""
    seen: dict[str, str] = {}
    own = [settings.endpoint.name] if settings.delayed_delivery.enabled else []
    for name in dict.fromkeys([*own, *managed_endpoints(settings)]):
        other = seen.setdefault(table_name(name).lower(), name)
        if other != name:
            origin = settings.origins.get("timeout_manager.endpoints", "default")
            raise ConfigurationError(
                f"timeout_manager.endpoints ({origin}): {name!r} and {other!r} "
                f"have one table, or one queue on some servers: write the name in one way, endpoint.name included, or "
                f"run a service for each"
            )


def _storage(settings: Settings) -> tuple[AdapterRole, dict[str, Any]]:
    chosen = settings.timeout_manager
    assert chosen.address is not None
    with naming("timeout_manager.address", chosen.address, settings):
        kind = kind_of(chosen.address, "storage of timeouts", "timeouts")
    return kind, chosen_for("timeout_manager", kind, settings)


def managed_endpoints(settings: Settings) -> tuple[str, ...]:
    """Return the endpoints whose timeouts are managed here; none without a storage."""
    chosen = settings.timeout_manager
    return () if chosen.address is None else tuple(dict.fromkeys(chosen.endpoints)) or (settings.endpoint.name,)


def open_timeouts(settings: Settings, databases: Databases | None = None) -> dict[str, TimeoutPersister]:
    """Return the storage of each managed endpoint's timeouts; all connect at first use."""
    endpoints = managed_endpoints(settings)
    if not endpoints:
        return {}
    kind, given = _storage(settings)
    address = settings.timeout_manager.address
    assert address is not None
    with naming("timeout_manager.address", address, settings):
        return {name: cast("TimeoutPersister", open_adapter(kind, address, given, databases)) for name in endpoints}


def timeout_manager(
    settings: Settings, endpoint: str, timeouts: Mapping[str, TimeoutPersister]
) -> TimeoutManager | ExternalTimeoutManager | None:
    """Return the settings of an endpoint's timeout manager; ``timeouts`` as from :func:`open_timeouts`."""
    chosen = settings.timeout_manager
    if chosen.external_address is not None:
        return ExternalTimeoutManager(chosen.external_address)
    if endpoint not in timeouts:
        return None
    return TimeoutManager(timeouts[endpoint], **chosen.of(TimeoutManager))


def timeout_queues(settings: Settings, can: TransportCapabilities) -> list[str]:
    """Return the queues in which the managed endpoints' timeouts arrive."""
    return [timeout_manager_queue(name, can) for name in managed_endpoints(settings)]


def dispatcher_queues(settings: Settings, can: TransportCapabilities) -> list[str]:
    """Return the queues in which the managed endpoints' due timeouts are announced."""
    return [timeout_dispatcher_queue(name, can) for name in managed_endpoints(settings)]
