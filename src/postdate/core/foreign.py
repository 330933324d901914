"""Errors that adapters let out although their port does not know them: one place makes them errors of ours.

An adapter of a user may raise anything. To the core that is an outage: logged, counted by the breaker, tried again; it
must not end the service.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager

from postdate.core.recoverability import text_of
from postdate.errors import PostdateError, StoreUnavailable, TransportUnavailable

log = logging.getLogger("postdate.adapters")


@contextmanager
def calling_store(store: object) -> Generator[None]:
    """Turn whatever a store raises that is no error of ours into :class:`StoreUnavailable`."""
    try:
        yield
    except PostdateError:
        raise
    except Exception as error:
        raise StoreUnavailable(_text(store, error)) from error


@contextmanager
def calling_transport(transport: object) -> Generator[None]:
    """Turn whatever a transport or receiver raises that is no error of ours into :class:`TransportUnavailable`."""
    try:
        yield
    except PostdateError:
        raise
    except Exception as error:
        raise TransportUnavailable(_text(transport, error)) from error


def _text(adapter: object, error: Exception) -> str:
    text = f"{type(adapter).__name__} failed with {type(error).__name__}: {text_of(error)}"
    log.error(text, exc_info=error)  # once, with its traceback: from here on it is an outage like any other
    return text
