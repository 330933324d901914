"""Every example in docs/cli runs, and prints what the page says.

A ``console`` block has lines ``$ command`` followed by what it prints, standard output first. ``…`` stands for any
text in a line; a line that is only ``…`` for any lines. The blocks of a page are one story in one empty folder. A block
whose fence names a file (``toml postdate.toml``) is that file. ``postdate run &`` runs until the page ends; while it
does, commands that only look are asked again until they print what the page says, for delivering takes a moment.
``echo $?`` shows the exit code of the command before. Everything else is given to the shell.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from postdate.cli import error_queue, messages, pipeline, settings
from postdate.cli.app import app
from postdate.cli.exits import EXPLANATIONS

PAGES = Path(__file__).parents[2] / "docs" / "cli"
_BIN = Path(sys.executable).parent
_BLOCK = re.compile(r"^```(\S+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PATIENCE_SECONDS = 300.0
"""The tests of the documentation run beside others."""

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


@dataclass
class Story:
    """One page being run."""

    folder: Path
    eventually: Callable[[Callable[[], object], str, float], None]
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
            self.eventually(lambda: self.matches(example), what, _PATIENCE_SECONDS)
        else:
            assert self.matches(example), f"$ {example.command}\n{self.printed}\n--- expected:\n{example.expected}"

    def matches(self, example: Example) -> bool:
        self.printed = tidy(self.shell(example.command))
        return pattern(example.expected).fullmatch(self.printed) is not None

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
        return {**os.environ, "PATH": f"{_BIN}{os.pathsep}{os.environ['PATH']}"}

    def start(self, example: Example) -> None:
        """Start a service; it has started when it has logged what the page says."""
        log = self.folder / f"service{len(self.services)}.log"
        with log.open("wb") as file:
            command = example.command.removesuffix(" &").split()
            self.services.append(
                subprocess.Popen(command, cwd=self.folder, env=self.environment, stdout=file, stderr=file)
            )
        self.eventually(lambda: "delivering from" in log.read_text(), "the service delivers", _PATIENCE_SECONDS)
        assert pattern(example.expected).fullmatch(tidy(log.read_text()))

    def end(self) -> None:
        """Stop the services; they must end well."""
        for service in self.services:
            service.send_signal(signal.SIGTERM)
        assert [service.wait(60) for service in self.services] == [0] * len(self.services)


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_every_example_prints_what_the_page_says(page, own_folder, eventually):
    story = Story(own_folder, eventually)
    try:
        for kind, name, block in _BLOCK.findall(page.read_text(encoding="utf-8")):
            if name:
                (own_folder / name).write_text(block, encoding="utf-8")
            elif kind == "console":
                for example in examples(block):
                    story.run(example)
    finally:
        story.end()


def test_every_page_has_examples():
    for page in PAGES.glob("*.md"):
        assert "```console\n$ " in page.read_text(encoding="utf-8"), page


def commands() -> Iterator[str]:
    """Return all commands, as they are typed."""
    for command in app.registered_commands:
        yield str(command.name)
    for group in (settings.app, error_queue.app, messages.app, pipeline.app):
        for command in group.registered_commands:
            yield f"{group.info.name} {command.name}"


@pytest.mark.parametrize("command", list(commands()))
def test_every_command_is_on_a_page(command):
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES.glob("*.md"))
    assert f"postdate {command}" in pages or command in {"bench", "demo"}, command


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
