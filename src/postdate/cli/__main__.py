"""``python -m postdate.cli``: the same as ``postdate``."""

from postdate.cli.entry import main

main()
