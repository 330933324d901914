"""SQL that an administrator runs by hand to make a file."""

from __future__ import annotations

from functools import partial

from postdate.backends.sqlite import timeouts
from postdate.backends.sqlite.setup import setup_script
from postdate.ports import FileScripts


def scripts() -> FileScripts:
    return FileScripts(
        database=partial(setup_script, "database"),
        timeouts=timeouts.setup_statements,
        sagas=partial(setup_script, "sagas"),
        outbox=partial(setup_script, "outbox"),
    )
