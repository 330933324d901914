"""From settings to saga store and outbox; by default in the database of the delayed messages."""

from __future__ import annotations

from typing import Literal, cast

from postdate.config import Address, SectionValues, Settings
from postdate.errors import ConfigurationError
from postdate.ports import OutboxStore, SagaStore
from postdate.wiring.adapters import chosen_for, kind_of, kinds, open_adapter
from postdate.wiring.causes import naming
from postdate.wiring.databases import Databases


def open_saga_store(settings: Settings, databases: Databases | None = None) -> SagaStore:
    """Return the saga store of the settings: by default in the file of the store, or its schema.

    It connects at first use. Give it to ``Endpoint(sagas=…)``, which creates its tables with the queues.

    Args:
        settings: with the section ``sagas``.
        databases: that it may share with other adapters, as :attr:`OpenDeployment.databases`.

    Raises:
        ConfigurationError: there is no saga store of that kind.
    """
    return cast("SagaStore", _opened("sagas", settings.sagas, settings, databases))


def open_outbox(settings: Settings, databases: Databases | None = None) -> OutboxStore:
    """Return the outbox store of the settings: by default in the file of the store, or its schema of PostgreSQL.

    It connects at first use. Give it to ``Endpoint(outbox=Outbox(…))``, which creates its table with the queues.

    Args:
        settings: with the section ``outbox``.
        databases: see :func:`open_saga_store`.

    Raises:
        ConfigurationError: there is no outbox of that kind.
    """
    return cast("OutboxStore", _opened("outbox", settings.outbox, settings, databases))


def _opened(
    section: Literal["sagas", "outbox"], chosen: SectionValues, settings: Settings, databases: Databases | None
) -> object:
    address = place_of(chosen, settings)
    key = f"{section}.address" if chosen.address is not None else "store.address"
    try:
        kind = kind_of(address, section, section)
    except ConfigurationError as error:
        what = "the outbox is" if section == "outbox" else "sagas are"
        products = " or ".join(dict.fromkeys(each.product for each in kinds(section).values()))
        raise ConfigurationError(
            f"{what} kept in {products}; {key} is {address!r}: name such a database with {section}.address, "
            f"or pass one of your own to the endpoint"
        ) from error
    schema = chosen.schema or (settings.store.schema if chosen.address is None else None)
    given = chosen_for(section, kind, settings, schema=schema)
    with naming(key, address, settings):
        return open_adapter(kind, address, given, databases)


def place_of(chosen: SectionValues, settings: Settings) -> Address:
    """Return a section's address; by default the store's."""
    return settings.store.address if chosen.address is None else chosen.address


def is_wanted(chosen: SectionValues, asked: bool) -> bool:
    """Return whether setup creates the tables of a section: when it has a place of its own, or when asked to."""
    return asked or chosen.address is not None or chosen.schema is not None
