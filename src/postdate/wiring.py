"""From addresses to adapters. The only module that names them all.

Addresses: ``sqlite:///relative.db``, ``sqlite:////absolute.db`` and ``memory:`` for stores; ``local:///relative.db``,
``local:////absolute.db`` and ``memory:`` for transports.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from postdate.errors import ConfigurationError
from postdate.ports import Recording
from postdate.stores.memory import MemoryStore
from postdate.stores.sqlite import SqliteStore
from postdate.transports.local import LocalTransport
from postdate.transports.memory import MemoryTransport

BuiltInStore = SqliteStore | MemoryStore
BuiltInTransport = LocalTransport | MemoryTransport


def open_store(address: str, **settings: Any) -> BuiltInStore:
    """Return the store at ``address``; it connects at first use.

    Args:
        address: see above.
        settings: of the adapter: ``synchronous``, ``recording`` (a name or :class:`Recording`), ``create`` …

    Raises:
        ConfigurationError: no store has such an address.
    """
    scheme, _, rest = address.partition(":")
    if scheme == "sqlite":
        return SqliteStore(_path(address, rest), **_with_recording(settings))
    if scheme == "memory":
        return MemoryStore(**_with_recording(settings))
    raise ConfigurationError(f"no store has the address {address!r}; use sqlite:///file.db or memory:")


def open_transport(address: str, **settings: Any) -> BuiltInTransport:
    """Return the transport at ``address``; see :func:`open_store`."""
    scheme, _, rest = address.partition(":")
    if scheme in {"local", "sqlite"}:
        return LocalTransport(_path(address, rest), **_with_recording(settings))
    if scheme == "memory":
        return MemoryTransport()
    raise ConfigurationError(f"no transport has the address {address!r}; use local:///file.db or memory:")


def _with_recording(settings: Mapping[str, Any]) -> dict[str, Any]:
    recording = settings.get("recording", Recording.ALL)
    return {**settings, "recording": Recording(recording)}


def _path(address: str, rest: str) -> Path:
    if not rest.startswith("///") or len(rest) < 4:  # noqa: PLR2004 - three slashes and a name
        raise ConfigurationError(f"{address!r} names no file; write three slashes and the path: sqlite:///file.db")
    return Path(rest[3:])
