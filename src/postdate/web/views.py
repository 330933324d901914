"""The pages: what is asked of a deployment, and the words around it. Times are UTC, as everywhere."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import quote, urlencode

import anyio
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse

from postdate import operations
from postdate.config import parse_instant, without_secrets
from postdate.core.changing import Pending
from postdate.core.limits import limits_of
from postdate.errors import (
    ConfigurationError,
    MessageError,
    MessageNotFound,
    NotSupported,
    PostdateError,
    QueueNotFound,
)
from postdate.operations import Interval, MessageState, Overview
from postdate.operations.looking import Look
from postdate.operations.plain import clean, shown_count, shown_span, shown_time
from postdate.ports.limits import LimitingStore
from postdate.web import charts
from postdate.web.watching import LISTED, Watcher
from postdate.wiring import advice_for

SECURITY_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # with none at all, forms would be sent with the origin "null"
    "Cache-Control": "no-store",
}

_ASKED_AT_ONCE: Final = 1
"""Questions that requests themselves ask the store; others wait for their turn, so that deliveries need not."""

_SEARCHED_THROUGH: Final = 50_000
"""With more messages than that, only when asked for: what does not wait is looked for in queues, and as a retry; what
waits for one queue is looked for among all that wait, not among so many."""

_STILL_HERE_SECONDS: Final = 15.0
_SPANS: Final = {"hour": "next hour", "day": "next day", "month": "next 30 days"}
_WITHOUT_OFFSET: Final = re.compile(r"\d{4}-\d\d-\d\d([T ][\d:.]+)?", re.ASCII)
_MOODS: Final = {
    **dict.fromkeys(("waiting", "being_delivered", "delivered", "handled"), "good"),
    **dict.fromkeys(("overdue", "retrying", "held", "handling_retried"), "worry"),
    **dict.fromkeys(("in_error_queue", "failed", "set_aside", "expired", "discarded"), "bad"),
}

log = logging.getLogger("postdate.dashboard")


class Views:
    """The handlers. Each answers from what the watcher has seen, or asks one question that costs little.

    ``name``: of the deployment, where others are beside it; ``None``: of the page above them all.
    """

    def __init__(self, watcher: Watcher, name: str | None = "") -> None:
        self._watcher, self._name, self._asking = watcher, name, anyio.CapacityLimiter(_ASKED_AT_ONCE)
        self._error_queue = watcher.settings.endpoint.error_queue
        loader = PackageLoader("postdate.web")
        self._templates = Environment(
            loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, finalize=_visible
        )
        self._templates.filters |= {"time": _time, "count": "{:,}".format, "span": shown_span, "id": _quoted}
        self._templates.filters["code"] = _code

    def _page(self, request: Request, name: str, status: int = HTTPStatus.OK, **values: Any) -> HTMLResponse:
        base: str = request.scope.get("root_path", "")
        here = f"/{request.url.path.removeprefix(base).strip('/').partition('/')[0]}"

        def message_page(id_: str, page: str = "messages") -> str:
            dots = id_ in {".", ".."}  # which browsers take out of a path
            return f"{base}/{page}/{'?id=' if dots else ''}{_quoted(id_)}"

        def age(look: Look[Any]) -> str:
            seconds = self._watcher.clock.monotonic() - look.ended
            return "just now" if seconds < 1 else f"{shown_span(timedelta(seconds=seconds))} ago"

        values = {"who": None, "signs_in": False, "method": request.method, **values}
        values |= {"here": here, "base": base, "status": status, "store": self._watcher.settings.store.address.shown}
        values |= {"name": self._name, "message_page": message_page, "age": age, "charts": charts, "query": _query}
        return HTMLResponse(self._templates.get_template(f"{name}.html").render(values), status)

    # --- at a glance ----------------------------------------------------------------------------------------------

    async def overview(self, request: Request) -> Response:
        await self._watcher.deployment()
        look = await self._watcher.overview.last()
        state, asked, base = look.found, request.query_params.get("due"), request.scope.get("root_path", "")
        spans = {"hour": state.hour, "day": state.day, "month": state.month}
        span = asked if asked in spans else "hour"
        usual, step = _usual(spans[span]), spans[span][-1].end - spans[span][-1].begin

        def address(each: Interval) -> str:
            return f"{base}/messages?" + _query({"due_from": shown_time(each.begin), "due_to": shown_time(each.end)})

        def times_usual(herd: Interval) -> int:
            return round(herd.count / max(usual, 1) * min(step / (herd.end - herd.begin), 1.0))

        values: dict[str, Any] = {
            "headline": headline_of(state),
            "tiles": self._tiles(state),
            "spans": _SPANS,
            "usual": usual,
        }
        values |= {"intervals": spans[span], "address": address, "times_usual": times_usual}
        return self._page(request, "overview", look=look, state=state, span=span, **values)

    def _tiles(self, state: Overview) -> list[tuple[str, str, str, str, str]]:
        """Return names, values, what they mean, moods, and pages with more, where there are."""
        counted, errors, services = state.statistics, state.errors, state.statistics.services
        first, since = counted.next_due, state.overdue_since
        work = f"{counted.claimed:,} being sent" if counted.claimed else "none failing"
        work = f"{counted.failing:,} failing" if counted.failing else work
        oldest = "held by limits" if counted.overdue else "all on time"
        oldest = oldest if since is None else f"the oldest for {shown_span(counted.at - since)}"
        following = "-" if first is None else "now" if first < counted.at else f"in {shown_span(first - counted.at)}"
        then = "nothing waits" if first is None else f"{first:%d %b %H:%M:%S}"
        # The process of the page is not counted: in an application of its own it may deliver, too.
        idle = ("bad" if since else "worry") if services == 0 and counted.pending else ""
        to_start = "besides this process; to start: postdate run"
        deliver = "not visible here" if services is None else "deliver" if services else to_start
        failed = "cannot be counted" if errors is None else "in the error queue"
        aside = "cannot be read" if counted.set_aside else "all can be read"
        return [
            ("Waiting", f"{counted.pending:,}", work, "", ""),
            ("Overdue", f"{counted.overdue:,}", oldest, "worry" if since else "", ""),
            ("Next due", following, then, "", ""),
            ("Delivered", *self._delivered(), "", ""),
            ("Lateness", *_late(state), "", ""),
            ("Failed", "-" if errors is None else f"{errors:,}", failed, "worry" if errors else "", "/errors"),
            ("Set aside", f"{counted.set_aside:,}", aside, "worry" if counted.set_aside else "", "/errors"),
            ("Services", "-" if services is None else f"{services:,}", deliver, idle, ""),
        ]

    def _delivered(self) -> tuple[str, str]:
        """Return how many in all, and how many a second between the last two looks."""
        last, before = self._watcher.records.known()
        if last is None:
            return "…", "being counted"
        if isinstance(last.result, Exception):  # as of a store with more than it counts in time: the rest is shown
            return "-", "could not be counted"
        count = last.found.get("delivered", 0)
        if before is None or isinstance(before.result, Exception):
            return f"{count:,}", "in all, by the records"
        rate = (count - before.found.get("delivered", 0)) / max(last.ended - before.ended, 1e-9)
        return f"{count:,}", f"{max(rate, 0.0):,.1f} a second lately"

    async def queues(self, request: Request) -> Response:
        store = (await self._watcher.deployment()).store
        look = await self._watcher.overview.last()
        async with self._asking:
            limits = await limits_of(store) if isinstance(store, LimitingStore) else None
        return self._page(request, "queues", look=look, queues=look.found.statistics.queues, limits=limits)

    async def doctor(self, request: Request) -> Response:
        await self._watcher.deployment()
        look = await self._watcher.diagnosis.last()
        return self._page(request, "doctor", look=look, found=look.found)

    async def events(self, request: Request) -> Response:
        """Say by server-sent events when there is a newer overview."""
        await self._watcher.deployment()
        look = await self._watcher.overview.last()
        _ = look.found  # an error is an answer of its own
        return StreamingResponse(self._news(look), media_type="text/event-stream")

    async def _news(self, seen: Look[Overview]) -> AsyncGenerator[str]:
        yield f"id: {seen.number}\n\n"
        while True:
            newer = await self._watcher.overview.newer(seen.number, _STILL_HERE_SECONDS)
            seen = newer or seen
            yield ": still here\n\n" if newer is None else f"id: {newer.number}\nevent: newer\ndata: {newer.number}\n\n"

    # --- messages -------------------------------------------------------------------------------------------------

    async def messages(self, request: Request) -> Response:
        given, look = request.query_params, None
        asked = {name: given.get(name, "").strip() for name in ("queue", "due_from", "due_to")}
        where = Pending(asked["queue"] or None, _instant(asked["due_from"]), _instant(asked["due_to"]))
        deployment, after = await self._watcher.deployment(), given.get("after") or None
        among = None if (search := given.get("search")) == "all" else _SEARCHED_THROUGH
        if after or where.says_something:
            async with self._asking:
                now = await operations.present(deployment)
                found = await operations.list_messages(deployment, where, LISTED, now, after, among)
        else:
            look = await self._watcher.first_messages.last()
            found, now = look.found, look.at
        beyond = 0
        if where.destination and among is not None and not found.more:
            beyond = (await self._watcher.overview.last()).found.statistics.pending - among
        values: dict[str, Any] = {
            "further": _query({**asked, "search": search, "after": found.cursor}),
            "everywhere": _query({**asked, "search": "all", "after": after}) if beyond > 0 else "",
            "among": among,
        }
        return self._page(request, "messages", found=found, where=where, now=now, look=look, **values)

    async def message(self, request: Request) -> Response:
        """Show what is known of one message, failed or not; its id is the end of the path, or the query has it."""
        id_, body = self._asked_for(request)
        deployment = await self._watcher.deployment()
        counted = (await self._watcher.overview.last()).found.statistics
        asked = request.query_params.get("search") == "all"
        queued = asked or sum((counted.queues or {}).values()) <= _SEARCHED_THROUGH
        everywhere = queued and (asked or counted.pending <= _SEARCHED_THROUGH)
        async with self._asking:
            now = await operations.present(deployment)
            try:
                details = await operations.show_message(deployment, id_, queued=queued)
            except MessageNotFound:
                details = operations.MessageDetails(id_, (), ())
            is_told = everywhere or bool(details.places)
            explanation = await operations.explain(deployment, id_, now) if is_told else None
        state = MessageState.UNKNOWN if explanation is None else explanation.state
        is_known = bool(details.places or details.history) or state is not MessageState.UNKNOWN
        values: dict[str, Any] = {
            "explanation": explanation,
            "mood": _MOODS.get(state.value, ""),
            "body": body,
            "now": now,
        }
        status = HTTPStatus.OK if is_known else HTTPStatus.NOT_FOUND
        return self._page(request, "message", status, id_=id_, details=details, **values)

    # --- sagas ----------------------------------------------------------------------------------------------------

    async def sagas(self, request: Request) -> Response:
        """List instances from a type and id on."""
        given, further, deployment = request.query_params, "", await self._watcher.deployment()
        async with self._asking:
            now, after = await operations.present(deployment), (given.get("type", ""), given.get("after", ""))
            found = await operations.list_sagas(deployment, after, LISTED + 1)
        if found and found[LISTED:]:
            last = found[LISTED - 1].record
            found, further = found[:LISTED], _query({"type": last.saga_type, "after": last.saga_id})
        return self._page(request, "sagas", found=found, one=None, further=further, now=now)

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
        given, deployment = request.query_params, await self._watcher.deployment()
        where = operations.ErrorFilter(given.get("queue"), given.get("exception"), exact=True)
        look = await self._watcher.errors.last()
        groups = look.found
        async with self._asking:
            found = await operations.list_errors(deployment, self._error_queue, LISTED)
        some = where.failed_queue is not None or where.exception is not None
        if some:  # without reading the whole queue again
            those = [each for each in groups.groups if where.is_of(each.exception_type, each.failed_queue)]
            lines = [line for each in those for line in each.first][:LISTED]
            found = replace(found, total=sum(each.count for each in those), messages=lines)
        return self._page(request, "errors", look=look, groups=groups, found=found, where=where, some=some)

    def _asked_for(self, request: Request) -> tuple[str, bool]:
        """Return the id of a message, and whether its body is asked for, which is logged: it may be personal."""
        id_: str = request.path_params["id"] or request.query_params.get("id", "")
        if not id_.strip():
            raise HTTPException(HTTPStatus.NOT_FOUND, "Name the id of a message.")
        body = request.query_params.get("body") == "shown"
        if body:
            self._looked(request, "body of message", id_)
        return id_, body

    def _looked(self, request: Request, at: str, *names: str) -> None:
        user, address = self._asks(request)
        log.warning("the %s %s is shown to %s, user %r", at, " ".join(map(repr, names)), address, user)

    def _asks(self, request: Request) -> tuple[str | None, str | None]:
        """Return the name of who asks, as far as it is known, and his address."""
        return request.headers.get("X-Forwarded-User"), request.client and request.client.host

    # --- what cannot be shown -------------------------------------------------------------------------------------

    def failed(self, request: Request, error: Exception) -> Response:
        """Say what is wrong, where, and how to mend it. For errors of Postdate."""
        assert isinstance(error, PostdateError)
        status, mend = HTTPStatus.SERVICE_UNAVAILABLE, advice_for(error, "see what `postdate doctor` says")
        match error:
            case MessageNotFound() | QueueNotFound():
                status, mend = HTTPStatus.NOT_FOUND, ""
            case MessageError():
                status, mend = HTTPStatus.BAD_REQUEST, "correct what was asked for"
            case NotSupported() | ConfigurationError():
                status, mend = HTTPStatus.NOT_IMPLEMENTED, ""
            case _:
                pass
        said = without_secrets(str(error))
        return self._page(request, "problem", status, said=said, code=error.code, mend=mend)

    def refused(self, request: Request, error: Exception) -> Response:
        """Say that there is no such page, or that nothing can be changed here."""
        assert isinstance(error, HTTPException)
        status = HTTPStatus(error.status_code)
        said = error.detail if error.detail != status.phrase else status.description
        return self._page(request, "problem", status, said=said, code="", mend="")

    def broken(self, request: Request, _: Exception) -> Response:
        """Say that a fault of Postdate was met; the server logs it."""
        status, said = HTTPStatus.INTERNAL_SERVER_ERROR, "This is a fault in Postdate; its log has the details."
        page = self._page(request, "problem", status, said=said, code="internal_error", mend="")
        page.headers.update(SECURITY_HEADERS)  # outside of all that adds them otherwise
        return page


def headline_of(state: Overview) -> str:
    counted = state.statistics
    if not counted.pending:
        return "Nothing waits"
    if counted.overdue and state.overdue_since is None:
        return f"{shown_count(counted.overdue, 'message')} of {counted.pending:,} held by limits, all others on time"
    if counted.overdue:
        many = "is" if counted.overdue == 1 else "are"
        return f"{shown_count(counted.overdue, 'message')} of {counted.pending:,} {many} overdue"
    return f"{shown_count(counted.pending, 'message')} wait{'s' if counted.pending == 1 else ''}, all on time"


def _late(state: Overview) -> tuple[str, str]:
    """Return the median of how late the latest deliveries were, and what nearly all of them were."""
    late = state.lateness
    if late is None or late.since is None:
        return "-", "none of late" if late and late.last is None else "not visible here"
    return shown_span(late.median), f"99 of 100 up to {shown_span(late.most)}, since {late.since:%d %b %H:%M}"


def _usual(intervals: Sequence[Interval]) -> int:
    """Return the middle of the counts that are not 0, for comparison with herds."""
    counts = sorted(each.count for each in intervals if each.count)
    return counts[len(counts) // 2] if counts else 0


def _time(instant: datetime | None) -> Markup | str:
    """Return a time to the second, whose exact value a pointer shows."""
    if instant is None:
        return "-"
    return Markup('<time datetime="{0}" title="{0}">{1:%Y-%m-%d %H:%M:%S}</time>').format(shown_time(instant), instant)


def _instant(text: str) -> datetime | None:
    """Return the time of a form's field, which has no offset."""
    return parse_instant(f"{text}Z" if _WITHOUT_OFFSET.fullmatch(text) else text) if text else None


def _code(text: str) -> Markup:
    """Return a text whose commands, which it has in backticks, are code."""
    parts = enumerate(clean(text).split("`"))
    return Markup("").join(Markup("<code>{}</code>").format(part) if place % 2 else part for place, part in parts)


def _visible(value: object) -> object:
    return clean(value) if type(value) is str else value


def _quoted(text: str) -> str:
    return quote(text, safe="")


def _query(values: Mapping[str, str | None]) -> str:
    """Return the query of an address; what is empty says nothing."""
    return urlencode({name: value for name, value in values.items() if value})
