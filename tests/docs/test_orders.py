"""The worked example of a saga runs in one file and, by its settings alone, on PostgreSQL and RabbitMQ."""

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from tests.postgres_subjects import drop_schema, fresh_schema
from tests.rabbitmq_subjects import channel_of

PLACED, PAID = "we have your order", "thank you for"
CANCELLED, NOT_PAID = "your order is cancelled, as you wished", "your order is cancelled: it was not paid"
STORIES = {
    "Ada": [PLACED, "reminder 1", PAID],
    "Ben": [PLACED, "reminder 1", "reminder 2", CANCELLED],
    "Cleo": [PLACED, "reminder 1", "reminder 2", "reminder 3", NOT_PAID],
    "Dan": [PLACED, "reminder 1", "you have 75 minutes more", "reminder 2", "reminder 3", PAID],
}
MAILS = {mail for story in STORIES.values() for mail in story}


def test_in_one_file(tmp_path: Path) -> None:
    _expect_an_end_of_each(_mails(tmp_path, {}))
    assert (tmp_path / "postdate.db").exists()


@pytest.mark.soak(
    "a machine that stands still for a second tells another story: it lasts a quarter of an hour there",
    part="clocks",
    proven_by=(
        "tests/unit/sagas/test_endpoint_test.py::test_an_order_that_is_not_paid_is_reminded_of_three_times_and_ends_after_an_hour",
        "tests/unit/sagas/test_endpoint_test.py::test_an_order_that_ends_early_is_reminded_of_no_more",
        "tests/unit/sagas/test_endpoint_test.py::test_more_time_moves_the_end",
    ),
)
def test_the_stories_are_as_they_are_told(tmp_path: Path) -> None:
    for customer, mails in _mails(tmp_path, {}).items():
        # Timeouts of one order that are due together have no order, and the last may be first.
        assert set(STORIES[customer]) - set(mails) <= {"reminder 2", "reminder 3"}, mails
        assert mails[-1] == STORIES[customer][-1], mails


def test_on_postgresql_and_rabbitmq_by_settings_alone(postgres_url: str, rabbitmq_url: str, tmp_path: Path) -> None:
    schema, name = fresh_schema(), f"orders-{uuid.uuid4().hex[:12]}"
    settings = {
        "POSTDATE_ENDPOINT__NAME": name,
        "POSTDATE_ENDPOINT__ERROR_QUEUE": f"{name}.error",
        "POSTDATE_STORE__ADDRESS": postgres_url,
        "POSTDATE_STORE__SCHEMA": schema,
        "POSTDATE_TRANSPORT__ADDRESS": rabbitmq_url,
    }
    try:
        _expect_an_end_of_each(_mails(tmp_path, settings))
    finally:
        drop_schema(postgres_url, schema)
        with channel_of(rabbitmq_url) as channel:
            left = [
                channel.queue_delete(f"{name}{end}").method.message_count
                for end in ("", ".timeouts", ".customers", ".error")
            ]
    assert left == [0, 0, 0, 0]
    assert not list(tmp_path.iterdir())


def test_a_wrong_setting_is_told_in_one_line_without_passwords(tmp_path: Path) -> None:
    nobody = "postgresql://user:sesame@127.0.0.1:1/shop"
    done = _run(tmp_path, {"POSTDATE_STORE__ADDRESS": nobody, "POSTDATE_TRANSPORT__ADDRESS": nobody})
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, "")
    assert line.startswith("error [store_un")
    assert "POSTDATE_STORE__ADDRESS" in line
    assert "sesame" not in line


def _expect_an_end_of_each(told: dict[str, list[str]]) -> None:
    """Each order is confirmed and ended, and no mail comes twice; it is not paid where the machine stands still."""
    for customer, mails in told.items():
        assert PLACED in mails, mails
        assert mails[-1] in {STORIES[customer][-1], NOT_PAID}, mails
        assert len(mails) == len(set(mails)), mails


def _mails(folder: Path, settings: dict[str, str]) -> dict[str, list[str]]:
    """Return the mails to each customer in order, cut to the words that are told above."""
    done = _run(folder, settings)
    assert done.returncode == 0, done.stderr
    told: dict[str, list[str]] = {customer: [] for customer in STORIES}
    for customer, text in re.findall(r"^ *\d+ min  (\w+) +(.*)$", done.stdout, re.MULTILINE):
        words = [each for each in MAILS if text.startswith(each)]
        assert words, text
        told[customer] += words
    return told


def _run(folder: Path, settings: dict[str, str]) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("POSTDATE_")}
    command = [sys.executable, "-m", "postdate.demo.orders", "--speed", "900"]
    return subprocess.run(command, cwd=folder, env={**clean, **settings}, capture_output=True, text=True, check=False)
