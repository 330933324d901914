"""What cannot be read: seen by an operator wherever it is, mended with SQL, discarded; nothing else waits for it."""

import sqlite3
from contextlib import closing
from datetime import UTC, datetime

import anyio
import pytest

from postdate import DelayedMessage, LocalTransport, SqliteStore
from postdate.messages import Envelope

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
IN_2126 = datetime(2126, 1, 31, 12, tzinfo=UTC)


def damage(message_id: str, table: str, headers: str | bytes = "{not json") -> None:
    """Overwrite the headers of a message in the file of this test, as a fault of a disk or of a person would."""
    connection = sqlite3.connect("postdate.db")
    with connection:
        sql = f"UPDATE content SET headers = ? WHERE seq = (SELECT content FROM {table} WHERE message_id = ?)"
        assert connection.execute(sql, (headers, message_id)).rowcount == 1
    connection.close()


@pytest.fixture
def damaged(cli):
    """Two messages that cannot be read: m1 in the store, m2 in the queue orders; and one of each that can be."""
    cli.ok("setup", "--queue", "orders")

    async def put() -> None:
        store, transport = SqliteStore("postdate.db"), LocalTransport("postdate.db")
        waiting = [DelayedMessage(id_, IN_2126, "orders", {"a": "b"}, b"\x00\xffbody") for id_ in ("m1", "good")]
        await store.store_many(waiting, NOW)
        queued = [Envelope("orders", id_, {}, b'{"id": 2}') for id_ in ("m2", "fine")]
        assert await transport.send(queued, NOW) == [None, None]
        await transport.close()
        await store.close()

    async def meet() -> None:
        store, transport = SqliteStore("postdate.db"), LocalTransport("postdate.db")
        assert [each.message.message_id for each in await store.claim_due(IN_2126.replace(year=2127), 10)] == ["good"]
        receiver = transport.receiver("orders")
        assert [each.envelope.message_id for each in await receiver.receive(10)] == ["fine"]
        await receiver.close()
        await transport.close()
        await store.close()

    anyio.run(put)
    damage("m1", "delayed_message")
    damage("m2", "queue_message", b"\x80\x81 no text")
    anyio.run(meet)


def test_they_are_listed_with_place_id_reason_and_time(cli, damaged):
    found = cli.ok("messages", "list", "--unreadable", "--json").json
    assert found["total"] == 2
    in_store, in_queue = found["messages"]
    assert (in_store["name"], in_store["queue"], in_store["message_id"]) == ("s1", None, "m1")
    assert (in_queue["name"], in_queue["queue"], in_queue["message_id"]) == ("q1", "orders", "m2")
    assert "headers must be a JSON object" in in_store["reason"]
    assert datetime.fromisoformat(in_store["at"]).tzinfo is not None
    text = cli.ok("messages", "list", "--unreadable").out
    assert text.startswith("unreadable  since ")
    assert "(store)" in text
    assert "… and 1 more; use --limit" in cli.ok("messages", "list", "--unreadable", "--limit", "1").out
    assert [each["message_id"] for each in cli.ok("messages", "list", "--json").json["messages"]] == ["good"]


def test_failed_messages_are_listed_beside_them(cli, damaged):
    found = cli.ok("errors", "list", "--json").json
    assert (found["queue"], found["total"], found["unreadable"]["total"]) == ("error", 0, 2)
    assert cli.ok("errors", "list").out.startswith("queue error is empty\n\nunreadable  since ")


def test_that_there_are_none_is_said(cli):
    cli.ok("setup")
    assert cli.ok("errors", "list").out == "queue error is empty\n"
    assert cli.ok("messages", "list", "--unreadable").out == "every message can be read\n"
    assert "unreadable" not in cli.ok("messages", "stats").out
    assert "ok    unreadable      none: every message can be read" in cli.ok("doctor").out


