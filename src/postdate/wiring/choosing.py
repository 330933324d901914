"""From a section of the settings to what its adapter is opened with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from postdate.config import KEYS, Settings
from postdate.errors import ConfigurationError
from postdate.wiring.adapters import Kind


def chosen_for(section: str, kind: Kind, given: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Return those values that an adapter knows and that are there.

    Args:
        section: of the settings.
        kind: of the adapter.
        given: by the names of its settings.
        settings: whose origins tell what somebody has set.

    Raises:
        ConfigurationError: something was set that this adapter does not have.
    """
    for name in given:
        key = f"{section}.{name}"
        if name not in kind.settings and settings.origins.get(key, "default") != "default":
            takes = [f"{section}.{each}" for each in given if each in kind.settings and f"{section}.{each}" in KEYS]
            which = f", which takes {', '.join(takes)}" if takes else ""
            raise ConfigurationError(f"{key} ({settings.origins[key]}) is not for {kind.product}{which}; remove it")
    return {name: value for name, value in given.items() if name in kind.settings and value is not None}
