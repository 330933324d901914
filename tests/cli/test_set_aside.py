"""What cannot be read: seen by an operator wherever it was, mended, put back, deleted; nothing else waits for it."""

import sqlite3
from datetime import UTC, datetime
from pathlib import Path

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
    found = cli.ok("errors", "list", "--json").json
    assert (found["queue"], found["total"]) == ("error", 0)
    assert found["set_aside"]["total"] == 2
    in_store, in_queue = found["set_aside"]["messages"]
    assert (in_store["name"], in_store["queue"], in_store["message_id"]) == ("s1", None, "m1")
    assert (in_queue["name"], in_queue["queue"], in_queue["message_id"]) == ("q2", "orders", "m2")
    assert "headers must be a JSON object" in in_store["reason"]
    assert datetime.fromisoformat(in_store["at"]).tzinfo is not None
    text = cli.ok("errors", "list").out
    assert text.startswith("queue error is empty\n\nset aside  at ")
    assert "(store)" in text
    assert cli.ok("errors", "list", "--set-aside", "--json").json == found["set_aside"]
    assert "… and 1 more; use --limit" in cli.ok("errors", "list", "--set-aside", "--limit", "1").out


def test_nothing_set_aside_is_said(cli):
    cli.ok("setup")
    assert cli.ok("errors", "list").out == "queue error is empty\n"
    assert cli.ok("errors", "list", "--set-aside").out == "nothing is set aside\n"
    assert "set aside" not in cli.ok("messages", "stats").out
    assert "ok    set aside       nothing" in cli.ok("doctor").out


def test_one_is_shown_with_its_bytes(cli, damaged):
    out = cli.ok("errors", "show", "--set-aside", "s1").out
    assert "s1, set aside at 2127-01-31T12:00:00Z\n" in out
    assert "was in  (store)" in out
    assert "\nheaders (9 bytes)\n{not json\n" in out
    assert "\nbody (6 bytes)\n00000000  00 ff 62 6f 64 79                                ..body\n" in out
    found = cli.ok("errors", "show", "--set-aside", "q2", "--json").json
    assert found["message"]["message_id"] == "m2"
    assert found["raw"]["headers"] == {"size_bytes": 10, "text": None, "base64": "gIEgbm8gdGV4dA=="}
    assert found["raw"]["body"]["text"] == '{"id": 2}'


@pytest.mark.parametrize("name", ["s9", "q1", "x1", "1", "s1x", "s99999999999999999999"])
def test_what_is_not_there_is_said(cli, damaged, name):
    missing = cli("errors", "show", "--set-aside", name)
    assert missing.status == 1
    assert "[message_not_found]" in missing.err
    ran = cli("errors", "return", "--set-aside", name)
    assert ran.status == 1
    assert f"{name}: not put back: nothing of" in ran.out
    assert cli("errors", "delete", name).status == 1


def test_a_message_is_mended_and_waits_again(cli, damaged):
    ran = cli("errors", "return", "--set-aside", "s1")
    assert ran.status == 1
    assert "s1: not put back: headers must be a JSON object" in ran.out
    due, headers = "2126-02-01T00:00:00Z", '{"a": "mended"}'
    ran = cli.ok("errors", "return", "--set-aside", "s1", "--headers", headers, "--due", due, "--destination", "bills")
    assert ran.out == "s1: put back\n"
    (place,) = cli.ok("messages", "show", "m1", "--json").json["places"]
    assert (place["where"], place["queue"], place["due"]) == ("waiting", "bills", due)
    assert place["headers"] == {"a": "mended"}
    assert place["body"]["base64"] == "AP9ib2R5"
    assert cli.ok("errors", "list", "--json").json["set_aside"]["total"] == 1


def test_a_message_of_a_queue_is_mended_with_files(cli, damaged):
    Path("headers.json").write_text('{"tenant": "7"}')
    Path("body.bin").write_bytes(b"\xff")
    refused = cli("errors", "return", "--set-aside", "q2", "--headers", "{}", "--due", "2126-02-01T00:00:00Z")
    assert refused.status == 1
    assert "only its headers and its body can be mended" in refused.out
    ran = cli.ok("errors", "return", "--set-aside", "q2", "--headers", "@headers.json", "--body", "@body.bin", "--json")
    assert ran.json == {"messages": [{"name": "q2", "done": True, "remark": ""}]}
    (place,) = cli.ok("messages", "show", "m2", "--json").json["places"]
    assert (place["where"], place["queue"], place["headers"]) == ("queue", "orders", {"tenant": "7"})
    assert place["body"]["base64"] == "/w=="


def test_what_was_mended_by_hand_is_put_back_as_it_is(cli, damaged):
    connection = sqlite3.connect("postdate.db")
    with connection:
        connection.execute("UPDATE quarantine SET headers = '{}'")
    connection.close()
    ran = cli.ok("errors", "return", "--set-aside", "s1", "--set-aside", "q2")
    assert ran.out == "s1: put back\nq2: put back\n"


def test_one_is_deleted_for_good(cli, damaged):
    assert cli.ok("errors", "delete", "s1", "q2").out == "s1: deleted\nq2: deleted\n"
    assert cli.ok("errors", "list", "--set-aside").out == "nothing is set aside\n"
    found = cli.ok("messages", "explain", "m1", "--json").json
    assert found["state"] == "discarded"


def test_a_message_that_was_set_aside_is_explained_with_the_next_command(cli, damaged):
    for message_id, name, where in (("m1", "s1", "in the store"), ("m2", "q2", "in queue 'orders'")):
        found = cli.ok("messages", "explain", message_id, "--json").json
        assert found["state"] == "set_aside"
        assert found["headline"].startswith("it was set aside because headers must be")
        assert where in found["facts"][0]
        assert found["advice"][0] == f"see what it holds: postdate errors show --set-aside {name}"


def test_doctor_and_stats_count_them(cli, damaged):
    found = {check["name"]: check for check in cli.ok("doctor", "--json").json["checks"]}["set aside"]
    assert (found["result"], found["found"]) == ("warn", "2 messages that cannot be read")
    assert "postdate errors list --set-aside" in found["mend"]
    assert cli.ok("messages", "stats", "--json").json["set_aside"] == 2
    assert "set aside  2\n" in cli.ok("messages", "stats").out
