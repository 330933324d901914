"""``postdate dashboard``: the operator's page, served from this process."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
from typing import Annotated

import typer

from postdate import operations
from postdate.cli import command as cli
from postdate.config import load_settings, parse_host_and_port
from postdate.errors import ConfigurationError
from postdate.ports.settings import InvalidValue

app = typer.Typer(name="dashboard", add_completion=False)

log = logging.getLogger("postdate.dashboard")


@cli.command(app, "dashboard", reports=False)
def dashboard(
    use: cli.Use,
    listen: Annotated[str, cli.option("--listen", "Where to listen.", metavar="ADDRESS:PORT")] = "127.0.0.1:8080",
    host: Annotated[
        list[str] | None, cli.option("--host", "Another host name of the page; may be repeated.", metavar="NAME")
    ] = None,
    allow_actions: Annotated[bool, cli.option("--allow-actions", "Allow changes; say by whom.")] = False,
    token_file: Annotated[
        typer.FileText | None,
        cli.option(
            "--token-file",
            "File with a token; its bearer may make changes.",
            metavar="FILE",
            encoding="ascii",
            errors="replace",
        ),
    ] = None,
    user_header: Annotated[
        str | None, cli.option("--user-header", "Header with the user who makes changes.", metavar="NAME")
    ] = None,
    also: Annotated[
        list[str] | None, cli.option("--also", "Another deployment; repeatable.", metavar="NAME=FILE")
    ] = None,
    log_level: cli.LogLevel = "INFO",
) -> None:
    """Show pending, due and failed messages as a page in the browser.

    With --also, the first page shows several deployments: this one, by its endpoint.name, and others, each by a name
    and a file of settings. Requests are answered by the address, as localhost, and by names of --host.

    Whoever can connect can read, so it listens to this machine alone. For others, put a server before it that asks
    them who they are. Nothing can be changed there, unless that is allowed.
    """
    import uvicorn

    from postdate import web

    try:
        address, port = parse_host_and_port(listen)
    except InvalidValue as error:
        raise cli.usage_error(f"--listen {error}, not {listen!r}") from error
    if allow_actions != bool(token_file or user_header):
        raise cli.usage_error("--allow-actions needs --token-file FILE or --user-header NAME")
    actions = web.Actions(token_file and token_file.read().strip(), user_header) if allow_actions else None
    settings = use.settings()
    settings_by_name = {settings.endpoint.name: settings}
    # Environment variables that are settings apply to the first deployment only. References in the files may use
    # others.
    own_environment = {name: text for name, text in os.environ.items() if not re.match("POSTDATE_.*__", name)}
    for each in also or ():
        name, _, file = each.partition("=")
        if not file or name in settings_by_name:
            raise cli.usage_error(f"--also must be NAME=FILE with a unique name, not {each!r}")
        settings_by_name[name] = load_settings(file, own_environment)
    if not also:
        # Ask the store once, so that a wrong address is reported at once.
        use.call_with_deployment(lambda deployment, _: operations.read_present(deployment))
    host_text, family = (f"[{address}]", socket.AF_INET6) if ":" in address else (address, socket.AF_INET)
    page = web.dashboard(
        settings_by_name if also else settings, hosts=[host_text, "localhost", *(host or ())], actions=actions
    )
    try:
        server_socket = socket.create_server((address, port), family=family)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {listen}: {error.strerror or error}; choose --listen") from error
    # Accepted connections inherit this option. Without it, the second part of an answer waits 40 ms for an
    # acknowledgement.
    server_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    config = uvicorn.Config(page, access_log=False, log_config=None, server_header=False)
    # In seconds. Open pages keep a connection for events, so the server must not wait for them without a limit.
    config.timeout_graceful_shutdown = 2
    # The server raises its signals again after its end. They have had their effect by then, so they are ignored.
    signal_handling = cli.handle_signals(lambda _number, _frame: None, signal.SIGINT, signal.SIGTERM)
    with cli.log_to_stderr(log_level), server_socket, signal_handling:
        log.info("the page is at http://%s:%d/", host_text, server_socket.getsockname()[1])
        uvicorn.Server(config).run(sockets=[server_socket])
