"""What an endpoint takes from a database that is given to it as one object. Source: ADR 0021."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, Protocol, cast, runtime_checkable

from postdate.endpoint.outbox import Outbox
from postdate.endpoint.settings import DelayedDelivery, ExternalTimeoutManager, TimeoutManager
from postdate.errors import ConfigurationError
from postdate.ports import DelayedMessageStore, OutboxStore, SagaStore, Transport

_SUCH_AS: Final = "such as Sqlite(path) or Postgres(url)"


@runtime_checkable
class Database(Protocol):
    """A database as one object.

    It has as attributes what it can keep: ``queues``, a :class:`~postdate.Transport`; ``store``, a
    :class:`~postdate.DelayedMessageStore`; ``sagas``, a :class:`~postdate.SagaStore`; ``outbox``, an
    :class:`~postdate.ports.OutboxStore`. Whoever made it closes it.
    """

    def serve(self, endpoint: str, concurrency: int, *, stores: bool) -> None:
        """Take note of an endpoint that uses it.

        Args:
            endpoint: its name.
            concurrency: messages that it handles at once, 1 or more.
            stores: its delayed messages wait in ``store``.

        Raises:
            ConfigurationError: it cannot serve this one beside those it serves already.
        """
        ...


@dataclass(frozen=True, slots=True)
class Parts:
    """What an endpoint is made of, wherever it comes from."""

    transport: Transport
    delayed_delivery: DelayedDelivery | None
    outbox: Outbox | None


def parts_of(  # noqa: PLR0913 - all that a database may supply, and who asks
    endpoint: str,
    concurrency: int,
    database: object,
    transport: Transport | None,
    delayed_delivery: DelayedDelivery | None,
    timeout_manager: TimeoutManager | ExternalTimeoutManager | None,
    outbox: Outbox | bool | None,
) -> Parts:
    """Return what was given to an endpoint, and from its database what was not.

    A database delays messages where nothing else that was given does, and has an outbox where that is ``True``.

    Raises:
        ConfigurationError: something is missing, or contradicts the rest.
    """
    if database is not None and not isinstance(database, Database):
        raise ConfigurationError(
            f"the second argument of endpoint {endpoint!r} is its database, {_SUCH_AS}, not "
            f"{type(database).__name__}: give queues with transport=, and a store with "
            f"delayed_delivery=DelayedDelivery(store)"
        )
    if database is None and transport is None:
        raise ConfigurationError(
            f"endpoint {endpoint!r} has no queues: give it a database, {_SUCH_AS}, or queues with transport="
        )
    if database is None and outbox is True:
        raise ConfigurationError(
            f"outbox=True is an outbox in the database of endpoint {endpoint!r}, which has none: give it one, "
            f"{_SUCH_AS}, or say where the outbox is with outbox=Outbox(store)"
        )
    stores = database is not None and delayed_delivery is None and timeout_manager is None
    if database is not None:
        database.serve(endpoint, concurrency, stores=stores)
    if stores:
        delayed_delivery = DelayedDelivery(cast("DelayedMessageStore", _part(database, "store", "delayed_delivery=…")))
    if transport is None:
        transport = cast("Transport", _part(database, "queues", "transport=…"))
    if outbox is True:
        outbox = Outbox(cast("OutboxStore", _part(database, "outbox", "outbox=Outbox(…)")))
    return Parts(transport, delayed_delivery, outbox or None)


def sagas_in(database: object) -> SagaStore | None:
    """Return where a database keeps sagas, if it does."""
    return cast("SagaStore | None", getattr(database, "sagas", None))


def _part(database: object, name: Literal["store", "queues", "outbox"], instead: str) -> object:
    found = getattr(database, name, None)
    if found is None:
        raise ConfigurationError(
            f"{type(database).__name__} has no {name} for an endpoint: say with {instead} what to use instead"
        )
    return found
