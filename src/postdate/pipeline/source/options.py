"""The options of the format ``postdate``, and their values.

Spark passes all options as texts with names in lower case, together with some of its own.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from postdate.backends.registry import schemes_in_one_database
from postdate.config import Address, definitions, load_settings, resolved
from postdate.config.values import FromText, read
from postdate.errors import ConfigurationError, PipelineError
from postdate.pipeline.dispatching import SweepSpec
from postdate.pipeline.stores import StoreSpec
from postdate.ports.settings import QueueName, Wrong, setting
from postdate.wiring import check_store, check_transport, file_of

DEFAULT_PARTITIONS: Final = 4
DEFAULT_BATCH: Final = 5_000
DEFAULT_ROWS_PER_BATCH: Final = 100_000

PENDING: Final = "pending"
RECORDS: Final = "records"
QUEUED: Final = "queued"
LATEST: Final = "latest"

_ENV: Final = "env:"
_FILE: Final = "file:"


class StoreUse(Enum):
    READING = "spark.read"
    WRITING = "df.write"
    FOLLOWING = "spark.readStream"
    WRITING_A_STREAM = "df.writeStream"


_READS: Final = frozenset({StoreUse.READING, StoreUse.FOLLOWING})
_WRITES: Final = frozenset({StoreUse.WRITING, StoreUse.WRITING_A_STREAM})


@dataclass(frozen=True, slots=True)
class Option:
    """One option. ``read`` converts its text into its value, or raises :class:`postdate.config.values.Wrong`."""

    name: str
    uses: frozenset[StoreUse]
    read: Callable[[str], Any]


def _as(annotation: Any) -> Callable[[str], Any]:
    """Return a function that parses texts of this annotation's type in the same way as settings."""
    kind = setting("option", Annotated[annotation, Meta(description="an option")])
    assert kind is not None
    return lambda raw: read(kind, FromText(raw))


def _of_store(name: str, raw: str) -> Any:
    """Return the value of a store's setting from its text, as in the file of settings."""
    read_setting = read(definitions("store")[name], FromText(raw))
    return read_setting.value if isinstance(read_setting, Enum) else read_setting


_NUMBER: Final = _as(Annotated[int, Meta(ge=1)])
_TEXT: Final = _as(str)


def _names(raw: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in raw.split(",") if name.strip())


OPTIONS: Final = MappingProxyType(
    {
        option.name.lower(): option
        for option in (
            Option("store", _READS | _WRITES, _TEXT),
            Option("config", _READS | _WRITES, _TEXT),
            Option("schema", _READS | _WRITES, partial(_of_store, "schema")),
            Option("table", _READS | _WRITES, partial(_of_store, "table")),
            Option("endpoint", _READS | _WRITES, _as(QueueName)),
            Option("recording", _READS | _WRITES, partial(_of_store, "recording")),
            Option("synchronous", _READS | _WRITES, partial(_of_store, "synchronous")),
            Option("what", _READS | _WRITES, _as(Literal["pending", "records", "queued"])),
            Option("columns", _READS, _names),
            Option("partitions", _READS, _NUMBER),
            Option("snapshot", frozenset({StoreUse.READING}), _TEXT),
            Option("startingAt", frozenset({StoreUse.FOLLOWING}), _as(Literal["earliest", "latest"])),
            Option("maxRowsPerBatch", frozenset({StoreUse.FOLLOWING}), _NUMBER),
            Option("batch", _WRITES, _NUMBER),
        )
    }
)
"""Every option, by its name in lower case."""

_OF_SPARK: Final = frozenset({"checkpointlocation", "queryname"})
_OF_STORE: Final = ("schema", "table", "recording", "synchronous")


