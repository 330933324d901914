"""Names that the processes of the demo share."""

QUEUE = "passengers"
