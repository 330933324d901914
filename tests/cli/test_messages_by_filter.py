"""Messages that options describe are listed, cancelled and rescheduled, or counted."""

import pytest

from postdate.cli import command


@pytest.fixture
def waiting(cli):
    """Send ten messages, half of them for another queue."""
    cli.ok("setup", "--queue", "orders", "--queue", "bills")
    for number in range(10):
        queue, customer = ("orders", "bills")[number % 2], number % 3
        options = ["--id", f"m-{number}", "--header", f"customer={customer}", "--at", f"2126-01-31T{10 + number}:00Z"]
        more = ["--expires-at", "2126-02-01T00:00Z"] if number == 9 else []
        cli.ok("send", queue, f'{{"number": {number}}}', *options, *more)

    def ids(*options: str) -> list[str]:
        return [each["message_id"] for each in cli.ok("messages", "list", "--json", *options).json["messages"]]

    return ids


def test_options_say_which(cli, waiting) -> None:
    assert waiting("--header", "customer=1") == ["m-1", "m-4", "m-7"]
    assert waiting("--header", "customer=1", "--queue", "bills") == ["m-1", "m-7"]
    assert waiting("--text", '"number": 4') == ["m-4"]
    assert waiting("--failing") == []
    assert waiting("--due-from", "2126-01-31T17:00Z", "--limit", "2") == ["m-7", "m-8"]


def test_a_store_with_other_messages_is_not_said_to_be_empty(cli, waiting) -> None:
    assert cli.ok("messages", "list", "--queue", "nothing").out == "no message matches\n"


def test_the_cursor_of_a_list_gives_no_orders_to_a_terminal(cli, waiting) -> None:
    for name in ("a", "b"):
        cli.ok("send", "orders", "x", "--id", f"\x1b[31m{name}", "--at", "2100-01-01T00:00Z")
    said = cli.ok("messages", "list", "--limit", "1").out
    assert "continue with --after" in said
    assert "\x1b" not in said
    assert waiting("--limit", "1", "--after", cli.ok("messages", "list", "--limit", "1", "--json").json["cursor"]) == [
        "\x1b[31mb"
    ]


def test_all_that_match_are_cancelled_or_counted(cli, waiting) -> None:
    dry = cli.ok("messages", "cancel", "--queue", "bills", "--dry-run", "--json").json
    assert dry == {"answers": {"done": 5}, "dry_run": True}
    assert len(waiting()) == 10
    assert cli.ok("messages", "cancel", "--queue", "bills", "--json").json["answers"] == {"done": 5}
    assert waiting() == ["m-0", "m-2", "m-4", "m-6", "m-8"]
    assert cli.ok("messages", "cancel", "--queue", "bills").out == "no message matches\n"


def test_options_leave_out_what_waits_for_another_reason(cli, waiting) -> None:
    """Unless it is named; a list without options has all, and marks them."""
    cli.ok("send", "orders", "x", "--id", "retry", "--at", "2126-01-01T00:00Z", "--header", "NServiceBus.Retries=1")
    assert cli.ok("messages", "list", "--limit", "1").out.splitlines()[1].split()[:4] == [
        "retry",
        "2126-01-01T00:00:00Z",
        "waiting,",
        "retry",
    ]
    assert "retry" not in waiting("--queue", "orders")
    assert waiting("--queue", "orders", "--origin", "retry") == ["retry"]
    assert waiting("--origin", "retry", "--origin", "application", "--limit", "2") == ["retry", "m-0"]
    assert cli.ok("messages", "cancel", "--queue", "orders", "--json").json["answers"] == {"done": 5}
    assert cli("messages", "cancel", "--origin", "application", "--origin", "retry").status == 2
    assert cli.ok("messages", "cancel", "--origin", "retry", "--json").json["answers"] == {"done": 1}


def test_what_takes_long_says_how_far_it_is(cli, waiting, monkeypatch) -> None:
    monkeypatch.setattr(command, "REPORT_EVERY", 2)
    assert cli.ok("messages", "cancel", "--queue", "bills").err.splitlines() == ["2 so far", "4 so far"]
    assert cli.ok("queues", "purge", "orders").err == ""


def test_what_is_due_by_the_clocks_of_a_zone_is_sent_and_found(cli, waiting) -> None:
    cli.ok("send", "orders", "x", "--id", "paris", "--at", "2126-07-31T09:00", "--zone", "Europe/Paris")
    assert waiting("--zone", "Europe/Paris") == ["paris"]
    assert cli.ok("messages", "list", "--zone", "Europe/Paris", "--json").json["messages"][0]["due"] == (
        "2126-07-31T07:00:00Z"
    )


def test_all_that_match_are_rescheduled(cli, waiting) -> None:
    moved = cli.ok("messages", "reschedule", "--queue", "bills", "--later-by", "1d")
    assert moved.out.splitlines() == [
        "4 messages rescheduled",
        "1 message not rescheduled: would expire before it is due",
    ]
    assert waiting("--due-from", "2126-02-01T00:00Z") == ["m-1", "m-3", "m-5", "m-7"]
    assert cli.ok("messages", "reschedule", "--header", "customer=0", "--delay", "1h", "--json").json == {
        "answers": {"done": 4},
        "dry_run": False,
    }
    assert set(waiting("--due-to", "2100-01-01T00:00Z")) == {"m-0", "m-3", "m-6", "m-9"}
    both = cli.ok("messages", "reschedule", "m-1", "m-2", "--at", "2126-05-01T00:00Z", "--json").json["messages"]
    assert [each["message_id"] for each in both] == ["m-1", "m-2"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cancel"], "no messages are selected"),
        (["cancel", "--dry-run"], "no messages are selected"),
        (["cancel", "m-1", "--queue", "orders"], "not both"),
        (["cancel", "m-1", "--dry-run"], "not both"),
        (["cancel", "--header", "customer"], "NAME=VALUE"),
        (["reschedule", "--queue", "orders"], "give the time: either --delay, --at or --later-by"),
        (["reschedule", "--queue", "orders", "--delay", "1h", "--later-by", "1h"], "give the time"),
        (["reschedule", "m-1", "--later-by", "1h"], "give the time: either --delay or --at"),
        (["reschedule", "m-1"], "give the time"),
        (["list", "--after", "m-1"], "'m-1' is not a cursor that a list"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_changed(cli, waiting, arguments: list[str], said: str) -> None:
    ran = cli("messages", *arguments)
    assert ran.status == 2
    assert said in ran.err
    assert len(waiting()) == 10


def test_messages_are_rescheduled_to_what_the_clocks_of_a_zone_show(cli, waiting) -> None:
    when = ["--at", "2126-07-01T09:00", "--at-zone", "Europe/Paris"]
    assert "due at 2126-07-01T07:00" in cli.ok("messages", "reschedule", "m-3", *when).out
    cli.ok("messages", "reschedule", "--header", "customer=1", *when)
    assert waiting("--zone", "Europe/Paris") == ["m-1", "m-3", "m-4", "m-7"]
    cli.ok("messages", "reschedule", "--zone", "Europe/Paris", "--later-by", "1h")
    assert waiting("--zone", "Europe/Paris") == []
    for wrong in (["--at", "2126-07-01T09:00"], ["--at", "2126-07-01T09:00Z", *when[2:]], ["--delay", "1h", *when[2:]]):
        assert cli("messages", "reschedule", "m-3", *wrong).status == 2
