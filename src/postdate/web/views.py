"""The handlers of the pages: they ask a deployment, and write the words around the answers. All times are UTC."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from http import HTTPStatus
from statistics import median_high
from typing import Any, Final
from urllib.parse import quote, urlencode

import anyio
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from typing_extensions import override

from postdate import operations
from postdate.clock import steady_seconds
from postdate.config import parse_instant, without_secrets
from postdate.core.changes import EVERYTHING, Pending
from postdate.core.limits import limits_of
from postdate.errors import (
    ConfigurationError,
    MessageError,
    MessageNotFound,
    NotSupported,
    PostdateError,
    QueueNotFound,
)
from postdate.messages import Origin
from postdate.operations import Interval, MessageState, Overview
from postdate.operations.looking import Look
from postdate.operations.plain import clean, shown_count, shown_span, shown_time
from postdate.ports.limits import LimitingStore
from postdate.runtime.resource import outages
from postdate.web import charts
from postdate.web.watching import LISTED, Watcher, log
from postdate.wiring import advice_for

SECURITY_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # Without any referrer, browsers would send forms with the origin "null".
    "Cache-Control": "no-store",
}

_SEARCHED_THROUGH: Final = 50_000
"""Number of pending messages up to which a page searches everything without being asked.

Above it, only on request: an id that is not pending is searched in queues and as a retry, and messages for one queue
are searched among all pending messages.
"""

_STILL_HERE_SECONDS: Final = 15.0
_SPANS: Final = {"hour": "next hour", "day": "next day", "month": "next 30 days"}
_quoted: Final = partial(quote, safe="")
_WITHOUT_OFFSET: Final = re.compile(r"\d{4}-\d\d-\d\d([T ][\d:.]+)?", re.ASCII)
_NAME: Final = re.compile(r"(?!(static|events)$)[A-Za-z0-9][A-Za-z0-9_.-]*")
_WAITED_SECONDS: Final = 1.0
"""Seconds that a row waits for a first look. A deployment that does not answer must not delay the other rows."""

_EVERY: Final = timedelta(seconds=3)
"""The page of several deployments is refreshed at this interval without asking whether there is news.

Some deployment always has news, and a request opens a deployment that did not answer before.
"""

_ORIGINS: Final[Mapping[str, Collection[Origin]]] = {
    "any": EVERYTHING.origins,
    **{each.value: frozenset({each}) for each in Origin},
}
"""The origins of listed messages, by the value of the page's filter."""

_MOODS: Final = {
    **dict.fromkeys(("waiting", "being_delivered", "delivered", "handled"), "good"),
    **dict.fromkeys(("overdue", "retrying", "held", "handling_retried"), "worry"),
    **dict.fromkeys(("in_error_queue", "failed", "unreadable", "expired", "discarded"), "bad"),
}


