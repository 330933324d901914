"""The actions on the page and the users who may run them. Each is confirmed once and logged with the name.

Source: ADR 35.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote

from markupsafe import escape
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from postdate import errors, operations
from postdate.clock import later
from postdate.config import parse_instant
from postdate.core import limits
from postdate.operations.destinations import change_destination
from postdate.web.views import Views
from postdate.web.watching import LISTED, Watcher, log

_LEAST_TOKEN, _LONGEST_NAME = 16, 100
_SESSION_DURATION: Final = timedelta(hours=12)
_LARGEST_BODY: Final = 2**20
# A browser sends a line feed of the body as the six characters %0D%0A, and any other byte as three at most. The rest is
# for the other fields.
_LARGEST_FORM: Final = 7 * _LARGEST_BODY
_NOTHING_SENT: Final = (
    errors.MessageError,
    errors.MessageNotFound,
    errors.QueueNotFound,
    errors.NotSupported,
    errors.ConfigurationError,
)
"""Errors of an edit that has surely sent nothing. After others, such as a lost connection, it may have been sent."""

_HEADER: Final = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
_ACTIONS: Final = {
    frozenset({"id"}): ("cancel", "deliver", "reschedule", "return", "discard", "edit", "discard-unreadable"),
    frozenset({"exception", "queue"}): ("return-group", "discard-group"),
    frozenset({"queue"}): ("pause", "resume", "limit"),
}


@dataclass(frozen=True, slots=True)
class Actions:
    """Which users may act on the page. Exactly one of the two is given.

    Args:
        token: a user who knows it may sign in, under a name of the user's choice; at least 16 characters of ASCII.
        user_header: the header in which a proxy server names the user, such as ``X-Forwarded-User``. The proxy must
            remove a header of this name that a browser sends. Requests without the header may only look.

    Raises:
        ConfigurationError: neither or both are given, the token is invalid, or the name is not a valid header name.
    """

    token: str | None = field(default=None, repr=False)
    user_header: str | None = None
    key: bytes = field(default_factory=partial(secrets.token_bytes, 32), init=False, repr=False)

    def __post_init__(self) -> None:
        if (self.token is None) == (self.user_header is None):
            raise errors.ConfigurationError("who may act? give either a token, or the header that says who asks")
        if self.token is not None and not (len(self.token) >= _LEAST_TOKEN and self.token.isascii()):
            raise errors.ConfigurationError(
                f"the token needs {_LEAST_TOKEN} characters of ASCII at least: openssl rand -hex 32"
            )
        if self.user_header is not None and not _HEADER.fullmatch(self.user_header):
            raise errors.ConfigurationError(f"{self.user_header!r} is no name of a header, such as X-Forwarded-User")


class ActingViews(Views):
    """The pages with their actions, for users who may act."""

    def __init__(self, watcher: Watcher, name: str = "", *, actions: Actions) -> None:
        super().__init__(watcher, name)
        self._actions, self._has_sign_in = actions, actions.token is not None
        # A browser sends cookies to all ports of a host, so each process has its own name for the cookie.
        self._cookie = f"postdate-{self._signature('cookie', '')[:8]}"
        # Forms of edits that were sent, by their random number: each form sends its message only once.
        self._submitted_forms = set[str]()

    @property
    def routes(self) -> list[Route]:
        both = ["GET", "POST"]
        sign_in_routes = [
            Route("/sign-in", self.sign_in, methods=both),
            Route("/sign-out", self.sign_out, methods=["POST"]),
        ]
        return [Route("/change", self.change, methods=both), *(sign_in_routes if self._has_sign_in else ())]

    def _render_page(self, request: Request, name: str, status: int = HTTPStatus.OK, **values: Any) -> HTMLResponse:
        values |= {
            "who": self._acting_user(request),
            "signs_in": self._has_sign_in,
            "csrf_token": self._csrf_token(request),
        }
        return super()._render_page(request, name, status, error_queue=self._error_queue, **values)

    # --- who acts -------------------------------------------------------------------------------------------------

    def _identify_client(self, request: Request) -> tuple[str | None, str | None]:
        user, address = super()._identify_client(request)
        # If a header names the users who act, only that header counts here.
        return self._acting_user(request) or (user if self._has_sign_in else None), address

    def _acting_user(self, request: Request) -> str | None:
        """Return the name of the user if this user may act; otherwise ``None``."""
        if self._actions.user_header is not None:
            return request.headers.get(self._actions.user_header, "").strip() or None
        session, _, signature = request.cookies.get(self._cookie, "").rpartition(".")
        expiry_seconds, _, name = session.partition(".")
        is_genuine = _is_equal(signature, self._signature("session", session))
        # The signature is checked first: only then ``expiry_seconds`` is certainly a number.
        return unquote(name) if is_genuine and self._watcher.clock.now().timestamp() < int(expiry_seconds) else None

    def _csrf_token(self, request: Request) -> str:
        """Return the token that only forms on pages for this user contain."""
        session = request.cookies.get(self._cookie, "") if self._has_sign_in else self._acting_user(request)
        return self._signature("form", session or "")

    def _signature(self, purpose: str, text: str) -> str:
        return hmac.new(self._actions.key, f"{purpose} {text}".encode(), "sha256").hexdigest()

    def _create_refusal(
        self, request: Request, reason: str, text: str, status: int = HTTPStatus.FORBIDDEN
    ) -> HTTPException:
        request_text = f"{request.method} {request.url.path}?{request.url.query}"
        log.warning("refused: %r by user %r at %s: %s", request_text, *self._identify_client(request), reason)
        return HTTPException(status, f"{text} Nothing was done.")

    async def _read_form(self, request: Request, *, needs_token: bool = True) -> dict[str, str]:
        """Return the fields of a form that came from this host. Raises `HTTPException`.

        ``needs_token``: the form must have been made for the user who sends it.
        """
        site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
        is_own = origin is None or origin.partition("://")[2] == request.headers.get("Host")
        if not (is_own if site is None else site == "same-origin"):
            raise self._create_refusal(
                request, f"sent by a page of {origin or site!r}", "This was sent by a page elsewhere."
            )
        content = bytearray()
        async for part in request.stream():
            content += part
            if len(content) > _LARGEST_FORM:
                reason = f"More than {_LARGEST_FORM:,} bytes are not taken."
                raise self._create_refusal(request, reason, reason, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        try:
            form = dict(parse_qsl(content.decode("ascii"), keep_blank_values=True, max_num_fields=10))
        except ValueError as error:
            raise self._create_refusal(
                request, str(error), "This is no form of this page.", HTTPStatus.BAD_REQUEST
            ) from error
        if needs_token and not _is_equal(form.get("csrf_token", ""), self._csrf_token(request)):
            text = "This was sent by a page of another session: go back, load it again, and repeat."
            raise self._create_refusal(request, "its CSRF token is missing or wrong", text)
        return form

    async def sign_in(self, request: Request) -> Response:
        if request.method != "POST":
            return self._render_page(request, "signin")
        form = await self._read_form(request, needs_token=False)
        name = form.get("name", "").strip()[:_LONGEST_NAME]
        if not name or not _is_equal(form.get("token", "").strip(), self._actions.token or ""):
            raise self._create_refusal(request, f"{name!r} has a wrong token", "The token is wrong, or no name given.")
        log.warning("user %r at %s signs in", name, self._identify_client(request)[1])
        expiry = later(self._watcher.clock.now(), _SESSION_DURATION)
        session = f"{int(expiry.timestamp())}.{quote(name, safe='')}"
        return self._redirect_with_cookie(
            request, f"{session}.{self._signature('session', session)}", _SESSION_DURATION
        )

    async def sign_out(self, request: Request) -> Response:
        await self._read_form(request)
        log.warning("user %r at %s signs out", *self._identify_client(request))
        return self._redirect_with_cookie(request, "", timedelta(0))

    def _redirect_with_cookie(self, request: Request, value: str, duration: timedelta) -> Response:
        base, seconds = request.scope.get("root_path", ""), int(duration.total_seconds())
        response, is_secure = RedirectResponse(f"{base}/", HTTPStatus.SEE_OTHER), request.url.scheme == "https"
        # A user who signs in to one of several deployments may act on all of them.
        path = base.removesuffix(f"/{self._name}") or "/"
        response.set_cookie(self._cookie, value, seconds, path=path, secure=is_secure, httponly=True, samesite="strict")
        return response

    # --- what is done ---------------------------------------------------------------------------------------------

    async def change(self, request: Request) -> Response:
        """Show what the query asks for, for confirmation. If the form was sent, do it."""
        if self._acting_user(request) is None:
            text = "Sign in first." if self._has_sign_in else "The server in front does not say who you are."
            raise self._create_refusal(request, "nobody is known to ask", text)
        query = dict(request.query_params)
        action, form_id = query.pop("what", ""), query.pop("once", "")
        if action not in _ACTIONS.get(frozenset(query), ()):
            raise HTTPException(HTTPStatus.BAD_REQUEST, "Follow the links of a page to say what is to be done.")
        page = partial(self._render_page, request, "change", what=action, given=query, listed=LISTED)
        if request.method != "POST":
            async with self._query_lock:
                preview = await self._preview_action(request, action, query)
            return page(found=preview, results=None, once=secrets.token_hex(8))
        form, actor = await self._read_form(request), (*self._identify_client(request), action, query)
        # Each edit sends another message, so the form is remembered: a button that is pressed twice sends only one.
        if action == "edit":
            if form_id in self._submitted_forms:
                text = "This was sent before: see what became of it, or load the question again."
                raise self._create_refusal(request, "its form was sent before", text)
            self._submitted_forms.add(form_id)
        counts = [0]
        try:
            results = await self._run_action(action, query, form, counts.append)
        except BaseException as error:
            if isinstance(error, _NOTHING_SENT):  # So the user can correct the form, and send it again.
                self._submitted_forms.discard(form_id)
            log.warning("user %r at %s: %s %r: ended, with %d done, by %r", *actor, counts[-1], error)
            raise
        for each in results or ["there is none"]:
            log.warning("user %r at %s: %s %r: %r", *actor, each)
        return page(results=results)

    async def _preview_action(self, request: Request, action: str, query: Mapping[str, str]) -> Any:
        """Return the expected result for a group, the limits of a queue, or a body as text; ``None``: none of these."""
        deployment, queue = await self._watcher.get_deployment(), self._error_queue
        now = await operations.read_present(deployment)
        if "exception" in query:
            treatment = operations.Treatment(discard=action == "discard-group", dry_run=True)
            error_filter = operations.ErrorFilter(query["queue"], query["exception"], exact=True)
            return await operations.return_all(deployment, queue, now, error_filter, treatment)
        if "queue" in query:
            return (await limits.load_limits_in_force(limits.limiting_store(deployment.store))).get(
                query["queue"], limits.NO_LIMITS
            )
        body = (await operations.show_error(deployment, queue, query["id"], now)).body if action == "edit" else None
        if body is None or body.text is None or body.size_bytes > _LARGEST_BODY or {"\r", "\0"} & {*body.text}:
            return None  # Browsers change line ends in forms, and forms cannot carry NUL.
        self._log_disclosure(request, "body of message", query["id"])
        return escape(body.text)

    async def _run_action(
        self, action: str, query: Mapping[str, str], form: Mapping[str, str], progress: Callable[[int], None]
    ) -> Sequence[object]:
        """Do the action through the operation that the command line calls, and return the result of each item."""
        deployment, id_, queue = await self._watcher.get_deployment(), query.get("id", ""), self._error_queue
        now, to = await operations.read_present(deployment), form.get("to", "").strip() or None
        treatment = operations.Treatment(to, "without_expiry" in form, discard=action.startswith("discard"))
        match action:
            case "cancel":
                results = [await operations.cancel(deployment, id_, now)]
            case "deliver" | "reschedule":
                due = now if action == "deliver" else parse_instant(f"{form.get('due', '')}Z")
                results = [await operations.reschedule(deployment, id_, due, now)]
            case "return" | "discard":
                results = await operations.return_messages(deployment, queue, [id_], now, treatment)
            case "return-group" | "discard-group":
                error_filter = operations.ErrorFilter(query["queue"], query["exception"], exact=True)
                results = await operations.return_all(deployment, queue, now, error_filter, treatment, progress)
            case "edit":
                results = [await operations.edit(deployment, queue, id_, now, _parse_edit(form, to))]
            case "discard-unreadable":
                results = await operations.discard_unreadable(deployment, [id_], now)
            case _:
                change = {"pause": limits.add_pause, "resume": limits.remove_pause}.get(action) or _parse_limits(form)
                results = [(await change_destination(deployment, query["queue"], change, now))[0]]
        return results


def _is_equal(one: str, other: str) -> bool:
    # A comparison in constant time: its duration must not reveal how much of a secret is right.
    return hmac.compare_digest(one.encode(), other.encode())


def _parse_edit(form: Mapping[str, str], to: str | None) -> operations.Edit:
    headers, body = dict[str, str](), form.get("body")
    for line in _split_lines(form, "headers"):
        name, equals, value = line.partition("=")
        if not (name and equals):
            raise errors.InvalidHeaders(f"{line!r} is no header: write each in a line of its own, as NAME=VALUE")
        headers[name] = value
    if body is None and not headers:
        raise errors.InvalidMessage("what is to be changed? give another body, or a header")
    return operations.Edit(None if body is None else body.replace("\r\n", "\n").encode(), headers, to)


def _parse_limits(form: Mapping[str, str]) -> Callable[[limits.Limits], limits.Limits]:
    rate = form.get("per_second", "").strip()
    try:
        return limits.limit_change(float(rate) if rate else None, _split_lines(form, "windows"))
    except ValueError as error:
        raise errors.InvalidMessage(
            f"{rate!r} messages a second is not a valid rate: give a number, or nothing"
        ) from error


def _split_lines(form: Mapping[str, str], name: str) -> list[str]:
    return [line.strip() for line in form.get(name, "").splitlines() if line.strip()]
