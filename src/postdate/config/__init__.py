"""Settings from one TOML file, the environment, and options of the command line.

A later source overrides an earlier one. Every value remembers its origin. Names and defaults: docs/cli/config.md.
"""

from postdate.config.addresses import (
    Address as Address,
    check_server as check_server,
    resolve_address as resolve_address,
    redact_secrets as redact_secrets,
)
from postdate.config.sections import (
    SECTIONS as SECTIONS,
    SectionValues as SectionValues,
    Settings as Settings,
    definitions as definitions,
    keys as keys,
)
from postdate.config.sources import PREFIX as PREFIX, load_settings as load_settings
from postdate.config.values import (
    parse_host_and_port as parse_host_and_port,
    parse_duration as parse_duration,
    parse_instant as parse_instant,
)
from postdate.ports.settings import format_duration as format_duration
