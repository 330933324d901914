"""Limits at which a queue drops messages, from arguments and policies; AMQP tells neither. Source: ADR 0028."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, Final
from urllib.parse import quote

import msgspec

from postdate.backends.rabbitmq.login import Login
from postdate.errors import TransportError, TransportUnreachable

DELIVERY_LIMIT: Final = "delivery-limit"
TIME_TO_LIVE: Final = "message-ttl"
_OTHERS: Final = ("max-length", "max-length-bytes", TIME_TO_LIVE, "expires")
_ANSWERS_WITHIN_SECONDS: Final = 2.0


def read_limits(login: Login, version: str, queues: Sequence[str]) -> dict[str, dict[str, int] | None]:
    """Ask the management interface; blocks."""
    port, place = login.management_port, f"the management interface at {login.host}:{login.management_port}"
    if not port:
        raise TransportError(f"{login.place} needs rabbitmq_management to tell: add ?management=15672 to the address")
    kind = HTTPConnection if login.tls is None else partial(HTTPSConnection, context=login.tls)
    secret = base64.b64encode(f"{login.user}:{login.password}".encode()).decode()
    found: dict[str, dict[str, int] | None] = {}
    with closing(kind(login.host, port, timeout=_ANSWERS_WITHIN_SECONDS)) as connection:
        for name in queues:
            path = f"/api/queues/{quote(login.virtual_host, safe='')}/{quote(name, safe='')}"
            try:
                connection.request("GET", path, headers={"Authorization": f"Basic {secret}"})
                answer = connection.getresponse()
                content = answer.read()
                if answer.status == HTTPStatus.OK:
                    found[name] = _limits_in(msgspec.json.decode(content, type=dict[str, Any]), version)
                elif answer.status != HTTPStatus.NOT_FOUND or answer.headers.get_content_type() != "application/json":
                    raise _refusal(answer, place, login.user)
            except (OSError, HTTPException, ValueError, TypeError) as error:
                raise TransportUnreachable(f"{place} does not tell them: {error}") from error
    return found


def _refusal(answer: HTTPResponse, place: str, user: str) -> TransportError:
    text = f"{place} answers {answer.status} {answer.reason}"
    if answer.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        return TransportError(f"{text}: user {user!r} needs the tag 'management'")
    if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:  # as while it starts
        return TransportUnreachable(f"{text}: ask again in a while; the log of the broker says more")
    return TransportError(f"{text}: it is none; add ?management=PORT to the address, the port of rabbitmq_management")


def delivery_limit(said: Sequence[int], version: str) -> int | None:
    """Return how often a message may return to a quorum queue; ``said``: limits of its argument and policies."""
    digits = re.match(r"\d+", version)
    if digits is None or int(digits[0]) < 4:  # no limit by default, and one below 0 is 0
        return max(0, min(said)) if said else None
    limit = max(said) if said and min(said) < 0 else min(said, default=20)
    return limit if limit >= 0 else None


def _limits_in(queue: Mapping[str, Any], version: str) -> dict[str, int] | None:
    if "effective_policy_definition" not in queue:  # unknown for a queue's first seconds
        return None
    arguments: Mapping[str, Any] = queue.get("arguments") or {}
    policy: Mapping[str, Any] = queue["effective_policy_definition"] or {}

    def said(name: str) -> list[Any]:
        return [place[key] for place, key in ((arguments, f"x-{name}"), (policy, name)) if key in place]

    limits = {name: int(min(said(name))) for name in _OTHERS if said(name)}
    if any(str(each).startswith("reject-publish") for each in said("overflow")):  # which senders notice
        limits = {name: limit for name, limit in limits.items() if not name.startswith("max")}
    limit = delivery_limit(said(DELIVERY_LIMIT), version) if queue.get("type") == "quorum" else None
    return limits if limit is None else {DELIVERY_LIMIT: limit, **limits}
