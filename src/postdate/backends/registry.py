"""All backends: Postdate's own, and those of other installed packages. Source: ADR 20."""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

import postdate.backends as backends_folder
from postdate.errors import ConfigurationError
from postdate.ports.backends import Backend, Place
from postdate.runtime import forks

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

log = logging.getLogger("postdate.backends")

GROUP: Final = "postdate.backends"
"""Entry points; each refers to a :class:`Backend`."""

_FIRST: Final = ("sqlite", "postgres", "mariadb", "sqlserver", "rabbitmq", "azure", "msmq")
_LAST: Final = ("memory",)
"""Errors name the first ones before, and these after all others, which are sorted by name."""

_SHARED: Final = frozenset({"sql"})
"""Packages that are no backends: code that several share."""


class _Registry:
    """The backends, found once per process."""

    def __init__(self) -> None:
        self._lock = forks.rlock()
        self._own: tuple[Backend, ...] = ()
        self._all: tuple[Backend, ...] = ()

    def load_all(self) -> tuple[Backend, ...]:
        """All backends. While other packages' backends are being loaded: Postdate's own, which prevents recursion."""
        if self._all:
            return self._all
        with self._lock:
            if not self._own:
                self._own = tuple(_import_own_backends())
                try:
                    self._all = (*self._own, *_load_foreign_backends(self._own))
                except BaseException:  # interrupted: the next call looks again
                    self._own = ()
                    raise
            return self._all or self._own


def _import_own_backends() -> Iterator[Backend]:
    names = {each.name for each in pkgutil.iter_modules(backends_folder.__path__) if each.ispkg} - _SHARED
    for name in (*_FIRST, *sorted(names - {*_FIRST, *_LAST}), *_LAST):
        yield importlib.import_module(f"postdate.backends.{name}").BACKEND


def _load_foreign_backends(own: tuple[Backend, ...]) -> list[Backend]:
    from importlib.metadata import entry_points  # costs as much as all of ours

    product_by_scheme = {scheme: each.product for each in own for scheme in schemes(each)}
    backends: list[Backend] = []
    for point in sorted(entry_points(group=GROUP), key=lambda each: each.name):
        try:
            backend = _load_backend(point, product_by_scheme)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - of another package, which must not end ours
            log.warning("the backend %s (%s) is left out: %s", point.name, point.value, error or repr(error))
            continue
        product_by_scheme |= dict.fromkeys(schemes(backend), backend.product)
        backends.append(backend)
    return backends


def _load_backend(point: EntryPoint, product_by_scheme: Mapping[str, str]) -> Backend:
    backend = point.load()
    if not isinstance(backend, Backend):
        raise ConfigurationError("it is not a postdate Backend")
    if duplicate_schemes := sorted(schemes(backend) & product_by_scheme.keys()):
        owners = ", ".join(f"{scheme}: ({product_by_scheme[scheme]})" for scheme in duplicate_schemes)
        raise ConfigurationError(f"there is one already for {owners}")
    return backend


_registry = _Registry()


def backends() -> tuple[Backend, ...]:
    """Return all backends, Postdate's first; one that cannot be loaded is logged and left out."""
    return _registry.load_all()


def schemes(backend: Backend) -> frozenset[str]:
    """Return all schemes of a backend's addresses, aliases included."""
    address_groups = [backend.addresses, *([] if backend.queue_addresses is None else [backend.queue_addresses])]
    return frozenset(scheme for each in address_groups for scheme in (*each.schemes, *each.aliases))


def place_of(scheme: str) -> Place | None:
    """Return where addresses with this scheme are (file, server, …); ``None``: no backend has such addresses."""
    return next((each.place for each in backends() if scheme in schemes(each)), None)


def schemes_in_one_database(scheme: str) -> tuple[str, str] | None:
    """Return the schemes for a store and for queues in the database that an address with ``scheme`` names.

    ``None``: no backend has such addresses, or it has only one of the two there.
    """
    for each in backends():
        if scheme in schemes(each) and each.store and each.transport and each.place in {Place.FILE, Place.SERVER}:
            if each.queue_addresses is None:
                return scheme, scheme
            if set(each.addresses.schemes) & set(each.queue_addresses.aliases):
                return each.addresses.schemes[0], each.queue_addresses.schemes[0]
    return None
