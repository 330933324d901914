"""Programs that show Postdate at work, to be run in a checkout: see README.md. They are not in the wheel."""
