"""A shell is offered commands and options. Only the command that is completed is imported."""

import os
import subprocess
import sys

import pytest


def offered(typed: str) -> set[str]:
    """Return what bash would offer for this beginning of a line."""
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split(" ")) - 1)}
    done = subprocess.run(
        [sys.executable, "-m", "postdate"],
        env={**os.environ, "_POSTDATE_COMPLETE": "complete_bash", **words},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("postdate m", {"messages", "move"}),
        ("postdate messages res", {"reschedule"}),
        ("postdate messages list --lim", {"--limit"}),
        ("postdate run --no-s", {"--no-setup"}),
        ("postdate setup --print-s", {"--print-sql"}),
        ("postdate --store x doctor --js", {"--json"}),
    ],
)
def test_commands_and_options_are_offered(typed: str, expected: set[str]) -> None:
    assert offered(typed) == expected


def test_the_script_for_a_shell_names_the_command(cli) -> None:
    assert "complete -o default -F _postdate_completion postdate" in cli.ok("--show-completion", "bash").out
