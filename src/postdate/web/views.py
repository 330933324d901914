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
from postdate.config import parse_instant, redact_secrets
from postdate.core.changes import EVERYTHING, Pending
from postdate.core.limits import load_limits_in_force
from postdate.errors import (
    ConfigurationError,
    MessageError,
    MessageNotFound,
    NotSupported,
    PostdateError,
    QueueNotFound,
)
from postdate.messages import Origin
from postdate.operations.looking import Observation
from postdate.operations.plain import escape_control_characters, format_count, format_lateness, format_span, format_time
from postdate.ports.limits import LimitingStore
from postdate.runtime.resource import outage_texts
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

_SEARCH_LIMIT: Final = 50_000
"""Number of pending messages up to which a page searches everything without being asked.

Above it, only on request: an id that is not pending is searched in queues and as a retry, and messages for one queue
are searched among all pending messages.
"""

_STILL_HERE_SECONDS: Final = 15.0
_SPANS: Final = {"hour": "next hour", "day": "next day", "month": "next 30 days"}
_quoted: Final = partial(quote, safe="")
_WITHOUT_OFFSET: Final = re.compile(r"\d{4}-\d\d-\d\d([T ][\d:.]+)?", re.ASCII)
_NAME: Final = re.compile(r"(?!(static|events)$)[A-Za-z0-9][A-Za-z0-9_.-]*")
_FIRST_LOOK_SECONDS: Final = 1.0
"""Seconds that a row waits for a first look. A deployment that does not answer must not delay the other rows."""

_LONGEST_RATE_SECONDS: Final = 600.0
"""Looks that are further apart give no rate. While a user watches, they are at most seven minutes apart."""

