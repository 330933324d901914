"""From an address to the records of a store as they are written."""

from __future__ import annotations

import importlib
import os
from typing import Any, Final, cast

from postdate.config import resolved
from postdate.errors import ConfigurationError, NotSupported
from postdate.ports.record_streams import RecordStreamStore
from postdate.wiring.adapters import check_store, file_of

_ADAPTERS: Final = {
    "sqlite": ("postdate.embedded.record_stream", "SqliteRecordStream", frozenset({"synchronous", "recording"})),
    "postgresql": ("postdate.postgres.record_stream", "PostgresRecordStream", frozenset({"schema", "table"})),
}


def open_record_stream(address: str, **settings: Any) -> RecordStreamStore:
    """Return the records of the store at ``address``; it connects at first use.

    Args:
        address: as :func:`postdate.wiring.open_store` takes it.
        settings: of the store: ``schema``, ``table``, ``synchronous``, ``recording``; those that are ``None`` or that
            this kind of store does not have are left out.

    Raises:
        ConfigurationError: no store has such an address, or its driver is not installed.
        NotSupported: the records of such a store cannot be followed.
    """
    place = resolved(address, os.environ)
    kind = check_store(place)
    if kind.scheme not in _ADAPTERS:
        raise NotSupported(
            f"the records of {kind.product} cannot be followed: their numbers are not in the order of commits, and the "
            f"server does not tell which transactions may still write lower ones; read what='records' again and again "
            f"instead, or keep the store in PostgreSQL or SQLite"
        )
    module, name, known = _ADAPTERS[kind.scheme]
    taken = {each: value for each, value in settings.items() if each in known and value is not None}
    try:
        adapter = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{kind.product} needs the driver {error.name!r}, which is not installed: "
            f"pip install 'postdate[{kind.extra}]'"
        ) from error
    return cast("RecordStreamStore", adapter(file_of(place) or f"{kind.scheme}:{place.partition(':')[2]}", **taken))
