"""The application: its routes, and the headers and limits of every answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import Final

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override

from postdate.clock import SystemClock
from postdate.config import Settings
from postdate.errors import PostdateError
from postdate.web.acting import ActingViews, Actions
from postdate.web.views import SECURITY_HEADERS, Front, Views
from postdate.web.watching import Watcher

_LONGEST_ADDRESS: Final = 8_192
"""Maximum length in characters of the path and the query together.

A link of the page has two names of 200 characters and an id of 250 at most, and quoting makes up to 12 characters of
each character.
"""


def dashboard(
    settings: Settings | Mapping[str, Settings],
    *,
    hosts: Sequence[str] = ("localhost", "127.0.0.1", "[::1]"),
    actions: Actions | None = None,
) -> Starlette:
    """Return the operator's page as an ASGI application, to be served alone or mounted in another application.

    The application opens the store and the queues at the first request. Every client that can reach it can read.

    Args:
        settings: of one deployment, or of several by their names: the first page then shows them all, and links to
            ``/NAME/…`` of each.
        hosts: names under which browsers may request the page, as a protection against DNS rebinding; ``*``: any name,
            if the application in which it is mounted checks names.
        actions: the users who may act; ``None``: no user.

    Raises:
        ConfigurationError: a name cannot be part of an address; the error says which names can.
    """
    clock, create_views = SystemClock(), Views if actions is None else partial(ActingViews, actions=actions)
    if isinstance(settings, Settings):
        watcher = Watcher(settings, clock)
        return _build_application(create_views(watcher), [watcher], hosts)
    watchers = {name: Watcher(each, clock) for name, each in settings.items()}
    front = Front(watchers)
    mounts = [
        Mount(f"/{name}", _build_application(create_views(each, name), [], hosts)) for name, each in watchers.items()
    ]
    return _build_application(front, list(watchers.values()), hosts, mounts)


def _build_application(
    views: Views, watchers: Sequence[Watcher], hosts: Sequence[str], mounts: Sequence[Mount] = ()
) -> Starlette:
    """Return the pages of a deployment, or the page above those ``mounts``.

    The watchers are closed with the application.
    """

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        yield
        for each in watchers:
            await each.close()

    pages = [
        Route("/messages", views.messages),
        Route("/messages/{id:path}", views.message),
        Route("/errors", views.errors),
        Route("/errors/{id:path}", views.message),
        Route("/queues", views.queues),
        Route("/sagas", views.sagas),
        Route("/sagas/{id:path}", views.saga),
        Route("/doctor", views.doctor),
    ]
    return _WithSecurityHeaders(
        routes=[
            Route("/", views.overview),
            *(mounts or pages),
            Route("/events", views.events),
            *(views.routes if isinstance(views, ActingViews) else ()),
            Mount("/static", StaticFiles(packages=[("postdate.web", "static")])),
        ],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False),
            Middleware(_AddressLimit, views=views),
        ],
        exception_handlers=dict.fromkeys((PostdateError, HTTPException, Exception), views.show_error),
        lifespan=lifespan,
    )


class _WithSecurityHeaders(Starlette):
    """Adds headers to each answer that forbid browsers to load, run or store anything else."""

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        await super().__call__(scope, receive, send_with_headers)


class _AddressLimit:
    """Refuses long addresses. Any client may send one, and it is searched for, logged, and repeated in the answer."""

    def __init__(self, app: ASGIApp, views: Views) -> None:
        self._app, self._views = app, views

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            path = scope.get("raw_path") or scope["path"]  # Some servers do not provide the raw path.
            if len(path) + len(scope["query_string"]) > _LONGEST_ADDRESS:
                text = f"An address of this page has at most {_LONGEST_ADDRESS:,} characters."
                app = self._views.show_error(Request(scope), HTTPException(HTTPStatus.REQUEST_URI_TOO_LONG, text))
        await app(scope, receive, send)