class Views:
    """The handlers of the pages. Each answers from the watcher's last look, or asks one cheap question.

    ``name``: the name of the deployment if there are several, else empty; ``None``: the page above them all.
    """

    def __init__(self, watcher: Watcher, name: str | None = "") -> None:
        self._watcher, self._name = watcher, name
        # Requests ask the store one question at a time, so that deliveries need not wait for them.
        self._asking = anyio.Lock()
        self._error_queue = watcher.settings.endpoint.error_queue
        self._templates = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, finalize=_visible)
        self._templates.loader = PackageLoader("postdate.web")
        self._templates.filters |= {"count": _count, "span": shown_span, "id": _quoted, "code": _code}

    def _page(self, request: Request, name: str, status: int = HTTPStatus.OK, **values: Any) -> HTMLResponse:
        base: str = request.scope.get("root_path", "")
        here = f"/{request.url.path.removeprefix(base).strip('/').partition('/')[0]}"

        def message_page(id_: str, page: str = "messages") -> str:
            # Line ends match no path, and browsers remove dots from paths.
            fits = id_.isprintable() and id_ not in {".", ".."}
            return f"{base}/{page}/{'' if fits else '?id='}{_quoted(id_)}"

        def age(look: Look[Any]) -> str:
            seconds = self._watcher.clock.monotonic() - look.ended
            return "just now" if seconds < 1 else f"{shown_span(timedelta(seconds=seconds))} ago"

        values = {"who": None, "signs_in": False, "method": request.method, "shown_count": shown_count, **values}
        values |= {"here": here, "base": base, "status": status, "store": self._watcher.settings.store.address.shown}
        values |= {"name": self._name, "message_page": message_page, "age": age, "charts": charts}
        values |= {"outages": outages(steady_seconds())}
        return HTMLResponse(self._templates.get_template(f"{name}.html").render(values), status)

    # --- at a glance ----------------------------------------------------------------------------------------------

    async def overview(self, request: Request) -> Response:
        await self._watcher.deployment()
        look = await self._watcher.overview.last()
        state, asked, base = look.value, request.query_params.get("due"), request.scope.get("root_path", "")
        span = asked if asked in _SPANS else "hour"
        intervals: Sequence[Interval] = getattr(state, span)
        usual = median_high([each.count for each in intervals if each.count] or [0])
        step = intervals[-1].end - intervals[-1].begin

        def address(each: Interval) -> str:
            due = {"due_from": shown_time(each.begin), "due_to": shown_time(each.end)}
            return f"{base}/messages?" + _query({**due, "origin": "any"})

        def times_usual(herd: Interval) -> int:
            return round(herd.count / max(usual, 1) * min(step / (herd.end - herd.begin), 1.0))

        values: dict[str, Any] = {"look": look, "state": state, "headline": headline_of(state), "usual": usual}
        values |= {"span": span, "spans": _SPANS, "intervals": intervals, "delivered": self._delivered()}
        return self._page(request, "overview", address=address, times_usual=times_usual, **values)

    def _delivered(self) -> tuple[str, str]:
        """Return the number of deliveries in all, and the number a second between the last two looks."""
        last, before = self._watcher.records.watched()
        if last is None:
            return "…", "being counted"
        # A store that takes too long to count its records fails here. The rest of the page is still shown.
        if isinstance(last.result, Exception):
            return "-", "could not be counted"
        count = last.value.get("delivered", 0)
        if before is None or isinstance(before.result, Exception):
            return f"{count:,}", "in all, by the records"
        rate = (count - before.value.get("delivered", 0)) / max(last.ended - before.ended, 1e-9)
        return f"{count:,}", f"{max(rate, 0.0):,.1f} a second lately"

    async def queues(self, request: Request) -> Response:
        store = (await self._watcher.deployment()).store
        look = await self._watcher.overview.last()
        async with self._asking:
            limits = await limits_of(store) if isinstance(store, LimitingStore) else None
        return self._page(request, "queues", look=look, queues=look.value.statistics.queues, limits=limits)

    async def doctor(self, request: Request) -> Response:
        await self._watcher.deployment()
        look = await self._watcher.diagnosis.last()
        return self._page(request, "doctor", look=look, found=look.value)

    async def events(self, request: Request) -> Response:
        """Report by server-sent events when there is a newer overview."""
        await self._watcher.deployment()
        look = await self._watcher.overview.last()
        _ = look.value  # This raises the error of the look, which then is the answer.
        return StreamingResponse(self._news(look), media_type="text/event-stream")

    async def _news(self, seen: Look[Overview]) -> AsyncGenerator[str]:
        yield f"id: {seen.number}\n\n"
        while True:
            newer = await self._watcher.overview.newer(seen.number, _STILL_HERE_SECONDS)
            seen = newer or seen
            yield ": still here\n\n" if newer is None else f"id: {newer.number}\nevent: newer\ndata: {newer.number}\n\n"

    # --- messages -------------------------------------------------------------------------------------------------

    async def messages(self, request: Request) -> Response:
        query, look = request.query_params, None
        asked = {name: query.get(name, "").strip().replace("\0", "") for name in ("queue", "due_from", "due_to")}
        where = Pending(asked["queue"] or None, _instant(asked["due_from"]), _instant(asked["due_to"]))
        origin = query.get("origin", "")
        if origin or not where.says_something:
            where = replace(where, origins=_ORIGINS.get(origin, EVERYTHING.origins))
        deployment, after = await self._watcher.deployment(), query.get("after") or None
        among = None if (search := query.get("search")) == "all" else _SEARCHED_THROUGH
        if after or where != EVERYTHING:
            async with self._asking:
                now = await operations.present(deployment)
                messages = await operations.list_messages(deployment, where, LISTED, now, after, among)
        else:
            look = await self._watcher.first_messages.last()
            messages, now = look.value, look.at
        beyond = 0
        if (where.destination or where.origins != EVERYTHING.origins) and among is not None and not messages.more:
            beyond = (await self._watcher.overview.last()).value.statistics.pending - among
        asked["origin"] = origin
        further = _query({**asked, "search": search, "after": messages.cursor})
        everywhere = _query({**asked, "search": "all", "after": after}) if beyond > 0 else ""
        values: dict[str, Any] = {"further": further, "everywhere": everywhere, "among": among, "look": look}
        values |= {"origins": _ORIGINS, "everything": EVERYTHING}
        return self._page(request, "messages", found=messages, where=where, now=now, **values)

    async def message(self, request: Request) -> Response:
        """Show what is known of one message, failed or not. The id is the end of the path, or in the query."""
        id_: str = request.path_params["id"] or request.query_params.get("id", "")
        if not id_.strip() or "\0" in id_:  # No store can keep such an id.
            raise HTTPException(HTTPStatus.NOT_FOUND, "Name the id of a message.")
        if body := request.query_params.get("body") == "shown":
            self._looked(request, "body of message", id_)
        deployment = await self._watcher.deployment()
        counted = (await self._watcher.overview.last()).value.statistics
        asked = request.query_params.get("search") == "all"
        queued = asked or sum((counted.queues or {}).values()) <= _SEARCHED_THROUGH
        everywhere = queued and (asked or counted.pending <= _SEARCHED_THROUGH)
        async with self._asking:
            now = await operations.present(deployment)
            try:
                details = await operations.show_message(deployment, id_, queued=queued)
            except MessageNotFound:
                details = operations.MessageDetails(id_, (), ())
            is_explained = everywhere or bool(details.places)
            explanation = await operations.explain(deployment, id_, now) if is_explained else None
        state = MessageState.UNKNOWN if explanation is None else explanation.state
        exists = bool(details.places or details.history) or state is not MessageState.UNKNOWN
        values: dict[str, Any] = {"explanation": explanation, "mood": _MOODS.get(state.value, ""), "body": body}
        status = HTTPStatus.OK if exists else HTTPStatus.NOT_FOUND
        return self._page(request, "message", status, id_=id_, details=details, now=now, **values)

    # --- sagas ----------------------------------------------------------------------------------------------------

    async def sagas(self, request: Request) -> Response:
        """List saga instances after a type and an id."""
        query, further, deployment = request.query_params, "", await self._watcher.deployment()
        async with self._asking:
            now, after = await operations.present(deployment), (query.get("type", ""), query.get("after", ""))
            instances = await operations.list_sagas(deployment, after, LISTED + 1)
        if instances and instances[LISTED:]:
            last = instances[LISTED - 1].record
            instances, further = instances[:LISTED], _query({"type": last.saga_type, "after": last.saga_id})
        return self._page(request, "sagas", found=instances, one=None, further=further, now=now)

    async def saga(self, request: Request) -> Response:
        kind, _, id_ = request.path_params["id"].rpartition("/")
        deployment, state = await self._watcher.deployment(), request.query_params.get("state") == "shown"
        async with self._asking:
            now, one = await operations.present(deployment), await operations.show_saga(deployment, kind, id_)
        if one is None:
            raise HTTPException(HTTPStatus.NOT_FOUND, f"There is no instance {id_} of {kind}; it may be completed.")
        if state:
            self._looked(request, "state of saga", kind, id_)
        return self._page(request, "sagas", found=[one], one=one, further="", now=now, state=state)

    # --- errors ---------------------------------------------------------------------------------------------------

    async def errors(self, request: Request) -> Response:
        query, deployment = request.query_params, await self._watcher.deployment()
        where = operations.ErrorFilter(query.get("queue"), query.get("exception"), exact=True)
        look = await self._watcher.errors.last()
        groups = look.value
        async with self._asking:
            errors = await operations.list_errors(deployment, self._error_queue, LISTED)
        some = where.failed_queue is not None or where.exception is not None
        if some:  # The groups have these messages already, so the whole queue is not read again.
            those = [each for each in groups.groups if where.is_of(each.exception_type, each.failed_queue)]
            lines = [line for each in those for line in each.first][:LISTED]
            errors = replace(errors, total=sum(each.count for each in those), messages=lines)
        return self._page(request, "errors", look=look, groups=groups, found=errors, where=where, some=some)

    def _looked(self, request: Request, at: str, *names: str) -> None:
        user, address = self._asks(request)
        log.warning("the %s %s is shown to %s, user %r", at, " ".join(map(repr, names)), address, user)

    def _asks(self, request: Request) -> tuple[str | None, str | None]:
        """Return the name of the user who asks, as far as it is known, and the address of the client."""
        return request.headers.get("X-Forwarded-User"), request.client and request.client.host

    # --- what cannot be shown -------------------------------------------------------------------------------------

    def failed(self, request: Request, error: Exception) -> Response:
        """Show what is wrong, where, and how to repair it.

        The server logs any error that is not of Postdate or HTTP.
        """
        text, mend, code = without_secrets(str(error)), "", "internal_error"
        match error:
            case HTTPException():
                status, code = HTTPStatus(error.status_code), ""
                text = error.detail if error.detail != status.phrase else status.description
            case MessageNotFound() | QueueNotFound():
                status, code = HTTPStatus.NOT_FOUND, error.code
            case MessageError():
                status, code, mend = HTTPStatus.BAD_REQUEST, error.code, "correct what was asked for"
            case NotSupported() | ConfigurationError():
                status, code = HTTPStatus.NOT_IMPLEMENTED, error.code
            case PostdateError():
                status, code = HTTPStatus.SERVICE_UNAVAILABLE, error.code
                mend = advice_for(error, "see what `postdate doctor` says")
            case _:
                status, text = HTTPStatus.INTERNAL_SERVER_ERROR, "This is a fault in Postdate; its log has the details."
        return self._page(request, "problem", status, said=text, code=code, mend=mend)


