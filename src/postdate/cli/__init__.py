"""The command line: a thin layer over :mod:`postdate.operations` and the pipeline.

Modules here import the code of a command only when the command runs, so that ``postdate --help`` answers at once.
"""

from postdate.cli.entry import main

__all__ = ["main"]
