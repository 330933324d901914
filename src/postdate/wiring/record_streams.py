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

    Ignores ``settings`` that are ``None`` or that this store does not have. Raises `NotSupported` for a store whose
    records cannot be followed.
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
