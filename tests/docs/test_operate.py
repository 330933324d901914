"""Alert rules and the board ask for metrics that there are, and each alert has its line in the guide."""

import json
import re
from pathlib import Path

import yaml
from prometheus_client import generate_latest
from tests.unit.test_telemetry import note_everything

from postdate.telemetry.metrics import GAUGES, prometheus

DOCS = Path(__file__).parents[2] / "docs"
NAME = re.compile(r"\bpostdate_(?!outcome|within|message_type)[a-z_]+")


def exported() -> set[str]:
    """Return the names that Prometheus would see, of all that a service can tell."""
    metrics, registry = prometheus()
    metrics.register_gauges(lambda: {name: {attribute and "hour": 1.0} for name, (_, _, attribute) in GAUGES.items()})
    note_everything(metrics)
    text = generate_latest(registry).decode()
    return {line.split(" ")[2] for line in text.splitlines() if line.startswith("# TYPE")}


def asked(expressions: str) -> set[str]:
    return {re.sub("_bucket$", "", name) for name in NAME.findall(expressions)}


def test_alerts_ask_for_what_there_is_and_the_guide_has_each() -> None:
    rules = [
        rule for group in yaml.safe_load((DOCS / "operate/alerts.yml").read_text())["groups"] for rule in group["rules"]
    ]
    assert asked(" ".join(rule["expr"] for rule in rules)) <= exported()
    guide = (DOCS / "guides/operate.md").read_text()
    assert re.findall(r"^\| `(Postdate\w+)`", guide, re.MULTILINE) == [rule["alert"] for rule in rules]


def test_the_board_asks_for_what_there_is() -> None:
    board = json.loads((DOCS / "operate/grafana.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(expressions) > 10
    assert asked(" ".join(expressions)) <= exported()


def test_every_metric_is_in_the_table() -> None:
    page = (DOCS / "cli/run.md").read_text()
    named = {name.replace(".", "_") for name in re.findall(r"`(postdate\.[a-z_.]+)`", page)}
    shown = {re.sub("(_seconds)?(_total)?$", "", name) for name in exported() if name.startswith("postdate_")}
    assert shown <= named
