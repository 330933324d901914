"""Bulk work on Spark: schedule, audit, and the ``postdate`` data source. Only this package imports PySpark."""
