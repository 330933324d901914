"""Reads a value from the file, the environment or an option, by the setting's definition."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any, Final

from postdate.config.addresses import Address
from postdate.config.texts import parse_duration
from postdate.errors import InvalidTimestamp
from postdate.ports.settings import Setting, Wrong

_LONGEST_EXCHANGE: Final = 150
_FLAGS: Final = {"true": True, "false": False}


class FromText(str):
    """A value from the environment or an option, which are always text."""

    __slots__ = ()


def read(setting: Setting, raw: Any) -> Any:
    """Return the value of a setting from TOML's, or from a :class:`FromText`; raises `Wrong` with what it must be."""
    if isinstance(raw, FromText):
        raw = _from_text(setting, raw)
    if setting.kind is timedelta and isinstance(raw, str | int | float) and not isinstance(raw, bool):
        try:
            raw = parse_duration(str(raw))
        except InvalidTimestamp as error:
            raise Wrong(f"must be a duration: {error}") from error
    return setting.checked(raw, "duration")


def _from_text(setting: Setting, text: str) -> Any:
    """Return the value that TOML would have for a text; the text itself where TOML would have a text."""
    if setting.is_list:
        return [name.strip() for name in text.split(",") if name.strip()]
    if setting.kind is bool:
        return _FLAGS.get(text.lower(), text)
    if setting.kind is int and re.fullmatch(r"-?[0-9]{1,18}", text):
        return int(text)
    if setting.kind is float and re.fullmatch(r"-?[0-9]{1,18}(\.[0-9]{1,18})?", text):
        return float(text)
    return str(text)


def exchange_name(raw: Any) -> str:
    """Read the name of an exchange; empty: none."""
    if not isinstance(raw, str) or len(raw) > _LONGEST_EXCHANGE or raw.startswith("amq."):
        raise Wrong(f"must be the name of an exchange, at most {_LONGEST_EXCHANGE} characters, or empty for none")
    return str(raw.strip())


def address(raw: Any) -> Address:
    """Read an address; its scheme is checked when it is opened."""
    if not isinstance(raw, str) or not raw.strip():
        raise Wrong("must be a text that is not blank")
    if ":" not in raw:
        raise Wrong("must be an address such as sqlite:///postdate.db or postgresql://user@host/database")
    return raw if isinstance(raw, Address) else Address(raw)
