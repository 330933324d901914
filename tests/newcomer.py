"""The Python that plays the pages of the documentation: that of the tests, or that of a user.

`scripts/first_hours` makes an environment that has only what a page tells its reader to install, and names its Python
in :data:`VARIABLE`. The tests of the pages then play them there.
"""

import os
import sys
from pathlib import Path

from tests import java

VARIABLE = "FIRST_HOUR_PYTHON"
PYTHON = Path(os.environ.get(VARIABLE, sys.executable))
"""Not resolved: the name of a virtual environment's Python is what makes it that."""

IS_OF_THE_TESTS = VARIABLE not in os.environ


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of a user's process, in which the programs of :data:`PYTHON` are found first.

    The Java of the tests is not in it, unless the Python of the tests plays the page.
    """
    inherited = dict(os.environ) if IS_OF_THE_TESTS else java.without(os.environ)
    return {**inherited, "PATH": f"{PYTHON.parent}{os.pathsep}{os.environ['PATH']}", **variables}
