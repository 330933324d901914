"""Why a server cannot be used, according to the text of its error, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from postdate.backends.registry import place_of
from postdate.config import Address, Settings
from postdate.errors import ConfigurationError, PostdateError, QueueNotFound, StoreError, StoreNotSetUp, TransportError
from postdate.ports.backends import Place


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause: a pattern for the error texts of drivers and servers, in any case, and the advice.

    A name in a pattern has at most 300 characters, so that a search scans a long text only once. ``is_setting``: a
    setting is wrong, and waiting does not help.
    """

    pattern: str
    advice: str
    is_setting: bool = False


CAUSES: Final = (
    Cause(
        r"connection refused|connect call failed|no such file or directory\s+is the server running|errno 111",
        "is the server running there? start it, or correct host and port",
    ),
    Cause(
        r"name or service not known|failed to resolve|getaddrinfo|nodename nor servname|temporary failure in name|"
        r"name has no usable address|no address associated",
        "is the name of the host right? it is not known here",
    ),
    Cause(
        r"did not answer|timed? ?out|timeouterror|no route to host|unreachable",
        "can the server be reached from here? look at host, port and firewall",
    ),
    Cause("a pooler such as", "correct host and port", is_setting=True),
    Cause(r'role ".{0,300}" does not exist', "name a user that the server has, as in user@host", is_setting=True),
    Cause(r'database ".{0,300}" does not exist', "create the database, or correct its name", is_setting=True),
    Cause(r"cannot open database", "create the database, or correct its name", is_setting=True),
    Cause(r"db index is out of range", "correct the number of the database at the end of the address", is_setting=True),
    Cause(r"vhost .{0,300} not found", "create the virtual host, or correct its name", is_setting=True),
    Cause(
        r"password authentication failed|no password supplied|access denied for user .{0,300}password|login failed|"
        r"access_refused|authentication failed|no pg_hba\.conf entry",
        "the server runs and refuses this login: check user and password",
    ),
    Cause(r"^redis .* refuses this client: ", "the server runs and refuses this login, or its command"),
    Cause(
        r"permission denied|command denied|access denied|access to vhost|permission was denied",
        "the server runs and the login is right; rights are missing: an administrator grants them, see "
        "`postdate setup --print-sql` for tables",
    ),
)


def cause_of(text: str) -> Cause | None:
    """Return the cause that an error text matches; ``None``: the cause is unknown."""
    return next((each for each in CAUSES if re.search(each.pattern, text, re.IGNORECASE)), None)


def advice_for(error: PostdateError, otherwise: str) -> str:
    cause = cause_of(str(error))
    return otherwise if cause is None else cause.advice


@contextmanager
def name_setting_in_errors(key: str, address: Address, settings: Settings) -> Generator[None]:
    """Add the key and origin of a setting to errors about its value."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(f"{key} is {address!r} ({settings.origin(key)}): {error}") from error


_PLACES: Final = ("store.address", "transport.address", "timeout_manager.address", "sagas.address", "outbox.address")


@contextmanager
def locate_errors(settings: Settings, key: str | None = None) -> Generator[None]:
    """Apply :func:`locate_error` to errors that the block raises.

    ``key``: the key of the address that is used; ``None``: the key of the store (or the timeouts), or of the queues,
    depending on the type of the error.
    """
    try:
        yield
    except PostdateError as error:
        located_error = locate_error(error, settings, key)
        if located_error is error:
            raise
        raise located_error from error


def locate_error(error: PostdateError, settings: Settings, key: str | None = None) -> PostdateError:
    """Return a server's error with the setting of its address and the next step. Return any other error unchanged."""
    store = "store.address" if settings.delayed_delivery.enabled else "timeout_manager.address"
    key, text = _key_of_error(error, key or store), str(error)
    cause = cause_of(text)
    if key is None or cause is None or any(f"({each}, " in text for each in _PLACES):
        return error
    section, _, name = key.partition(".")
    address: Address | None = getattr(getattr(settings, section), name)
    if address is None or "://" not in address or place_of(address.scheme) is Place.FILE:
        return error
    user_hint = "" if "@" in address else "; the address names no user"
    text = f"{text} ({key}, {settings.origin(key)}): {cause.advice}{user_hint}"
    if cause.is_setting:
        return ConfigurationError(text)
    error.args = (text,)
    return error


def _key_of_error(error: PostdateError, store: str) -> str | None:
    match error:
        case StoreNotSetUp() | QueueNotFound():
            return None
        case StoreError():
            return store
        case TransportError():
            return "transport.address"
        case _:
            return None
