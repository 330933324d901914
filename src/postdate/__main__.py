"""``python -m postdate`` is the command ``postdate``."""

from postdate.cli import main

if __name__ == "__main__":
    main()
