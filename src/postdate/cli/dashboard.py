"""``postdate dashboard``: the operator's page, served from this process."""

from __future__ import annotations

import logging
import signal
import socket
from typing import Annotated

import typer

from postdate import operations
from postdate.cli.command import LogLevel, Use, command, logging_to_stderr, option, signals_handled, wrong_usage
from postdate.config import host_and_port
from postdate.errors import ConfigurationError
from postdate.ports.settings import Wrong

app = typer.Typer(name="dashboard", add_completion=False)

_STOPS_WITHIN_SECONDS = 2
"""Pages that are open keep a connection for news."""

log = logging.getLogger("postdate.dashboard")


@command(app, "dashboard", reports=False)
def dashboard(
    use: Use,
    listen: Annotated[str, option("--listen", "Where to listen.", metavar="ADDRESS:PORT")] = "127.0.0.1:8080",
    host: Annotated[
        list[str] | None,
        option("--host", "A name under which browsers reach it; may be repeated. Else by the address, and localhost."),
    ] = None,
    log_level: LogLevel = "INFO",
) -> None:
    """Show what waits, what is due when, and what went wrong, as a page for the browser; read-only.

    Whoever can connect can read, so it listens to this machine alone. For others, put a server before it that asks
    them who they are.
    """
    try:
        import uvicorn

        from postdate import web
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{error.name} is missing; the page needs the dashboard extra: pip install 'postdate[dashboard]'"
        ) from error

    try:
        address, port = host_and_port(listen)
    except Wrong as error:
        raise wrong_usage(f"--listen {error}, not {listen!r}") from error
    settings = use.settings()
    use.work(lambda deployment, _: operations.present(deployment))  # a wrong address is told at once
    try:
        listening = socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {listen}: {error.strerror or error}; choose --listen") from error
    # Connections have it from here. Else the second part of an answer waits for the first to be acknowledged: 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    page = web.dashboard(settings, hosts=[f"[{address}]" if ":" in address else address, "localhost", *(host or ())])
    config = uvicorn.Config(page, access_log=False, log_config=None, server_header=False)
    config.timeout_graceful_shutdown = _STOPS_WITHIN_SECONDS
    # The server hands signals on after its end: they have done their work by then.
    with logging_to_stderr(log_level), listening, signals_handled(_heard, signal.SIGINT, signal.SIGTERM):
        shown = f"[{address}]" if ":" in address else address
        log.info("the page is at http://%s:%d/", shown, listening.getsockname()[1])
        uvicorn.Server(config).run(sockets=[listening])


def _heard(number: int, frame: object) -> None:
    """Nothing more has to be done."""
