"""Settings: one TOML file, the environment over it, options of the command line over both.

Every value remembers where it came from, so that a wrong one is found at once. Source: house-style.md, "Configuration";
names and defaults of specification 1.4.
"""

from postdate.config.addresses import Address, check_server, resolved, without_secrets
from postdate.config.sections import (
    KEYS,
    DelayedDeliverySettings,
    EndpointSettings,
    IntakeSettings,
    OutboxSettings,
    QueueSettings,
    SagaSettings,
    SettingRow,
    Settings,
    StoreSettings,
    TimeoutManagerSettings,
    TransportSettings,
)
from postdate.config.sources import DEFAULT_FILE, FILE_VARIABLE, PREFIX, load_settings
from postdate.config.texts import format_duration, parse_duration, parse_instant

__all__ = [
    "DEFAULT_FILE",
    "FILE_VARIABLE",
    "KEYS",
    "PREFIX",
    "Address",
    "DelayedDeliverySettings",
    "EndpointSettings",
    "IntakeSettings",
    "OutboxSettings",
    "QueueSettings",
    "SagaSettings",
    "SettingRow",
    "Settings",
    "StoreSettings",
    "TimeoutManagerSettings",
    "TransportSettings",
    "check_server",
    "format_duration",
    "load_settings",
    "parse_duration",
    "parse_instant",
    "resolved",
    "without_secrets",
]
