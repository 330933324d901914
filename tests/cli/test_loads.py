"""``postdate pipeline loads`` and ``schedule --sync``: their JSON, their exit codes, and how a mistake ends."""

import pytest
from tests import java

HEADER = "message_id,due,destination,body\n"
FIRST = "r1,2126-01-31T11:00:00Z,reminders,first\n"
SECOND = "r2,2126-01-31T12:00:00Z,bills,second\n"
SPARK = ("--cores", "1")


@pytest.mark.soak(
    "nine commands on Spark",
    part="docs",
    proven_by="tests/cli/test_docs.py::test_every_example_prints_what_the_page_says",
)
def test_a_plan_is_synced_listed_shown_compared_and_undone(cli, tmp_path_factory, monkeypatch):
    folder = java.folder(tmp_path_factory)
    monkeypatch.chdir(folder)
    plan, changed = folder / "plan.csv", folder / "changed.csv"
    plan.write_text(HEADER + FIRST + SECOND)
    changed.write_text(HEADER + FIRST.replace("first", "other") + "r3,soon,reminders,third\n")
    sync = ("pipeline", "schedule", str(plan), "--load", "spring", "--sync", *SPARK)
    with java.lasting(folder):
        trial = cli.ok(*sync, "--dry-run", "--json").json
        assert (trial["accepted"], trial["sync"]["cancelled"], trial["is_dry_run"]) == (2, 0, True)
        assert list(folder.glob("*.db")) == []
        done = cli.ok(*sync, "--json").json
        assert (done["load"], done["read"], done["accepted"]) == ("spring", 2, 2)
        assert cli.ok(*sync, "--json").json["sync"]["unchanged"] == 2

        (line,) = cli.ok("pipeline", "loads", "list", *SPARK, "--json").json["loads"]
        assert (line["load"], line["messages"], line["destinations"]) == ("spring", 2, 2)
        shown = cli.ok("pipeline", "loads", "show", "spring", *SPARK, "--json").json
        assert [(each["destination"], each["day"], each["messages"]) for each in shown["groups"]] == [
            ("bills", "2126-01-31", 1),
            ("reminders", "2126-01-31", 1),
        ]
        assert [each["message_id"] for each in shown["sample"]] == ["r1", "r2"]

        compared = cli("pipeline", "loads", "diff", "spring", str(changed), *SPARK, "--json")
        assert compared.status == 1
        sync_counts = compared.json["sync"]
        assert (sync_counts["replaced"], sync_counts["cancelled"], sync_counts["retained"]) == (1, 0, 1)
        text = cli("pipeline", "loads", "diff", "spring", str(changed), *SPARK).out
        assert "not in the table, kept  1" in text
        assert "rows were set aside, so nothing would be cancelled" in text
        assert cli.ok("messages", "show", "r1", "--json").json["places"][0]["headers"] == {"Postdate.Load": "spring"}

        unknown = cli("pipeline", "loads", "show", "summer", *SPARK)
        assert (unknown.status, unknown.out) == (2, "")
        assert "no message waits under the load 'summer': see `postdate pipeline loads list`" in unknown.err
        assert cli.ok("pipeline", "loads", "undo", "spring", "--dry-run", *SPARK, "--json").json["cancelled"] == 2
        assert cli.ok("pipeline", "loads", "undo", "spring", *SPARK, "--json").json["cancelled"] == 2
        assert cli.ok("pipeline", "loads", "undo", "spring", *SPARK, "--json").json["waiting"] == 0
        plan.write_text(HEADER)
        empty = cli(*sync)
        assert empty.status == 2
        assert "the input has no rows, so every message of the load 'spring' would be cancelled" in empty.err
    assert cli.ok("messages", "list").out == "no messages wait\n"
