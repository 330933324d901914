"""Settings: one TOML file, the environment over it, options of the command line over both.

Every value remembers its origin. Names and defaults: specification 1.4.
"""

from postdate.config.addresses import Address, check_server, resolved, without_secrets
from postdate.config.sections import SECTIONS, SectionValues, Settings, definitions, keys
from postdate.config.sources import PREFIX, load_settings
from postdate.config.values import parse_duration, parse_instant
from postdate.ports.settings import format_duration

__all__ = [
    "PREFIX",
    "SECTIONS",
    "Address",
    "SectionValues",
    "Settings",
    "check_server",
    "definitions",
    "format_duration",
    "keys",
    "load_settings",
    "parse_duration",
    "parse_instant",
    "resolved",
    "without_secrets",
]
