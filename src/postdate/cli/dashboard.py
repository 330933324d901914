"""``postdate dashboard``: the operator's page, served from this process."""

from __future__ import annotations

import logging
import signal
import socket
from typing import Annotated

from postdate.cli.command import LogLevel, Use, logging_to_stderr, option, signals_handled, wrong_usage

_STOPS_WITHIN_SECONDS = 2
"""Pages that are open keep a connection for news."""

log = logging.getLogger("postdate.dashboard")


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
    from postdate import operations
    from postdate.errors import ConfigurationError

    try:
        import uvicorn

        from postdate import web
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{error.name} is missing; the page needs the dashboard extra: pip install 'postdate[dashboard]'"
        ) from error

    settings, (address, port) = use.settings(), _place(listen)
    use.work(lambda deployment, _: operations.present(deployment))  # a wrong address is told at once
    try:
        listening = socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {listen}: {error.strerror or error}; choose --listen") from error
    app = web.dashboard(settings, hosts=[address, "localhost", *(host or ())])
    config = uvicorn.Config(app, access_log=False, log_config=None, server_header=False)
    config.timeout_graceful_shutdown = _STOPS_WITHIN_SECONDS
    # The server hands signals on after its end: they have done their work by then.
    with logging_to_stderr(log_level), listening, signals_handled(_heard, signal.SIGINT, signal.SIGTERM):
        shown = f"[{address}]" if ":" in address else address
        log.info("the page is at http://%s:%d/", shown, listening.getsockname()[1])
        uvicorn.Server(config).run(sockets=[listening])


def _heard(number: int, frame: object) -> None:
    """Nothing more has to be done."""


def _place(listen: str) -> tuple[str, int]:
    address, separator, port = listen.rpartition(":")
    if not separator or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise wrong_usage(f"--listen {listen!r} is not ADDRESS:PORT, such as 127.0.0.1:8080")
    return address.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)
