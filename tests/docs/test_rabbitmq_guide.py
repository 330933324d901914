"""The guide to delays on RabbitMQ is a story: its settings, the service, then its snippets in order."""

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from tests.rabbitmq_subjects import channel_of

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "rabbitmq-delay.md"
_LOCALHOST = "amqp://guest:guest@localhost/"


@pytest.fixture
def guide(rabbitmq_url: str) -> str:
    """Return the guide on the server of the tests, with names of this test's own."""
    own = uuid.uuid4().hex[:12]
    text = GUIDE.read_text(encoding="utf-8").replace(_LOCALHOST, rabbitmq_url)
    return text.replace("reminders", f"reminders-{own}").replace('"mails"', f'"mails-{own}"')


def test_the_story_goes_as_it_is_told(guide: str, rabbitmq_url: str, tmp_path: Path, eventually) -> None:
    settings = re.findall(r"^```toml postdate.toml\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)[0]
    name, queue = re.findall(r"reminders-\w+|mails-\w+", guide)[0], re.findall(r"mails-\w+", guide)[0]
    (tmp_path / "postdate.toml").write_text(f'{settings}[endpoint]\nname = "{name}"\nerror_queue = "{name}.error"\n')
    environment = {key: value for key, value in os.environ.items() if not key.startswith("POSTDATE_")}
    log = tmp_path / "log"
    with log.open("wb") as to:
        command = [sys.executable, "-m", "postdate.cli", "run"]
        service = subprocess.Popen(command, cwd=tmp_path, stderr=to, env=environment)
    try:
        eventually(lambda: service.poll() is not None or "published to exchange" in log.read_text(), "it runs")
        snippets = re.findall(r"^```python\n(.*?)^```\n+It prints `([^`]*)`", guide, re.DOTALL | re.MULTILINE)
        assert len(snippets) == guide.count("```python\n") > 1
        for code, said in snippets:
            done = subprocess.run(
                [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr + log.read_text()
            assert done.stdout == f"{said}\n"
    finally:
        service.terminate()
        service.wait()
        with channel_of(rabbitmq_url) as channel:
            for each in (f"{name}.intake", f"{name}.intake.expired", f"{name}.timeouts", f"{name}.error", queue):
                channel.queue_delete(each)
            for each in (name, f"{name}.due", f"{name}.intake.expired"):
                channel.exchange_delete(each)
