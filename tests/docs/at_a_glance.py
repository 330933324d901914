"""Draws the picture of README.md and docs/how-it-works.md: run ``python -m tests.docs.at_a_glance`` after a change."""

from __future__ import annotations

from pathlib import Path

from tests.docs.message_way import BLUE, GREEN, SAND, Arrow, Box, svg_of

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "at-a-glance.svg"

BOXES = (
    Box(30, 40, "your program", ("sends at 10:00 what is", "to arrive at 12:00"), SAND),
    Box(385, 40, "store", ("SQLite, PostgreSQL, Redis …:", "it waits in a table"), GREEN),
    Box(740, 40, "queue", ("RabbitMQ, the database,", "Redis, Azure …"), GREEN),
    Box(30, 190, "you", ("postdate messages, the", "dashboard, your program"), SAND),
    Box(385, 190, "postdate run", ("any number of processes;", "one of them claims it"), BLUE),
    Box(740, 190, "your consumer", ("in any language, or an", "Endpoint with retries"), SAND),
)

ARROWS = (
    Arrow(((220, 68), (385, 68)), "10:00 send", (268, 58)),
    Arrow(((480, 124), (480, 190)), "12:00 claim", (489, 162)),
    Arrow(((575, 218), (658, 218), (658, 96), (740, 96)), "12:00 send,", (666, 150)),
    Arrow((), "then remove", (666, 166)),
    Arrow(((835, 124), (835, 190)), "receive", (844, 162)),
    Arrow(((220, 218), (302, 218), (302, 96), (385, 96)), "list, explain,", (310, 150)),
    Arrow((), "cancel, move", (310, 166)),
)


def picture() -> str:
    """Return the picture as SVG."""
    return svg_of(BOXES, ARROWS, 314, "A message waits in a store until it is due; then it is put into its queue")


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
