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
from postdate.config import Address, definitions, load_settings, resolve_address
from postdate.config.values import FromText, read_value
from postdate.errors import ConfigurationError, PipelineError
from postdate.pipeline.dispatching import SweepSpec
from postdate.pipeline.stores import StoreSpec
from postdate.ports.settings import InvalidValue, QueueName, setting
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
    """One option. ``read`` converts its text into its value, or raises :class:`postdate.config.values.InvalidValue`."""

    name: str
    uses: frozenset[StoreUse]
    read: Callable[[str], Any]


def _parser_of(annotation: Any) -> Callable[[str], Any]:
    """Return a function that parses texts of this annotation's type in the same way as settings."""
    kind = setting("option", Annotated[annotation, Meta(description="an option")])
    assert kind is not None
    return lambda raw: read_value(kind, FromText(raw))


def _parse_store_setting(name: str, raw: str) -> Any:
    """Return the value of a store's setting from its text, as in the file of settings."""
    read_setting = read_value(definitions("store")[name], FromText(raw))
    return read_setting.value if isinstance(read_setting, Enum) else read_setting


_NUMBER: Final = _parser_of(Annotated[int, Meta(ge=1)])
_TEXT: Final = _parser_of(str)


def _split_names(raw: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in raw.split(",") if name.strip())


OPTIONS: Final = MappingProxyType(
    {
        option.name.lower(): option
        for option in (
            Option("store", _READS | _WRITES, _TEXT),
            Option("config", _READS | _WRITES, _TEXT),
            Option("schema", _READS | _WRITES, partial(_parse_store_setting, "schema")),
            Option("table", _READS | _WRITES, partial(_parse_store_setting, "table")),
            Option("endpoint", _READS | _WRITES, _parser_of(QueueName)),
            Option("recording", _READS | _WRITES, partial(_parse_store_setting, "recording")),
            Option("synchronous", _READS | _WRITES, partial(_parse_store_setting, "synchronous")),
            Option("what", _READS | _WRITES, _parser_of(Literal["pending", "records", "queued"])),
            Option("columns", _READS, _split_names),
            Option("partitions", _READS, _NUMBER),
            Option("snapshot", frozenset({StoreUse.READING}), _TEXT),
            Option("startingAt", frozenset({StoreUse.FOLLOWING}), _parser_of(Literal["earliest", "latest"])),
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
                option = _find_option(name, frozenset(uses))
                self._values[option.name] = _read_option(option, value)

    def get(self, name: str, default: Any = None) -> Any:
        return self._values.get(name, default)

    def row_kind(self, *allowed: str) -> str:
        """Return the kind of rows to read or write: one of ``allowed``, by default the first.

        Otherwise raise PipelineError.
        """
        row_kind = self.get("what", allowed[0])
        if row_kind not in allowed:
            raise PipelineError(f"the option what must be {' or '.join(allowed)} here, not {row_kind!r}")
        return row_kind

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
        spec = StoreSpec(_check_address(address)) if config is None else _read_config(config)
        kind = check_store(resolve_address(spec.address, os.environ))
        field_values = {name: self._values[name] for name in _OF_STORE if name in self._values}
        for name in field_values:
            if name not in kind.argument_names:
                accepted_names = ", ".join(each for each in _OF_STORE if each in kind.argument_names)
                raise PipelineError(
                    f"the option {name} is not for {kind.product}, which takes {accepted_names}; remove it"
                )
        if (endpoint := self.get("endpoint")) is not None:
            field_values["endpoint"] = endpoint
        return replace(spec, **field_values)

    def existing_spec(self) -> StoreSpec:
        """Return the store for reading. Raise PipelineError for a missing file, because to open it would create it."""
        spec = self.spec()
        path = file_of(resolve_address(spec.address, os.environ))
        if path is not None and not path.expanduser().exists():
            raise PipelineError(f"there is no file {path}: name the one that was written, or write to it first")
        return spec

    def sweep_spec(self) -> SweepSpec:
        """Return the sweep to the queues of the store's database, or of the settings.

        Raise PipelineError without queues.
        """
        store, config = self.spec(), self.get("config")
        if config is not None:
            settings = load_settings(Path(config).expanduser(), os.environ)
            if settings.origins.get("transport.address") is None:
                raise PipelineError(f'{config} names no queues: write address = "…" into its section [transport]')
            return replace(SweepSpec.of(settings), store=store)
        resolved_address = resolve_address(store.address, os.environ)
        if schemes_in_one_database(resolved_address.scheme) is None:
            raise PipelineError(
                f"there are no queues in {check_store(resolved_address).product}: name them with the store in a "
                f"postdate.toml, in "
                f"its section [transport], and write .option('config', '/path/postdate.toml')"
            )
        store_settings = {"schema": store.schema, "synchronous": store.synchronous, "recording": store.recording}
        accepted_names = check_transport(resolved_address).argument_names
        arguments = {
            name: value for name, value in store_settings.items() if name in accepted_names and value is not None
        }
        return SweepSpec(store, store.address, arguments)


def _find_option(name: str, uses: frozenset[StoreUse]) -> Option:
    option = OPTIONS.get(name.lower())
    if option is None:
        if name.lower() == "path":
            raise PipelineError("a store has no path here: load() and save() without one, and name it with store")
        matches = difflib.get_close_matches(name.lower(), OPTIONS, n=1)
        names_text = ", ".join(each.name for each in OPTIONS.values() if each.uses & uses)
        hint = f"did you mean {OPTIONS[matches[0]].name}?" if matches else f"there are {names_text}"
        raise PipelineError(f"the format postdate has no option {name!r}; {hint}")
    if not option.uses & uses:
        places = " and ".join(sorted(each.value for each in option.uses))
        raise PipelineError(f"the option {option.name} is for {places}; remove it")
    return option


def _read_option(option: Option, value: str) -> Any:
    try:
        return option.read(value)
    except InvalidValue as error:
        redacted_text = Address(value).redacted_text  # A user who confuses options may have put an address here.
        raise PipelineError(f"the option {option.name} {error}, not {redacted_text!r}") from error


def _check_address(address: str) -> str:
    """Return the address.

    The relative path of a reference is made absolute, because executors run in other directories.
    """
    if address.startswith(_FILE):
        return f"{_FILE}{Path(address.removeprefix(_FILE)).expanduser().absolute()}"
    if address.startswith(_ENV):
        return address
    check_store(address)
    parsed_address = Address(address)
    if parsed_address.redacted_text != str(parsed_address):
        raise PipelineError(
            f"the address {parsed_address.redacted_text} in the option store holds a secret, and Spark does not keep "
            f"options secret. "
            f"Put the whole address into an environment variable of the driver and of every executor and write "
            f".option('store', 'env:NAME'), or into the first line of a file that all of them can read and write "
            f".option('store', 'file:/path'), or into a postdate.toml and write "
            f".option('config', '/path/postdate.toml')"
        )
    return address


def _read_config(path: str) -> StoreSpec:
    settings = load_settings(Path(path).expanduser(), os.environ)
    if settings.origins.get("store.address") is None:
        raise ConfigurationError(f'{path} names no store: write address = "…" into its section [store]')
    return StoreSpec.of(settings)