_FRONT_INTERVAL: Final = timedelta(seconds=3)
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
        self._query_lock = anyio.Lock()
        self._error_queue = watcher.settings.endpoint.error_queue
        self._templates = Environment(
            autoescape=True, undefined=StrictUndefined, trim_blocks=True, finalize=_format_value
        )
        self._templates.loader = PackageLoader("postdate.web")
        self._templates.filters |= {"count": _format_count, "span": format_span, "lateness": format_lateness}
        self._templates.filters |= {"id": _quoted, "code": _mark_code}

    def _render_page(self, request: Request, name: str, status: int = HTTPStatus.OK, **values: Any) -> HTMLResponse:
        base: str = request.scope.get("root_path", "")
        section_path = f"/{request.url.path.removeprefix(base).strip('/').partition('/')[0]}"

        def message_page(id_: str, page: str = "messages") -> str:
            # Line ends match no path, and browsers remove dots from paths.
            is_path_safe = id_.isprintable() and id_ not in {".", ".."}
            return f"{base}/{page}/{'' if is_path_safe else '?id='}{_quoted(id_)}"

        values = {"who": None, "signs_in": False, "method": request.method, "shown_count": format_count, **values}
        values |= {
            "here": section_path,
            "base": base,
            "status": status,
            "store": self._watcher.settings.store.address.redacted_text,
        }
        values |= {"name": self._name, "message_page": message_page, "age": self._format_age, "charts": charts}
        # The pages of one of several deployments say nothing of the others.
        resources = self._watcher.resources if self._name else None
        values |= {"outages": outage_texts(steady_seconds(), resources)}
        return HTMLResponse(self._templates.get_template(f"{name}.html").render(values), status)

    def _age_seconds(self, observation: Observation[Any]) -> float:
        return self._watcher.clock.monotonic() - observation.end_seconds

    def _format_age(self, observation: Observation[Any]) -> str:
        seconds = self._age_seconds(observation)
        return "just now" if seconds < 1 else f"{format_span(timedelta(seconds=seconds))} ago"

    # --- at a glance ----------------------------------------------------------------------------------------------

    async def overview(self, request: Request) -> Response:
        await self._watcher.get_deployment()
        observation = await self._watcher.overview.get_latest()
        state, requested_span, base = (
            observation.value,
            request.query_params.get("due"),
            request.scope.get("root_path", ""),
        )
        span = requested_span if requested_span in _SPANS else "hour"
        intervals: Sequence[operations.Interval] = getattr(state, span)
        usual = median_high([each.count for each in intervals if each.count] or [0])
        step = intervals[-1].end - intervals[-1].begin

        def address(each: operations.Interval) -> str:
            due = {"due_from": format_time(each.begin), "due_to": format_time(each.end)}
            return f"{base}/messages?" + _build_query({**due, "origin": "any"})

        def times_usual(herd: operations.Interval) -> int:
            return round(herd.count / max(usual, 1) * min(step / (herd.end - herd.begin), 1.0))

        values: dict[str, Any] = {"look": observation, "state": state, "headline": headline_of(state), "usual": usual}
        values |= {"span": span, "spans": _SPANS, "intervals": intervals, "delivered": self._delivery_texts()}
        return self._render_page(request, "overview", address=address, times_usual=times_usual, **values)

    def _delivery_texts(self) -> tuple[str, str]:
        """Return the number of deliveries in all, and the number a second between the last two looks, with their age.

        The records are counted more rarely than all else: the tile may be older than the page.
        """
        latest, previous = self._watcher.records.remember_request()
        if latest is None:
            return "…", "being counted"
        # A store that takes too long to count its records fails here. The rest of the page is still shown.
        if isinstance(latest.result, Exception):
            return "-", "could not be counted"
        count, age = latest.value.get("delivered", 0), self._format_age(latest)
        if previous is None or isinstance(previous.result, Exception):
            return f"{count:,}", f"in all, by the records, {age}"
        between_seconds = max(latest.end_seconds - previous.end_seconds, 1e-9)
        # Nobody watched for so long: an average over that time is no rate of late.
        if max(between_seconds, self._age_seconds(latest)) > _LONGEST_RATE_SECONDS:
            return f"{count:,}", f"in all, by the records, {age}"
        rate = (count - previous.value.get("delivered", 0)) / between_seconds
        return f"{count:,}", f"{max(rate, 0.0):,.1f} a second lately, {age}"

    async def queues(self, request: Request) -> Response:
        store = (await self._watcher.get_deployment()).store
        observation = await self._watcher.overview.get_latest()
        async with self._query_lock:
            limits = await load_limits_in_force(store) if isinstance(store, LimitingStore) else None
        return self._render_page(
            request, "queues", look=observation, queues=observation.value.statistics.queues, limits=limits
        )

    async def doctor(self, request: Request) -> Response:
        await self._watcher.get_deployment()
        observation = await self._watcher.diagnosis.get_latest()
        return self._render_page(request, "doctor", look=observation, found=observation.value)

    async def events(self, request: Request) -> Response:
        """Report by server-sent events when there is a newer overview."""
        await self._watcher.get_deployment()
        observation = await self._watcher.overview.get_latest()
        _ = observation.value  # This raises the error of the look, which then is the answer.
        return StreamingResponse(self._stream_news(observation), media_type="text/event-stream")

    async def _stream_news(self, last_sent: Observation[operations.Overview]) -> AsyncGenerator[str]:
        yield f"id: {last_sent.number}\n\n"
        while True:
            newer = await self._watcher.overview.wait_for_newer(last_sent.number, _STILL_HERE_SECONDS)
            last_sent = newer or last_sent
            yield ": still here\n\n" if newer is None else f"id: {newer.number}\nevent: newer\ndata: {newer.number}\n\n"

    # --- messages -------------------------------------------------------------------------------------------------

    async def messages(self, request: Request) -> Response:
        query, observation = request.query_params, None
        form_values = {name: query.get(name, "").strip().replace("\0", "") for name in ("queue", "due_from", "due_to")}
        pending_filter = Pending(
            form_values["queue"] or None, _parse_instant(form_values["due_from"]), _parse_instant(form_values["due_to"])
        )
        origin = query.get("origin", "")
        if origin or not pending_filter.has_condition:
            pending_filter = replace(pending_filter, origins=_ORIGINS.get(origin, EVERYTHING.origins))
        deployment, after = await self._watcher.get_deployment(), query.get("after") or None
        search_limit = None if (search := query.get("search")) == "all" else _SEARCH_LIMIT
        if after or pending_filter != EVERYTHING:
            async with self._query_lock:
                now = await operations.read_present(deployment)
                messages = await operations.list_messages(deployment, pending_filter, LISTED, now, after, search_limit)
        else:
            observation = await self._watcher.first_messages.get_latest()
            messages, now = observation.value, observation.at
        unsearched = 0
        if (
            (pending_filter.destination or pending_filter.origins != EVERYTHING.origins)
            and search_limit is not None
            and not messages.more
        ):
            unsearched = (await self._watcher.overview.get_latest()).value.statistics.pending - search_limit
        form_values["origin"] = origin
        next_query = _build_query({**form_values, "search": search, "after": messages.cursor})
        search_all_query = _build_query({**form_values, "search": "all", "after": after}) if unsearched > 0 else ""
        values: dict[str, Any] = {
            "further": next_query,
            "everywhere": search_all_query,
            "among": search_limit,
            "look": observation,
        }
        values |= {"origins": _ORIGINS, "everything": EVERYTHING}
        return self._render_page(request, "messages", found=messages, where=pending_filter, now=now, **values)

    async def message(self, request: Request) -> Response:
        """Show what is known of one message, failed or not. The id is the end of the path, or in the query."""
        id_: str = request.path_params["id"] or request.query_params.get("id", "")
        if not id_.strip() or "\0" in id_:  # No store can keep such an id.
            raise HTTPException(HTTPStatus.NOT_FOUND, "Name the id of a message.")
        if body := request.query_params.get("body") == "shown":
            self._log_disclosure(request, "body of message", id_)
        deployment = await self._watcher.get_deployment()
        statistics = (await self._watcher.overview.get_latest()).value.statistics
        is_search_requested = request.query_params.get("search") == "all"
        searches_queues = is_search_requested or sum((statistics.queues or {}).values()) <= _SEARCH_LIMIT
        searches_everything = searches_queues and (is_search_requested or statistics.pending <= _SEARCH_LIMIT)
        async with self._query_lock:
            now = await operations.read_present(deployment)
            try:
                details = await operations.show_message(deployment, id_, queued=searches_queues)
            except MessageNotFound:
                details = operations.MessageDetails(id_, (), ())
            is_explained = searches_everything or bool(details.places)
            explanation = await operations.explain(deployment, id_, now) if is_explained else None
        state = operations.MessageState.UNKNOWN if explanation is None else explanation.state
        exists = bool(details.places or details.history or details.unreadable)
        exists = exists or state is not operations.MessageState.UNKNOWN
        values: dict[str, Any] = {"explanation": explanation, "mood": _MOODS.get(state.value, ""), "body": body}
        status = HTTPStatus.OK if exists else HTTPStatus.NOT_FOUND
        return self._render_page(request, "message", status, id_=id_, details=details, now=now, **values)

    # --- sagas ----------------------------------------------------------------------------------------------------

    async def sagas(self, request: Request) -> Response:
        """List saga instances after a type and an id."""
        query, next_query, deployment = request.query_params, "", await self._watcher.get_deployment()
        async with self._query_lock:
            now, after = await operations.read_present(deployment), (query.get("type", ""), query.get("after", ""))
            instances = await operations.list_sagas(deployment, after, LISTED + 1)
        if instances and instances[LISTED:]:
            last = instances[LISTED - 1].record
            instances, next_query = instances[:LISTED], _build_query({"type": last.saga_type, "after": last.saga_id})
        return self._render_page(request, "sagas", found=instances, one=None, further=next_query, now=now)

    async def saga(self, request: Request) -> Response:
        kind, _, id_ = request.path_params["id"].rpartition("/")
        deployment, state = await self._watcher.get_deployment(), request.query_params.get("state") == "shown"
        async with self._query_lock:
            now, saga = await operations.read_present(deployment), await operations.show_saga(deployment, kind, id_)
        if saga is None:
            raise HTTPException(HTTPStatus.NOT_FOUND, f"There is no instance {id_} of {kind}; it may be completed.")
        if state:
            self._log_disclosure(request, "state of saga", kind, id_)
        return self._render_page(request, "sagas", found=[saga], one=saga, further="", now=now, state=state)

    # --- errors ---------------------------------------------------------------------------------------------------

    async def errors(self, request: Request) -> Response:
        query, deployment = request.query_params, await self._watcher.get_deployment()
        error_filter = operations.ErrorFilter(query.get("queue"), query.get("exception"), exact=True)
        if deployment.queue_view is None:  # Unreadable rows of the store can be listed all the same.
            async with self._query_lock:
                rows = await operations.list_unreadable(deployment, LISTED)
            errors = operations.ErrorList(self._error_queue, 0, (), rows)
            return self._render_page(request, "errors", groups=None, errors=errors, queue=self._error_queue)
        observation = await self._watcher.errors.get_latest()
        groups = observation.value
        async with self._query_lock:
            errors = await operations.list_errors(deployment, self._error_queue, LISTED)
        has_filter = error_filter.failed_queue is not None or error_filter.exception is not None
        if has_filter:  # The groups have these messages already, so the whole queue is not read again.
            matching_groups = [
                each for each in groups.groups if error_filter.can_match(each.exception_type, each.failed_queue)
            ]
            lines = [line for each in matching_groups for line in each.first][:LISTED]
            errors = replace(errors, total=sum(each.count for each in matching_groups), messages=lines)
        return self._render_page(
            request, "errors", look=observation, groups=groups, errors=errors, where=error_filter, some=has_filter
        )

    def _log_disclosure(self, request: Request, content_name: str, *names: str) -> None:
        user, address = self._identify_client(request)
        log.warning("the %s %s is shown to %s, user %r", content_name, " ".join(map(repr, names)), address, user)

    def _identify_client(self, request: Request) -> tuple[str | None, str | None]:
        """Return the name of the user who asks, as far as it is known, and the address of the client."""
        return request.headers.get("X-Forwarded-User"), request.client and request.client.host

    # --- what cannot be shown -------------------------------------------------------------------------------------

    def show_error(self, request: Request, error: Exception) -> Response:
        """Show what is wrong, where, and how to repair it.

        The server logs any error that is not of Postdate or HTTP.
        """
        text, mend, code = redact_secrets(str(error)), "", "internal_error"
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
        return self._render_page(request, "problem", status, said=text, code=code, mend=mend)


