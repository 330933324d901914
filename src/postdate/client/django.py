"""The database of a Django project, as the address of a store.

Tests of Django replace the database of a project by another one while they run. So the address is asked for at each
use of a client, and a client that is created where a module is imported never stores into the database of development.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, cast
from urllib.parse import quote

from postdate.errors import ConfigurationError

_SCHEMES: Final = {"postgresql": "postgresql", "postgis": "postgresql", "mysql": "mariadb", "sqlite3": "sqlite"}
"""The schemes of addresses, by the last name of Django's engine."""

_ELSEWHERE_IN_MYSQL: Final = ("unix_socket", "read_default_file", "host", "port", "user", "password", "passwd", "db")
"""Options of MySQL's drivers that connect in another way, or elsewhere, than the rest of the settings says."""


def database_url(alias: str = "default") -> Callable[[], str]:
    """Return a function for :func:`postdate.connect` that returns the address of a database of the settings.

    Args:
        alias: name of the database in ``DATABASES``. Within a test it stands for the database of that test.

    The function raises ConfigurationError if Postdate has no store in such a database, or if it is in memory.
    """

    def find_url() -> str:
        from django.db import connections  # pyright: ignore[reportMissingTypeStubs]

        return _url_of(alias, cast("Any", connections[alias]).settings_dict)

    return find_url


def _url_of(alias: str, database: Mapping[str, Any]) -> str:
    engine = str(database["ENGINE"])
    scheme = _SCHEMES.get(engine.rpartition(".")[2])
    name = str(database["NAME"] or "")
    if scheme is None:
        raise ConfigurationError(
            f"the database {alias!r} has the engine {engine}, and Postdate has no store there; name another alias, or "
            f"an address"
        )
    if scheme == "sqlite":
        if name == ":memory:" or "mode=memory" in name:
            raise ConfigurationError(
                f"the database {alias!r} is in memory, and no other connection sees it: give tests a file, with "
                f"DATABASES[{alias!r}]['TEST'] = {{'NAME': BASE_DIR / 'test.sqlite3'}}"
            )
        return f"sqlite:///{name}"
    options = _options_of_postgres(database) if scheme == "postgresql" else _options_of_mysql(alias, database)
    user, password = (quote(str(database.get(key) or ""), safe="") for key in ("USER", "PASSWORD"))
    host, port = (str(database.get(key) or "") for key in ("HOST", "PORT"))
    login = f"{user}:{password}@" if password else f"{user}@" if user else ""
    if host.startswith("/"):
        if scheme != "postgresql":
            raise _cannot_carry_over(alias, "HOST is a socket")
        options, host, port = {"host": host, **options}, "", ""
    host = f"[{host}]" if ":" in host else host
    place = f"{host}:{port}" if port else host
    query = "&".join(f"{key}={quote(value, safe='')}" for key, value in options.items())
    return f"{scheme}://{login}{place}/{quote(name, safe='')}{'?' if query else ''}{query}"


def _options_of_postgres(database: Mapping[str, Any]) -> dict[str, str]:
    """Return those ``OPTIONS`` that say how to connect. Django or psycopg uses the others after that."""
    from psycopg.pq import Conninfo

    parameters = {each.keyword.decode() for each in Conninfo.get_defaults()}
    options: dict[str, object] = database.get("OPTIONS") or {}
    return {name: str(value) for name, value in options.items() if name in parameters}


def _options_of_mysql(alias: str, database: Mapping[str, Any]) -> dict[str, str]:
    """Return the ``OPTIONS`` about TLS; Postdate always checks the server's certificate."""
    options: Mapping[str, Any] = database.get("OPTIONS") or {}
    for name in _ELSEWHERE_IN_MYSQL:
        if options.get(name):
            raise _cannot_carry_over(alias, f"OPTIONS has {name!r}")
    mode, files = str(options.get("ssl_mode", "")).upper(), options.get("ssl")
    if files is None and mode in {"", "DISABLED", "PREFERRED"}:
        return {}
    names = dict(cast("Mapping[str, object]", files)) if isinstance(files, Mapping) else {}
    tls = {f"ssl_{name}": str(names.pop(name)) for name in ("ca", "cert", "key") if names.get(name)}
    if names:
        raise _cannot_carry_over(alias, f"OPTIONS['ssl'] has {', '.join(map(repr, names))}")
    return {"ssl": "true", **tls}


def _cannot_carry_over(alias: str, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"the database {alias!r} is not named by an address: {what}; write an address for postdate.connect, such as "
        f"mariadb://user:password@host:3306/database?ssl_ca=/path"
    )