class Front(Views):
    """The page above those of several deployments. Each deployment has a row with a link to its pages."""

    def __init__(self, watchers: Mapping[str, Watcher]) -> None:
        for name in watchers:
            if not _NAME.fullmatch(name):
                can = "letters, digits, '.', '_' and '-', a letter or a digit first, but not 'static' or 'events'"
                raise ConfigurationError(f"{name!r} cannot name a deployment: give it {can}")
        if not watchers:
            raise ConfigurationError("there is no deployment to show: give one name and its settings at least")
        super().__init__(next(iter(watchers.values())), name=None)
        self._watchers = watchers

    @override
    async def overview(self, request: Request) -> Response:
        seen = await asyncio.gather(*map(_seen, self._watchers.values()))
        return self._page(request, "front", rows=zip(self._watchers, seen, strict=True))

    @override
    async def events(self, request: Request) -> Response:
        async def news() -> AsyncGenerator[str]:
            while True:
                yield "event: newer\ndata: any\n\n"
                await self._watcher.clock.sleep(_EVERY)

        return StreamingResponse(news(), media_type="text/event-stream")


async def _seen(watcher: Watcher) -> tuple[Look[Overview] | None, str]:
    """Return the last look and its headline. Without a look, the text is the reason."""
    try:
        with anyio.move_on_after(_WAITED_SECONDS):
            await watcher.deployment()
            look = await watcher.overview.last()
            return look, headline_of(look.value)
    except PostdateError as error:
        return None, without_secrets(str(error))
    except Exception:  # noqa: BLE001 - all others can be shown
        log.exception("a deployment cannot be shown")
    return None, "It has not answered yet, or not well: see the log."