class Front(Views):
    """The page above those of several deployments. Each deployment has a row with a link to its pages."""

    def __init__(self, watchers: Mapping[str, Watcher]) -> None:
        for name in watchers:
            if not _NAME.fullmatch(name):
                allowed = "letters, digits, '.', '_' and '-', a letter or a digit first, but not 'static' or 'events'"
                raise ConfigurationError(f"{name!r} cannot name a deployment: give it {allowed}")
        if not watchers:
            raise ConfigurationError("there is no deployment to show: give one name and its settings at least")
        super().__init__(next(iter(watchers.values())), name=None)
        self._watchers = watchers

    @override
    async def overview(self, request: Request) -> Response:
        headlines = await asyncio.gather(*map(_latest_headline, self._watchers.values()))
        return self._render_page(request, "front", rows=zip(self._watchers, headlines, strict=True))

    @override
    async def events(self, request: Request) -> Response:
        async def stream_news() -> AsyncGenerator[str]:
            while True:
                yield "event: newer\ndata: any\n\n"
                await self._watcher.clock.sleep(_FRONT_INTERVAL)

        return StreamingResponse(stream_news(), media_type="text/event-stream")


async def _latest_headline(watcher: Watcher) -> tuple[Observation[operations.Overview] | None, str]:
    """Return the last look and its headline. Without a look, the text is the reason."""
    try:
        with anyio.move_on_after(_FIRST_LOOK_SECONDS):
            await watcher.get_deployment()
            observation = await watcher.overview.get_latest()
            return observation, headline_of(observation.value)
    except PostdateError as error:
        return None, redact_secrets(str(error))
    except Exception:  # noqa: BLE001 - all others can be shown
        log.exception("a deployment cannot be shown")
    return None, "It has not answered yet, or not well: see the log."


