"""A shell is offered the commands, and the options of each."""

import os
import re
import subprocess
import sys

import pytest


def answer(**variables: str) -> str:
    """Return what a shell gets when it asks by the environment, as its script does."""
    environment = {**os.environ, **variables}
    command = [sys.executable, "-m", "postdate"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("postdate m", {"messages", "move"}),
        ("postdate messages res", {"reschedule"}),
        ("postdate messages list --lim", {"--limit"}),
        ("postdate run --no-s", {"--no-setup"}),
        ("postdate setup --print-s", {"--print-sql"}),
        ("postdate --config a.toml doctor --js", {"--json"}),
    ],
)
def test_commands_and_options_are_offered(typed: str, expected: set[str]) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split(" ")) - 1)}
    assert set(answer(_POSTDATE_COMPLETE="complete_bash", **words).split()) == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "pwsh"])
def test_the_script_of_a_shell_asks_for_the_command(shell: str) -> None:
    """By `--show-completion` it is that of the shell in which the command is typed."""
    assert re.search(r"_POSTDATE_COMPLETE\W+complete_", answer(_POSTDATE_COMPLETE=f"source_{shell}"))
