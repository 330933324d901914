"""``postdate pipeline``: bulk jobs on Spark. They and Spark are imported only when one of them is called."""

from postdate.cli.pipeline import audit, delay, forecast, history, loads, migrate, schedule, sweep, waiting
from postdate.cli.pipeline.common import app

__all__ = ["app", "audit", "delay", "forecast", "history", "loads", "migrate", "schedule", "sweep", "waiting"]
