"""Every example in docs/cli, and in four other pages, runs and prints what the page says.

A ``console`` block has lines ``$ command`` followed by what it prints, standard output first. ``…`` stands for any
text in a line; a line that is only ``…`` for any lines. The blocks of a page are one story in one empty folder. A block
whose fence names a file (``toml postdate.toml``) is that file. ``postdate run &`` runs until the page ends; while it
does, commands that only look are asked again until they print what the page says, for delivering takes a moment.
``echo $?`` shows the exit code of the command before.

Commands run in this process, through the same entry point, so that Java is started once for all; what needs the shell
is given to it. So are the first commands of a user, where the pages show them first: they are processes.
"""

import json
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests import java, newcomer
from tests.waiting import READY, Eventually

from postdate.cli import destinations, diagnosis, error_queue, messages, pipeline, queues
from postdate.cli.command import EXPLANATIONS
from postdate.cli.entry import app

if TYPE_CHECKING:
    from tests.cli.conftest import CommandLine

PAGES = Path(__file__).parents[2] / "docs" / "cli"
_OTHERS = ("backup", "security", "start/data-engineer", "upgrading")
STORIES = [*sorted(PAGES.glob("*.md")), *(PAGES.parent / f"{name}.md" for name in _OTHERS)]
_BLOCK = re.compile(r"^```(\S+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_AS_PROCESSES = ("setup", "send", "messages list")
_GROUPS = ("bench", "config", "destinations", "errors", "messages", "queues")
_LOOKS = ("messages list", "messages explain", "messages stats", "errors list")


@dataclass(frozen=True)
class Example:
    """One command and what it prints."""

    command: str
    expected: str


def examples(block: str) -> Iterator[Example]:
    """Take a console block apart."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        yield Example(command, expected)


def pattern(expected: str) -> re.Pattern[str]:
    """Return what the output must match in full; white space at the ends of lines does not count."""
    lines = [
        r"(?:.*\n)*?" if line == "…" else ".*".join(re.escape(part) for part in line.rstrip().split("…")) + "\n"
        for line in expected.splitlines()
    ]
    return re.compile("".join(lines))


def tidy(output: str) -> str:
    """Return the output without white space at the ends of lines."""
    return "".join(line.rstrip() + "\n" for line in output.splitlines())


def command_of(words: list[str]) -> str:
    """Return which command it is: its name, with that of its group."""
    return " ".join(words[1:3]) if words[1] in _GROUPS else words[1]


@cache
def shown_first() -> frozenset[tuple[str, str]]:
    """Return where each command that is a process is shown for the first time: the page, and what is typed."""
    first = dict[str, tuple[str, str]]()
    for page in sorted(PAGES.glob("*.md")):
        for kind, _, block in _BLOCK.findall(page.read_text(encoding="utf-8")):
            for example in examples(block) if kind == "console" else ():
                if (words := plain_words(example.command)) is not None and command_of(words) in _AS_PROCESSES:
                    first.setdefault(command_of(words), (page.stem, example.command))
    return frozenset(first.values())


def plain_words(command: str) -> list[str] | None:
    """Return the words of a command of Postdate's that does not need the shell; else None."""
    tokens = list(shlex.shlex(command, posix=True, punctuation_chars=True))
    if not tokens or tokens[0] != "postdate" or any(set(token) <= set("();<>|&") for token in tokens):
        return None
    return None if "$" in command else shlex.split(command)


@dataclass
class Story:
    """One page being run."""

    page: str
    folder: Path
    cli: "CommandLine"
    eventually: Eventually
    status: int = 0
    services: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def run(self, example: Example) -> None:
        """Run one command and compare."""
        if example.command == "echo $?":
            assert example.expected == f"{self.status}\n"
        elif example.command.endswith(" &"):
            self.start(example)
        elif self.services and any(look in example.command for look in _LOOKS):
            what = f"{example.command} prints\n{example.expected}"
            self.eventually(lambda: self.matches(example), what)
        else:
            assert self.matches(example), f"$ {example.command}\n{self.printed}\n--- expected:\n{example.expected}"

    def matches(self, example: Example) -> bool:
        self.printed = tidy(self.printed_by(example.command))
        return pattern(example.expected).fullmatch(self.printed) is not None

    def printed_by(self, command: str) -> str:
        words = plain_words(command)
        if words is None or (self.page, command) in shown_first() or not newcomer.IS_OF_THE_TESTS:
            return self.shell(command)
        ran = self.cli(*words[1:])
        self.status = ran.status
        return ran.out + ran.err

    def shell(self, command: str) -> str:
        ended = subprocess.run(
            ["/bin/sh", "-c", command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        self.status = ended.returncode
        return ended.stdout + ended.stderr

    @property
    def environment(self) -> dict[str, str]:
        return newcomer.environment()

    def start(self, example: Example) -> None:
        """Start a service; it has started when it has logged what the page says."""
        log = self.folder / f"service{len(self.services)}.log"
        with log.open("wb") as file:
            command = example.command.removesuffix(" &").split()
            self.services.append(
                subprocess.Popen(command, cwd=self.folder, env=self.environment, stdout=file, stderr=file)
            )
        self.eventually(lambda: READY in log.read_text(), "the service is ready")
        self.eventually(self.is_seen, "others see the service")
        assert pattern(example.expected).fullmatch(tidy(log.read_text()))

    def is_seen(self) -> bool:
        """Tell whether senders see that somebody delivers; it says so when it listens, just after its log."""
        return json.loads(self.printed_by("postdate messages stats --json"))["services"] == len(self.services)

    def end(self) -> None:
        """Stop the services; they must end well."""
        for service in self.services:
            service.send_signal(signal.SIGTERM)
        assert [service.wait() for service in self.services] == [0] * len(self.services)


@pytest.fixture
def empty_folder(tmp_path_factory: pytest.TempPathFactory, own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in the folder of all stories, with nothing in it and no settings in the environment."""
    folder = java.folder(tmp_path_factory)
    monkeypatch.chdir(folder)
    return folder


_LONG = {
    "pipeline-history": ("test_history.py::test_every_record_is_in_the_lake_once_and_again_only_what_is_new",),
    "pipeline-loads": (
        "test_loads.py::test_what_waits_becomes_the_table_and_each_change_is_counted",
        "test_loads.py::test_loads_are_listed_shown_and_undone",
    ),
}
"""Pages whose commands are whole jobs on Spark, and the tests that prove what they show."""


def _page(page):
    proofs = tuple(f"tests/integration/pipeline/{test}" for test in _LONG.get(page.stem, ()))
    marks = [pytest.mark.soak("whole jobs on Spark", part="docs", proven_by=proofs)] if proofs else []
    return pytest.param(page, id=page.stem, marks=marks)


@pytest.mark.parametrize("page", list(map(_page, STORIES)))
def test_every_example_prints_what_the_page_says(page, empty_folder, cli, eventually):
    story, text = Story(page.stem, empty_folder, cli, eventually), page.read_text(encoding="utf-8")
    on_spark = re.search(r"^\$ postdate pipeline .* --cores", text, re.MULTILINE)
    with java.lasting(empty_folder) if on_spark and newcomer.IS_OF_THE_TESTS else nullcontext():
        try:
            for kind, name, block in _BLOCK.findall(text):
                if name:
                    (empty_folder / name).write_text(block, encoding="utf-8")
                elif kind == "console":
                    for example in examples(block):
                        story.run(example)
        finally:
            story.end()


def test_every_page_has_examples():
    for page in STORIES:
        assert "```console\n$ " in page.read_text(encoding="utf-8"), page


def commands() -> Iterator[str]:
    """Return all commands, as they are typed."""
    for command in app.registered_commands:
        if not command.hidden:
            yield str(command.name)
    for group in (destinations.app, diagnosis.config, error_queue.app, messages.app, pipeline.app, queues.app):
        for command in group.registered_commands:
            yield f"{group.info.name} {command.name}"


@pytest.mark.parametrize("command", list(commands()))
def test_every_command_is_on_a_page(command):
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES.glob("*.md"))
    assert f"postdate {command}" in pages or command == "bench", command


def test_every_exit_code_is_documented():
    page = (PAGES / "exit-codes.md").read_text(encoding="utf-8")
    for code, meaning in EXPLANATIONS.items():
        assert f"| {code.value} | {meaning} |" in page


@pytest.mark.parametrize(
    ("expected", "output", "same"),
    [
        ("a\n", "a\n", True),
        ("a\n", "a\nb\n", False),
        ("a\n…\n", "a\nb\nc\n", True),
        ("…\nc\n", "a\nb\nc\n", True),
        ("…\nd\n", "a\nb\nc\n", False),
        ("at …Z\n", "at 2026Z\n", True),
        ("at …Z\n", "at 2026\n", False),
        ("", "", True),
        ("", "a\n", False),
    ],
)
def test_the_comparison_itself_is_honest(expected, output, same):
    assert (pattern(expected).fullmatch(tidy(output)) is not None) is same


def test_the_parts_of_a_block_are_found():
    assert list(examples("$ postdate a\nx\n$ postdate b\n")) == [
        Example("postdate a", "x\n"),
        Example("postdate b", ""),
    ]
