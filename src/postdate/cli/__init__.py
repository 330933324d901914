"""The command line: thin skins over :mod:`postdate.operations` and the pipeline.

Modules here import what a command needs when it runs, so that ``postdate --help`` answers at once.
"""

from postdate.cli.entry import main

__all__ = ["main"]
