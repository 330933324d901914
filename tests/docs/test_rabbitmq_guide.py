"""The guide to delays on RabbitMQ is a story: its settings, the service, then its snippets in order."""

import re
import subprocess
import uuid
from pathlib import Path

import pytest
from tests import newcomer
from tests.azure_server import Azurite
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
    environment = newcomer.environment(NODE_PATH=str(Azurite.modules()))
    environment = {key: each for key, each in environment.items() if not key.startswith("POSTDATE_")}
    log = tmp_path / "log"
    with log.open("wb") as to:
        service = subprocess.Popen(["postdate", "run"], cwd=tmp_path, stderr=to, env=environment)
    try:
        eventually(lambda: service.poll() is not None or "published to exchange" in log.read_text(), "it runs")
        snippets = re.findall(r"^```(python|js)\n(.*?)^```\n+It prints `([^`]*)`", guide, re.DOTALL | re.MULTILINE)
        assert [language for language, _, _ in snippets] == ["python", "js", "python"]
        for language, code, said in snippets:
            program = [newcomer.PYTHON, "-c"] if language == "python" else ["node", "-e"]
            done = subprocess.run(
                [*program, code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
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
