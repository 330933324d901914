"""The client beside a service: they find each other by the same settings, and the command line sees what it does."""

from datetime import timedelta

import pytest

import postdate

HOUR = timedelta(hours=1)


def test_what_a_client_sends_a_service_delivers(
    cli, service, eventually, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTDATE_ENDPOINT__NAME", "shop")
    cli.ok("setup", "--queue", "mails")
    service()
    with postdate.connect().blocking as client:  # without arguments, as every command
        client.send(b"now", destination="mails")
        client.send(b"soon", destination="mails", delay=timedelta(milliseconds=10))
        later = client.send(b"later", destination="mails", delay=HOUR)
        eventually(lambda: cli.ok("messages", "stats", "--json").json["queues"]["mails"] == 2, "two are in their queue")
        assert [each["message_id"] for each in cli.ok("messages", "list", "--json").json["messages"]] == [later]
        assert client.explain(later).headline in cli.ok("messages", "explain", later).out.replace("\n", " ")
        assert client.cancel(later)
        assert "cancelled" in cli.ok("messages", "explain", later).out
    assert not [each for each in caplog.records if each.name == "postdate.client"]
