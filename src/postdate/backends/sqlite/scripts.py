"""What an administrator runs by hand to make a file, where services may not."""

from __future__ import annotations

from functools import partial

from postdate.backends.sqlite import timeouts
from postdate.backends.sqlite.setup import setup_script
from postdate.ports import FileScripts


def scripts() -> FileScripts:
    """Return the SQL that makes what lives in a file of SQLite."""
    return FileScripts(
        database=partial(setup_script, "database"),
        timeouts=timeouts.setup_statements,
        sagas=partial(setup_script, "sagas"),
        outbox=partial(setup_script, "outbox"),
    )
