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
    name = str(database["NAME"])
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
    user, password = (quote(str(database.get(key) or ""), safe="") for key in ("USER", "PASSWORD"))
    host, port = (str(database.get(key) or "") for key in ("HOST", "PORT"))
    login = f"{user}:{password}@" if password else f"{user}@" if user else ""
    is_socket = host.startswith("/")
    place = "" if is_socket else f"{host}:{port}" if port else host
    options = f"?host={quote(host, safe='')}" if is_socket else ""
    return f"{scheme}://{login}{place}/{quote(name, safe='')}{options}"
