"""The sections of the settings. Most fields are defined by the objects that receive the values.

``[delayed_delivery]`` has the settings of :class:`postdate.DelayedDelivery`. ``[store]`` has the settings of all
stores, including those of other packages. Only the other settings are defined here. Source: ADR 0023.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, make_dataclass
from datetime import timedelta
from enum import Enum
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast

from msgspec import Meta

from postdate.backends.registry import backends, schemes
from postdate.config.addresses import Address
from postdate.config.values import parse_address, parse_exchange_name, parse_listen_address
from postdate.endpoint.settings import DelayedDelivery, TimeoutManager
from postdate.ports import TransactionMode
from postdate.ports import settings as ports_settings
from postdate.ports.backends import Adapter, Backend

FOLLOWS: Final = "as "
"""Prefix of the origin of a value that was derived from another value."""

_PlaceRole = Literal["store", "transport", "timeouts", "sagas", "outbox"]
_ADDRESS: Final = ports_settings.Form(parse_address)
# Every dataclass below has a docstring. A docstring made by ``dataclass`` would show the defaults, and to show an
# address
# asks the registry, while a backend of another package may be importing this module.
_STORE: Final = Address("sqlite:///postdate.db")
_QUEUES: Final = Address("local:///postdate.db")
_QUEUES_MEANING: Final = (
    "where the queues are; default: in the database of the store, or of the timeouts where only that is named: there "
    "they share transactions"
)


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """The settings of the endpoint that ``postdate run`` starts. Its intake queue is ``{name}.timeouts``."""

    name: Annotated[
        ports_settings.QueueName, Meta(description="name of the service; it receives from {name}.timeouts")
    ] = "postdate"
    error_queue: Annotated[ports_settings.QueueName, Meta(description="where messages go that cannot be delivered")] = (
        "error"
    )
    transaction_mode: Annotated[
        TransactionMode | None,
        Meta(description="default: the strongest mode that store and transport support together"),
    ] = None
    concurrency: Annotated[int, Meta(ge=1, description="messages handled at once")] = 16


def _create_address_class(meaning: str, default: Address | None = None) -> type:
    """Return a dataclass with one setting, ``address``. Without a default, the setting is optional."""
    kind: Any = Address | None if default is None else Address
    annotation = Annotated[kind, _ADDRESS, Meta(description=meaning)]
    return make_dataclass("_Position", [("address", annotation, default)], frozen=True, namespace={"__doc__": meaning})


@dataclass(frozen=True, slots=True)
class _Enabled:
    """Whether messages wait in the store: the switch of delayed delivery."""

    enabled: Annotated[
        bool,
        Meta(description="false: there is no store, and nothing is delivered from one; for a timeout manager alone"),
    ] = True


@dataclass(frozen=True, slots=True)
class _ManagedTimeouts:
    """The endpoints whose timeouts are managed here, or the manager elsewhere that receives delayed sends."""

    endpoints: Annotated[
        tuple[ports_settings.QueueName, ...],
        Meta(description="whose timeouts are managed here: each has two queues and a table; default: endpoint.name"),
    ] = ()
    external_address: Annotated[
        ports_settings.Destination | None,
        Meta(
            description="queue of the timeout manager of another endpoint, as other.Timeouts, to which delayed sends "
            "go; only without a delayed delivery and a timeout manager of one's own"
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """The queues that ``postdate setup`` and ``postdate run`` create."""

    create: Annotated[
        tuple[ports_settings.QueueName, ...],
        Meta(description="queues that setup and run create besides the endpoint's own"),
    ] = ()


@dataclass(frozen=True, slots=True)
class IntakeSettings:
    """The exchanges through which other programs delay messages."""

    exchange: Annotated[
        str,
        ports_settings.Form(parse_exchange_name),
        Meta(description="of RabbitMQ: what is published to it with a header x-delay is delayed; empty: none"),
    ] = "postdate"
    due_exchange_type: Annotated[
        Literal["topic", "direct", "fanout", "headers"],
        Meta(description="of the exchange {intake.exchange}.due, where such messages go when due"),
    ] = "topic"


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """Where the service answers questions about its health and its numbers."""

    listen: Annotated[
        str | None,
        ports_settings.Form(parse_listen_address),
        Meta(
            description="host and port, as 127.0.0.1:9464, where the service answers /metrics for Prometheus, /healthz "
            "and /readyz; default: nowhere"
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the file: the fields of the dataclasses ``kinds``.

    Settings of adapters follow those of the first one. ``role``: the role of these adapters. The address in the section
    selects the adapter.
    """

    kinds: tuple[type, ...]
    role: _PlaceRole | None = None


SECTIONS: Final[Mapping[str, Section]] = {
    "endpoint": Section((EndpointSettings,)),
    "store": Section(
        (_create_address_class("where messages wait; default: in the database where the queues are", _STORE),), "store"
    ),
    "transport": Section((_create_address_class(_QUEUES_MEANING, _QUEUES),), "transport"),
    "delayed_delivery": Section((_Enabled, DelayedDelivery)),
    "timeout_manager": Section(
        (
            _create_address_class("where timeouts are kept; default: no timeout manager runs"),
            _ManagedTimeouts,
            TimeoutManager,
        ),
        "timeouts",
    ),
    "sagas": Section(
        (_create_address_class("where applications keep saga instances; default: in the database of the store"),),
        "sagas",
    ),
    "outbox": Section(
        (_create_address_class("where applications keep their outbox; default: in the database of the store"),),
        "outbox",
    ),
    "queues": Section((QueueSettings,)),
    "intake": Section((IntakeSettings,)),
    "metrics": Section((MetricsSettings,)),
}


