"""The server's clock, version, and the settings that decide about durability."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Final

from postdate.backends.redis.server import RedisServer
from postdate.clock import from_microseconds
from postdate.errors import ConfigurationError
from postdate.ports import ServerFacts

_OLDEST: Final = (7, 0)
_TOLD: Final = (
    "aof_enabled",
    "aof_last_write_status",
    "maxmemory",
    "maxmemory_policy",
    "rdb_last_bgsave_status",
    "role",
    "connected_slaves",
    "redis_mode",
)


async def server_now(server: RedisServer) -> datetime:
    seconds, microseconds = await server.command("TIME")
    return from_microseconds(int(seconds) * 1_000_000 + int(microseconds))


async def _info(server: RedisServer) -> dict[str, str]:
    reply: bytes = await server.command("INFO")
    lines = reply.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))


async def server_facts(server: RedisServer) -> ServerFacts:
    info = await _info(server)
    settings = {name: info[name] for name in _TOLD if name in info}
    return ServerFacts(
        "Redis", info.get("redis_version", "without a version"), await server_now(server), None, None, settings
    )


async def check_eviction(server: RedisServer) -> None:
    """Raise `ConfigurationError` when the server is too old, or evicts keys without a time to live."""
    info = await _info(server)
    version = info.get("redis_version", "")
    numbers = tuple(int(number) for number in re.findall("[0-9]+", version)[:2])
    if numbers and numbers < _OLDEST:
        raise ConfigurationError(f"{server.login.place} is version {version}; Redis 7.0 or newer is needed")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy.startswith("allkeys") and info.get("maxmemory", "0") != "0":
        raise ConfigurationError(
            f"{server.login.place} throws keys away when its memory is full (maxmemory-policy {policy}): messages "
            f"would be lost; set maxmemory-policy noeviction"
        )