def test_one_is_shown_in_hex_by_name_and_by_id(cli, damaged):
    out = cli.ok("messages", "show", "--unreadable", "s1").out
    assert "s1, unreadable since 2127-01-31T12:00:00Z\n" in out
    assert "in      (store)" in out
    assert "\nheaders (9 bytes)\n00000000  7b 6e 6f 74 20 6a 73 6f 6e                       {not json\n" in out
    assert "\nbody (6 bytes)\n00000000  00 ff 62 6f 64 79                                ..body\n" in out
    shown = cli.ok("messages", "show", "m1")
    assert out.strip() in shown.out
    assert "failed" in shown.out
    found = cli.ok("messages", "show", "--unreadable", "q1", "--json").json
    assert found["message"]["message_id"] == "m2"
    assert found["raw"]["headers"] == b"\x80\x81 no text".hex()
    assert bytes.fromhex(found["raw"]["body"]) == b'{"id": 2}'
    assert cli.ok("messages", "show", "m2", "--json").json["unreadable"] == [found]


@pytest.mark.parametrize("name", ["s9", "q9", "x1", "1", "s1x", "s99999999999999999999"])
def test_what_is_not_there_is_said(cli, damaged, name):
    missing = cli("messages", "show", "--unreadable", name)
    assert missing.status == 1
    assert "[message_not_found]" in missing.err
    ran = cli("messages", "discard", name)
    assert ran.status == 1
    assert f"{name}: not discarded: no unreadable row" in ran.out


def test_a_message_waits_again_once_its_row_is_mended_with_sql(cli, damaged):
    """The statements are those of docs/guides/operate.md."""
    with closing(sqlite3.connect("postdate.db")) as file, file:
        file.execute("""
            UPDATE content SET headers = '{"a": "mended"}'
            WHERE seq = (SELECT content FROM delayed_message WHERE seq = 1)""")
        file.execute("""
            UPDATE delayed_message SET attempt_at = due, unreadable = NULL, unreadable_at = NULL
            WHERE seq = 1 AND unreadable IS NOT NULL""")
    (place,) = cli.ok("messages", "show", "m1", "--json").json["places"]
    assert (place["where"], place["headers"]) == ("waiting", {"a": "mended"})
    assert place["body"]["base64"] == "AP9ib2R5"
    assert cli.ok("messages", "list", "--unreadable", "--json").json["total"] == 1


def test_they_are_discarded_for_good(cli, damaged):
    assert cli.ok("messages", "discard", "s1", "q1").out == "s1: discarded\nq1: discarded\n"
    assert cli.ok("messages", "list", "--unreadable").out == "every message can be read\n"
    assert cli.ok("messages", "explain", "m1", "--json").json["state"] == "discarded"


def test_one_is_explained_with_the_next_command(cli, damaged):
    for message_id, name, where in (("m1", "s1", "in the store"), ("m2", "q1", "in queue 'orders'")):
        found = cli.ok("messages", "explain", message_id, "--json").json
        assert found["state"] == "unreadable"
        assert found["headline"].startswith("it cannot be read: headers must be")
        assert where in found["facts"][0]
        assert found["advice"][0] == f"see its content: postdate messages show --unreadable {name}"
        assert found["advice"][-1] == f"or discard it permanently: postdate messages discard {name}"


def test_whoever_cancels_or_reschedules_one_is_told_why_it_stays(cli, damaged):
    for command in (("cancel", "m1"), ("reschedule", "m1", "--delay", "1h")):
        ran = cli("messages", *command)
        assert ran.status == 1
        assert "m1: not" in ran.out
        assert "it cannot be read: headers must be" in ran.out
    assert cli.ok("messages", "list", "--unreadable", "--json").json["total"] == 2


def test_doctor_and_stats_count_them(cli, damaged):
    found = {check["name"]: check for check in cli.ok("doctor", "--json").json["checks"]}["unreadable"]
    assert (found["result"], found["found"]) == ("warn", "2 messages cannot be read")
    assert "postdate messages list --unreadable" in found["mend"]
    assert cli.ok("messages", "stats", "--json").json["unreadable"] == 2
    assert cli.ok("messages", "stats", "--json").json["pending"] == 1
    assert "unreadable  2\n" in cli.ok("messages", "stats").out