def definitions(section: str, scheme: str | None = None) -> Mapping[str, ports_settings.Setting]:
    """Return the settings of a section by name, in the order in which they are shown.

    ``scheme``: the scheme of the section's address. It selects the adapter for a setting that several adapters define.
    """
    return _definitions(SECTIONS[section], scheme, backends())


@lru_cache(maxsize=128)
def _definitions(
    definition: Section, scheme: str | None, backends: tuple[Backend, ...]
) -> Mapping[str, ports_settings.Setting]:
    first, *more_settings = [ports_settings.settings_of(kind) for kind in definition.kinds]
    adapter_settings = dict[str, ports_settings.Setting]()
    for backend in backends:
        adapter: Adapter | None = None if definition.role is None else getattr(backend, definition.role)
        if adapter is not None:
            adapter_settings |= {
                name: each
                for name, each in adapter.own_settings.items()
                if name not in adapter_settings or scheme in schemes(backend)
            }
    settings = {**first, **adapter_settings}
    for each in more_settings:
        settings |= each
    return types.MappingProxyType(settings)


def keys() -> Mapping[str, None]:
    """Return the keys of all settings, such as ``store.address``, in the order of the sections."""
    return {f"{section}.{name}": None for section in SECTIONS for name in definitions(section)}


@dataclass(frozen=True, slots=True)
class SectionValues:
    """The values of a section by name. Each is an attribute, as in ``settings.store.address``."""

    values: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        # Copying asks for these attributes before ``values`` is set. Without this test, the lookup would recurse.
        if name == "values" or name.startswith("__"):
            raise AttributeError(name)
        if name not in self.values:
            raise AttributeError(f"there is no setting {name!r} in this section; there are {', '.join(self.values)}")
        return self.values[name]

    def of(self, kind: type) -> dict[str, Any]:
        """Return the values of the settings of a dataclass, as its arguments."""
        return {name: self.values[name] for name in ports_settings.settings_of(kind)}


def section_values(
    section: str, values: Mapping[str, Any] = types.MappingProxyType({}), scheme: str = ""
) -> SectionValues:
    """Return the values of a section, with defaults for missing ones. For ``scheme`` see :func:`definitions`."""
    return SectionValues({name: values.get(name, each.default) for name, each in definitions(section, scheme).items()})


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings.

    Args:
        endpoint, store, transport, delayed_delivery, timeout_manager, sagas, outbox, queues, intake, metrics: the
            sections of the file.
        origins: for each key (``store.address`` …) the origin of its value.
        file: the file that was read, or ``None`` if there was none.
    """

    endpoint: SectionValues = field(default_factory=partial(section_values, "endpoint"))
    store: SectionValues = field(default_factory=partial(section_values, "store"))
    transport: SectionValues = field(default_factory=partial(section_values, "transport"))
    delayed_delivery: SectionValues = field(default_factory=partial(section_values, "delayed_delivery"))
    timeout_manager: SectionValues = field(default_factory=partial(section_values, "timeout_manager"))
    sagas: SectionValues = field(default_factory=partial(section_values, "sagas"))
    outbox: SectionValues = field(default_factory=partial(section_values, "outbox"))
    queues: SectionValues = field(default_factory=partial(section_values, "queues"))
    intake: SectionValues = field(default_factory=partial(section_values, "intake"))
    metrics: SectionValues = field(default_factory=partial(section_values, "metrics"))
    origins: Mapping[str, str] = field(default_factory=dict[str, str])
    file: Path | None = None

    @property
    def number_set(self) -> int:
        """Number of values that were set. Values derived from another value are not counted."""
        return sum(origin != "default" and not origin.startswith(FOLLOWS) for origin in self.origins.values())

    def origin(self, key: str) -> str:
        """Return the origin of a value; ``default`` if it was not set."""
        return self.origins.get(key, "default")

    def rows(self) -> Iterator[SettingRow]:
        """Yield every setting in the order of the sections."""
        for section in SECTIONS:
            section_settings: SectionValues = getattr(self, section)
            address: Address | None = section_settings.values.get("address")
            for name, each in definitions(section, None if address is None else address.scheme).items():
                key = f"{section}.{name}"
                yield SettingRow(key, _display_value(section_settings.values[name]), self.origin(key), each.meaning)


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting for display, without secrets."""

    key: str
    value: str | int | float | bool | list[str] | None
    origin: str
    meaning: str


def _display_value(value: Any) -> str | int | float | bool | list[str] | None:
    match value:
        case Address():
            return value.redacted_text
        case ports_settings.Secret():
            return "***"
        case timedelta():
            return ports_settings.format_duration(value)
        case Enum():
            return str(value.value)
        case tuple():
            return [str(each) for each in cast("Iterable[object]", value)]
        case _:
            return value