class SourceOptions:
    """The checked options of one data frame. An option that was not given has no value.

    ``uses`` are the uses that are still possible. Raises PipelineError for a wrong value, and for options that are
    unknown or belong to other uses.
    """

    def __init__(self, options: Mapping[str, str], *uses: StoreUse) -> None:
        self._values = dict[str, Any]()
        for name, value in options.items():
            if name.lower() not in _OF_SPARK:
                option = _option_named(name, frozenset(uses))
                self._values[option.name] = _read(option, value)

    def get(self, name: str, default: Any = None) -> Any:
        return self._values.get(name, default)

    def what(self, *possible: str) -> str:
        """Return the kind of rows to read or write: one of ``possible``, by default the first.

        Otherwise raise PipelineError.
        """
        chosen = self.get("what", possible[0])
        if chosen not in possible:
            raise PipelineError(f"the option what must be {' or '.join(possible)} here, not {chosen!r}")
        return chosen

    def spec(self) -> StoreSpec:
        """Return the store that the options choose.

        Raises PipelineError for no store or two, or for an address with a password, which must not be in an option.
        Raises ConfigurationError if a reference cannot be followed, or the settings in the file are wrong.
        """
        address, config = self.get("store"), self.get("config")
        if (address is None) == (config is None):
            raise PipelineError(
                "name one store: with .option('store', 'sqlite:///messages.db'), .option('store', 'env:NAME'), "
                ".option('store', 'file:/path'), or .option('config', '/path/postdate.toml')"
                + ("" if address is None else ", not with store and config both")
            )
        spec = StoreSpec(_checked_address(address)) if config is None else _from_config(config)
        kind = check_store(resolved(spec.address, os.environ))
        chosen = {name: self._values[name] for name in _OF_STORE if name in self._values}
        for name in chosen:
            if name not in kind.takes:
                takes = ", ".join(each for each in _OF_STORE if each in kind.takes)
                raise PipelineError(f"the option {name} is not for {kind.product}, which takes {takes}; remove it")
        if (endpoint := self.get("endpoint")) is not None:
            chosen["endpoint"] = endpoint
        return replace(spec, **chosen)

    def existing(self) -> StoreSpec:
        """Return the store for reading. Raise PipelineError for a missing file, because to open it would create it."""
        spec = self.spec()
        path = file_of(resolved(spec.address, os.environ))
        if path is not None and not path.expanduser().exists():
            raise PipelineError(f"there is no file {path}: name the one that was written, or write to it first")
        return spec

    def sweep(self) -> SweepSpec:
        """Return the sweep to the queues of the store's database, or of the settings.

        Raise PipelineError without queues.
        """
        store, config = self.spec(), self.get("config")
        if config is not None:
            settings = load_settings(Path(config).expanduser(), os.environ)
            if settings.origins.get("transport.address") is None:
                raise PipelineError(f'{config} names no queues: write address = "…" into its section [transport]')
            return replace(SweepSpec.of(settings), store=store)
        place = resolved(store.address, os.environ)
        if schemes_in_one_database(place.scheme) is None:
            raise PipelineError(
                f"there are no queues in {check_store(place).product}: name them with the store in a postdate.toml, in "
                f"its section [transport], and write .option('config', '/path/postdate.toml')"
            )
        store_settings = {"schema": store.schema, "synchronous": store.synchronous, "recording": store.recording}
        takes = check_transport(place).takes
        arguments = {name: value for name, value in store_settings.items() if name in takes and value is not None}
        return SweepSpec(store, store.address, arguments)


def _option_named(name: str, uses: frozenset[StoreUse]) -> Option:
    option = OPTIONS.get(name.lower())
    if option is None:
        if name.lower() == "path":
            raise PipelineError("a store has no path here: load() and save() without one, and name it with store")
        close = difflib.get_close_matches(name.lower(), OPTIONS, n=1)
        here = ", ".join(each.name for each in OPTIONS.values() if each.uses & uses)
        hint = f"did you mean {OPTIONS[close[0]].name}?" if close else f"there are {here}"
        raise PipelineError(f"the format postdate has no option {name!r}; {hint}")
    if not option.uses & uses:
        places = " and ".join(sorted(each.value for each in option.uses))
        raise PipelineError(f"the option {option.name} is for {places}; remove it")
    return option


def _read(option: Option, value: str) -> Any:
    try:
        return option.read(value)
    except Wrong as error:
        shown = Address(value).shown  # A user who confuses options may have put an address here.
        raise PipelineError(f"the option {option.name} {error}, not {shown!r}") from error


def _checked_address(address: str) -> str:
    """Return the address.

    The relative path of a reference is made absolute, because executors run in other directories.
    """
    if address.startswith(_FILE):
        return f"{_FILE}{Path(address.removeprefix(_FILE)).expanduser().absolute()}"
    if address.startswith(_ENV):
        return address
    check_store(address)
    place = Address(address)
    if place.shown != str(place):
        raise PipelineError(
            f"the address {place.shown} in the option store holds a secret, and Spark does not keep options secret. "
            f"Put the whole address into an environment variable of the driver and of every executor and write "
            f".option('store', 'env:NAME'), or into the first line of a file that all of them can read and write "
            f".option('store', 'file:/path'), or into a postdate.toml and write "
            f".option('config', '/path/postdate.toml')"
        )
    return address


def _from_config(path: str) -> StoreSpec:
    settings = load_settings(Path(path).expanduser(), os.environ)
    if settings.origins.get("store.address") is None:
        raise ConfigurationError(f'{path} names no store: write address = "…" into its section [store]')
    return StoreSpec.of(settings)
