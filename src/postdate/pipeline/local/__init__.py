"""Jobs of the pipeline in this process, without Spark and without Java: schedule, forecast and audit.

Nothing here imports PySpark. :mod:`.files` lists the files of an input, :mod:`.csv_records` cuts CSV into records as
Spark does, :mod:`.reading` makes batches of rows, :mod:`.selecting` turns their columns into those of messages, and the
functions that store them are those of the jobs on Spark. Source: ADR 0065.
"""