def headline_of(state: operations.Overview) -> str:
    statistics = state.statistics
    overdue_text = f"{format_count(statistics.overdue, 'message')} of {statistics.pending:,}"
    if not statistics.pending:
        return "Nothing waits"
    if not statistics.overdue:
        return (
            f"{format_count(statistics.pending, 'message')} wait{'s' if statistics.pending == 1 else ''}, all on time"
        )
    if state.overdue_since is None:
        return f"{overdue_text} held by limits, all others on time"
    return f"{overdue_text} {'is' if statistics.overdue == 1 else 'are'} overdue"


def _format_count(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"


def _parse_instant(text: str) -> datetime | None:
    """Return the instant of a form's field. A text without an offset, as browsers send it, is in UTC."""
    return parse_instant(f"{text}Z" if _WITHOUT_OFFSET.fullmatch(text) else text) if text else None


def _mark_code(text: str) -> Markup:
    """Return a text in which commands between backticks are marked as code."""
    parts = enumerate(escape_control_characters(text).split("`"))
    return Markup("").join(Markup("<code>{}</code>").format(part) if place % 2 else part for place, part in parts)


def _format_value(value: object) -> object:
    """Return a time to the second, with the exact value as a tooltip. Return a text with control characters escaped."""
    if isinstance(value, datetime):
        return Markup('<time datetime="{0}" title="{0}">{1:%Y-%m-%d %H:%M:%S}</time>').format(format_time(value), value)
    return "-" if value is None else escape_control_characters(value) if type(value) is str else value


def _build_query(values: Mapping[str, str | None]) -> str:
    """Return the query of an address. Empty values are left out."""
    return urlencode({name: value for name, value in values.items() if value})
