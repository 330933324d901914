"""From an address to the records of a store as they are written."""

from __future__ import annotations

import os
from typing import Any, cast

from postdate.config import resolved
from postdate.errors import NotSupported
from postdate.ports.record_streams import RecordStreamStore
from postdate.wiring.adapters import check_store, kinds, open_adapter


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
    store = check_store(place)
    kind = kinds("records").get(store.scheme)
    if kind is None:
        raise NotSupported(
            f"the records of {store.product} cannot be followed: their numbers are not in the order of commits, and "
            f"the server does not tell which transactions may still write lower ones; read what='records' again and "
            f"again instead, or keep the store in PostgreSQL or SQLite"
        )
    taken = {each: value for each, value in settings.items() if each in kind.takes and value is not None}
    return cast("RecordStreamStore", open_adapter(kind, place, taken))