def headline_of(state: Overview) -> str:
    counted = state.statistics
    late = f"{shown_count(counted.overdue, 'message')} of {counted.pending:,}"
    if not counted.pending:
        return "Nothing waits"
    if not counted.overdue:
        return f"{shown_count(counted.pending, 'message')} wait{'s' if counted.pending == 1 else ''}, all on time"
    if state.overdue_since is None:
        return f"{late} held by limits, all others on time"
    return f"{late} {'is' if counted.overdue == 1 else 'are'} overdue"


def _count(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"


def _instant(text: str) -> datetime | None:
    """Return the instant of a form's field. A text without an offset, as browsers send it, is in UTC."""
    return parse_instant(f"{text}Z" if _WITHOUT_OFFSET.fullmatch(text) else text) if text else None


def _code(text: str) -> Markup:
    """Return a text in which commands between backticks are marked as code."""
    parts = enumerate(clean(text).split("`"))
    return Markup("").join(Markup("<code>{}</code>").format(part) if place % 2 else part for place, part in parts)


def _visible(value: object) -> object:
    """Return a time to the second, with the exact value as a tooltip. Return a text with control characters escaped."""
    if isinstance(value, datetime):
        return Markup('<time datetime="{0}" title="{0}">{1:%Y-%m-%d %H:%M:%S}</time>').format(shown_time(value), value)
    return "-" if value is None else clean(value) if type(value) is str else value


def _query(values: Mapping[str, str | None]) -> str:
    """Return the query of an address. Empty values are left out."""
    return urlencode({name: value for name, value in values.items() if value})
