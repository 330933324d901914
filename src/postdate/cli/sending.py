"""``postdate setup`` and ``postdate send``."""

from __future__ import annotations

import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from postdate import operations
from postdate.cli import command as cli
from postdate.endpoint.send_options import SendOptions
from postdate.errors import ConfigurationError
from postdate.operations.plain import format_time
from postdate.wiring import setup_sql

app = typer.Typer(add_completion=False)


@cli.command(app, "setup")
def setup(
    use: cli.Use,
    queue: Annotated[
        list[str] | None, cli.name_option("--queue", "Create this queue, too; may be repeated.", metavar="QUEUE")
    ] = None,
    sagas: Annotated[
        bool, cli.option("--sagas", "Create the table of sagas, too, by default where the store is.")
    ] = False,
    outbox: Annotated[
        bool, cli.option("--outbox", "Create the table of the outbox, too, by default where the store is.")
    ] = False,
    print_sql: Annotated[bool, cli.option("--print-sql", "Print the SQL of the tables; change nothing.")] = False,
    no_transaction: Annotated[
        bool,
        cli.option(
            "--no-transaction", "With --print-sql: without BEGIN and COMMIT, for a migration that has a transaction."
        ),
    ] = False,
) -> None:
    """Create the tables, the endpoint's queues and the queues of the settings. Existing ones stay unchanged.

    The tables of a timeout manager, of sagas and of the outbox are among them if the settings say where they are.
    """
    if no_transaction and not print_sql:
        raise ConfigurationError("--no-transaction changes the text of --print-sql: give both, or none")
    if print_sql:
        sql = setup_sql(use.settings(), queue or [], sagas=sagas, outbox=outbox, in_transaction=not no_transaction)
        use.report({"sql": sql}, lambda: print(sql, end=""))
        return
    result = use.call_with_deployment(
        lambda deployment, _: operations.set_up(deployment, queue or [], sagas=sagas, outbox=outbox), create=True
    )
    existing_queues = set[str]() if result.created is None else set(result.queues) - set(result.created)

    def lines() -> None:
        places = {"store": result.store, "transport": result.transport, "timeouts": result.timeouts}
        for role, address in {**places, "sagas": result.sagas, "outbox": result.outbox}.items():
            if address is not None:
                print(f"{role:<9}  {address}")
        for name in result.queues:
            print(f"queue      {name}{' (was there)' if name in existing_queues else ''}")
        if result.exchange is not None:
            print(f"exchange   {result.exchange}, for messages with a header x-delay")
        for limit in result.limits:
            print(f"limit      {limit}")

    use.report(result, lines)


@cli.command(app, "send")
def send(
    use: cli.Use,
    queue: Annotated[str, typer.Argument(metavar="QUEUE", help="Queue it is meant for.")],
    body: Annotated[
        str | None, typer.Argument(metavar="[BODY]", help="Sent as it is; default, or -: standard input.")
    ] = None,
    delay: cli.Delay = None,
    at: cli.AtWall = None,
    zone: Annotated[
        str | None,
        cli.name_option(
            "--zone",
            "Time zone of --at, such as Europe/Paris; the message then follows the clocks there.",
            metavar="ZONE",
        ),
    ] = None,
    expires_at: Annotated[datetime | None, cli.instant_option("--expires-at", "When the message expires.")] = None,
    time_to_be_received: Annotated[
        timedelta | None,
        cli.duration_option("--time-to-be-received", "Discard it if not received this long from now.", metavar="TIME"),
    ] = None,
    message_type: Annotated[
        str | None, cli.name_option("--type", "Type of the message, as the receiver knows it.", metavar="TYPE")
    ] = None,
    header: Annotated[
        list[str] | None, cli.option("--header", "A header of your own; may be repeated.", metavar="NAME=VALUE")
    ] = None,
    message_id: Annotated[
        str | None, cli.name_option("--id", "Id of the message; default: a new one.", metavar="ID")
    ] = None,
    file: Annotated[Path | None, cli.option("--file", "Send the content of this file.", metavar="FILE")] = None,
) -> None:
    """Send a message, now or when it is due. A body that is JSON is marked as such."""
    if not queue.strip():
        raise cli.usage_error("QUEUE must be the name of a queue, not empty")
    if delay is not None and at is not None:
        raise cli.usage_error("--delay and --at exclude each other")
    cli.wall_time_of(at, zone, "--zone")
    content, headers = _read_body(body, file), cli.pairs_of(header)
    options = SendOptions(
        queue, delay, at, expires_at, time_to_be_received, headers=headers, message_id=message_id, zone=zone
    )
    sent = use.call_with_deployment(lambda deployment, _: operations.send(deployment, content, options, message_type))
    use.report(sent, lambda: _print_sent(sent))


def _read_body(argument: str | None, file: Path | None) -> bytes:
    if file is not None:
        if argument is not None:
            raise cli.usage_error("give the body as an argument or with --file, not both")
        try:
            return file.read_bytes()
        except OSError as error:
            raise cli.usage_error(f"{file} cannot be read: {error.strerror}") from error
    if argument is not None and argument != "-":
        return argument.encode(errors="surrogateescape")
    if argument is None and sys.stdin.isatty():
        raise cli.usage_error("there is no body: give one after the queue, with --file, or through a pipe")
    return sys.stdin.buffer.read()


def _print_sent(sent: operations.SendReport) -> None:
    if sent.due is None:
        print(f"{sent.message_id} is in queue {sent.destination}")
        return
    print(f"{sent.message_id} is due at {format_time(sent.due)} for queue {sent.destination}")
    if sent.queue_exists is False:
        print(
            f"postdate: warning: there is no queue {sent.destination!r} yet. What is due waits for it for some "
            f"minutes, and then goes to the error queue. Create it: postdate setup --queue {sent.destination}",
            file=sys.stderr,
        )
    if sent.services == 0:
        print("postdate: warning: no service is running to deliver it. Start one: postdate run", file=sys.stderr)
