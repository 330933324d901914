"""The worked example of a saga runs in one file and, by its settings alone, on PostgreSQL and RabbitMQ."""

import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from examples.orders import __main__ as orders
from examples.orders.saga import CancelOrder, GrantMoreTime, PaymentReceived, PlaceOrder, SendMail
from tests.postgres_subjects import drop_schema, fresh_schema
from tests.rabbitmq_subjects import channel_of

from postdate.testing import EndpointTest

PLACED, PAID = "we have your order", "thank you for"
MORE_TIME = "you have 75 minutes more"
CANCELLED, NOT_PAID = "your order is cancelled, as you wished", "your order is cancelled: it was not paid"
STORIES = {
    "Ada": [PLACED, "reminder 1", PAID],
    "Ben": [PLACED, "reminder 1", "reminder 2", CANCELLED],
    "Cleo": [PLACED, "reminder 1", "reminder 2", "reminder 3", NOT_PAID],
    "Dan": [PLACED, "reminder 1", MORE_TIME, "reminder 2", "reminder 3", PAID],
}
MAILS = {mail for story in STORIES.values() for mail in story}


@pytest.fixture(params=["one file", "PostgreSQL and RabbitMQ"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Variables that say where the orders are: nowhere else is anything then, and no queue has anything in the end."""
    if request.param == "one file":
        yield {}
        assert (tmp_path / "postdate.db").exists()
        return
    postgres_url, rabbitmq_url = (request.getfixturevalue(f"{server}_url") for server in ("postgres", "rabbitmq"))
    schema, name = fresh_schema(), f"orders-{uuid.uuid4().hex[:12]}"
    try:
        yield {
            "POSTDATE_ENDPOINT__NAME": name,
            "POSTDATE_ENDPOINT__ERROR_QUEUE": f"{name}.error",
            "POSTDATE_STORE__ADDRESS": postgres_url,
            "POSTDATE_STORE__SCHEMA": schema,
            "POSTDATE_TRANSPORT__ADDRESS": rabbitmq_url,
        }
    finally:
        drop_schema(postgres_url, schema)
        with channel_of(rabbitmq_url) as channel:
            left = [
                channel.queue_delete(f"{name}{end}").method.message_count
                for end in ("", ".timeouts", ".customers", ".error")
            ]
    assert left == [0, 0, 0, 0]
    assert not list(tmp_path.iterdir())


def test_each_order_ends_by_settings_alone(settings: dict[str, str], tmp_path: Path) -> None:
    """Each is confirmed and ended, and no mail comes twice; it is not paid where the machine stands still."""
    for customer, mails in _mails(tmp_path, settings).items():
        assert PLACED in mails, mails
        assert mails[-1] in {STORIES[customer][-1], NOT_PAID}, mails
        assert len(mails) == len(set(mails)), mails


def test_who_answers_at_once_has_the_end_of_the_answer(
    settings: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An hour is an hour here: however long the machine stands still, nobody has not paid."""
    habits = {
        "Ada": {PLACED: PaymentReceived},
        "Ben": {PLACED: CancelOrder},
        "Dan": {PLACED: GrantMoreTime, MORE_TIME: PaymentReceived},
    }
    monkeypatch.setattr(orders, "_HABITS", habits)
    monkeypatch.chdir(tmp_path)
    for variable in [each for each in os.environ if each.startswith("POSTDATE_")]:
        monkeypatch.delenv(variable)
    for variable, value in settings.items():
        monkeypatch.setenv(variable, value)
    orders.main(speed=1)
    told = _told(capsys.readouterr().out)
    assert told == {"Ada": [PLACED, PAID], "Ben": [PLACED, CANCELLED], "Dan": [PLACED, MORE_TIME, PAID]}


@pytest.mark.parametrize("customer", STORIES)
async def test_each_story_is_as_it_is_told_in_virtual_time(customer: str) -> None:
    async with EndpointTest(lambda endpoint: orders.configure(endpoint, "mails")) as test:
        await test.send(PlaceOrder("o-1", customer, 10))
        read = list[str]()
        for _ in range(120):
            while len(read) < len(mails := test.sent_to("mails")):
                mail = mails[len(read)]
                assert isinstance(mail, SendMail)
                read.append(mail.text)
                for words, answer in orders._HABITS[customer].items():
                    if mail.text.startswith(words):
                        extra = {"minutes": 75} if answer is GrantMoreTime else {}
                        await test.send(answer("o-1", **extra))
            await test.advance(minutes=1)
        assert [_words(text) for text in read] == STORIES[customer]
        assert await test.waiting() == []


@pytest.mark.soak(
    "a machine that stands still for a second tells another story: it lasts a quarter of an hour there",
    part="clocks",
    proven_by=(
        "tests/docs/test_orders.py::test_each_story_is_as_it_is_told_in_virtual_time",
        "tests/docs/test_orders.py::test_who_answers_at_once_has_the_end_of_the_answer",
    ),
)
def test_the_stories_are_as_they_are_told(settings: dict[str, str], tmp_path: Path) -> None:
    for customer, mails in _mails(tmp_path, settings).items():
        # Timeouts of one order that are due together have no order, and the last may be first.
        assert set(STORIES[customer]) - set(mails) <= {"reminder 2", "reminder 3"}, mails
        assert mails[-1] == STORIES[customer][-1], mails


def test_a_wrong_setting_is_told_in_one_line_without_passwords(tmp_path: Path) -> None:
    nobody = "postgresql://user:sesame@127.0.0.1:1/shop"
    done = _run(tmp_path, {"POSTDATE_STORE__ADDRESS": nobody, "POSTDATE_TRANSPORT__ADDRESS": nobody})
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, "")
    assert line.startswith("error [store_un")
    assert "POSTDATE_STORE__ADDRESS" in line
    assert "sesame" not in line


def _mails(folder: Path, settings: dict[str, str]) -> dict[str, list[str]]:
    done = _run(folder, settings)
    assert done.returncode == 0, done.stderr
    told = _told(done.stdout)
    assert told.keys() == STORIES.keys()
    return told


def _told(printed: str) -> dict[str, list[str]]:
    """Return the mails to each customer in order, cut to the words that are told above."""
    told = dict[str, list[str]]()
    for customer, text in re.findall(r"^ *\d+ min  (\w+) +(.*)$", printed, re.MULTILINE):
        told.setdefault(customer, []).append(_words(text))
    return told


def _words(text: str) -> str:
    (words,) = (each for each in MAILS if text.startswith(each))
    return words


def _run(folder: Path, settings: dict[str, str]) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("POSTDATE_")}
    command = [sys.executable, "-m", "examples.orders", "--speed", "900"]
    beside = {"PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(
        command, cwd=folder, env={**clean, **beside, **settings}, capture_output=True, text=True, check=False
    )
