"""From settings to a saga store: where the delayed messages are."""

from __future__ import annotations

import importlib
from typing import Any

from postdate.config import Settings
from postdate.errors import ConfigurationError
from postdate.ports import SagaStore
from postdate.wiring.adapters import check_store, file_of


def open_saga_store(settings: Settings) -> SagaStore:
    """Return the saga store beside the store of the settings: in the same file, or the same schema of PostgreSQL.

    It connects at first use. Give it to ``Endpoint(sagas=…)``, which creates its tables with the queues.

    Raises:
        ConfigurationError: there is no saga store of that kind.
    """
    chosen, kind = settings.store, check_store(settings.store.address)
    if kind.scheme == "sqlite":
        adapter = _adapter("sqlite:SqliteSagaStore")
        return adapter(file_of(chosen.address), synchronous=chosen.synchronous, recording=chosen.recording)
    if kind.scheme == "postgresql":
        schema = {} if chosen.schema is None else {"schema": chosen.schema}
        return _adapter("postgres:PostgresSagaStore")(f"postgresql:{chosen.address.partition(':')[2]}", **schema)
    raise ConfigurationError(
        f"sagas are kept in SQLite or PostgreSQL; store.address is {chosen.address!r}: pass a saga store of your own"
    )


def _adapter(name: str) -> Any:
    module, _, kind = name.partition(":")
    return getattr(importlib.import_module(f"postdate.sagas.{module}"), kind)
