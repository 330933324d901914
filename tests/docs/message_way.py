"""Draws the picture of ARCHITECTURE.md: run ``python -m tests.docs.message_way`` after a change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "message-way.svg"
WIDTH, HEIGHT = 960, 470
INK, GREY, BLUE, GREEN, SAND = "#1f2933", "#66717d", "#dbe9f6", "#dff0e0", "#f6efdb"


@dataclass(frozen=True)
class Box:
    """A box with a title, and with smaller lines below it."""

    x: int
    y: int
    title: str
    lines: tuple[str, ...]
    fill: str
    width: int = 190
    height: int = 84

    def svg(self) -> str:
        middle = self.x + self.width // 2
        texts = [f'<text x="{middle}" y="{self.y + 26}" class="title">{escape(self.title)}</text>']
        texts += [
            f'<text x="{middle}" y="{self.y + 46 + 17 * i}" class="line">{escape(line)}</text>'
            for i, line in enumerate(self.lines)
        ]
        frame = (
            f'<rect x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}" rx="6" fill="{self.fill}"/>'
        )
        return frame + "".join(texts)


@dataclass(frozen=True)
class Arrow:
    """An arrow along points, with a text beside it."""

    points: tuple[tuple[int, int], ...]
    text: str = ""
    text_at: tuple[int, int] = (0, 0)
    is_dashed: bool = False

    def svg(self) -> str:
        line = " ".join(f"{x},{y}" for x, y in self.points)
        dashes = ' stroke-dasharray="5 4"' if self.is_dashed else ""
        drawn = f'<polyline points="{line}"{dashes}/>'
        if self.text:
            drawn += f'<text x="{self.text_at[0]}" y="{self.text_at[1]}" class="note">{escape(self.text)}</text>'
        return drawn


BOXES = (
    Box(30, 40, "application", ("Endpoint.send(delay=…)", "client.send(delay=…)"), SAND),
    Box(30, 210, "intake", ("core/receive/intake.py", "queue {endpoint}.timeouts"), BLUE),
    Box(385, 40, "store", ("one row until it is due,", "its records and content"), GREEN),
    Box(385, 210, "poller, dispatcher", ("core/due/: claims what is", "due, sends, then removes"), BLUE),
    Box(740, 210, "destination queue", ("in the same database, or", "RabbitMQ, Azure, MSMQ"), GREEN),
    Box(740, 40, "pump, handlers", ("core/receive/pump.py", "endpoint/handling.py"), BLUE),
    Box(385, 360, "error queue", ("after the last retry, with", "the reason in its headers"), GREEN),
)

ARROWS = (
    Arrow(((220, 68), (385, 68)), "1 store: same database", (232, 58)),
    Arrow(((125, 124), (125, 210)), "1 send: other queues", (134, 172)),
    Arrow(((220, 236), (300, 236), (300, 104), (385, 104)), "2 store", (306, 176)),
    Arrow(((480, 124), (480, 210)), "3 wake, 4 claim", (489, 172)),
    Arrow(((575, 236), (740, 236)), "5 move or send", (606, 227)),
    Arrow(((740, 272), (640, 272), (575, 272)), "confirm, then remove", (592, 289), is_dashed=True),
    Arrow(((835, 210), (835, 124)), "6 receive", (844, 172)),
    Arrow(((740, 68), (575, 68)), "7 retry or send later", (600, 58)),
    Arrow(((480, 294), (480, 360)), "no destination took it", (489, 332)),
    Arrow(((930, 96), (948, 96), (948, 402), (575, 402)), "no handler could handle it", (690, 393)),
)

STYLE = (
    f"text{{font-family:sans-serif;fill:{INK}}}.title{{font-size:15px;font-weight:600;text-anchor:middle}}"
    f".line{{font-size:12px;text-anchor:middle;fill:{GREY}}}.note{{font-size:12px}}"
    f"rect{{stroke:{GREY};stroke-width:1}}polyline{{fill:none;stroke:{INK};stroke-width:1.4;marker-end:url(#head)}}"
)

HEAD = (
    '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" orient="auto">'
    f'<path d="M0 0 10 5 0 10z" fill="{INK}"/></marker>'
)


def svg_of(boxes: Sequence[Box], arrows: Sequence[Arrow], height: int, label: str) -> str:
    """Return a picture as SVG, on a white ground: so it can be read on light and dark pages."""
    parts = [each.svg() for each in (*arrows, *boxes)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(label)}"><style>{STYLE}</style><defs>{HEAD}</defs>'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff" style="stroke:none"/>' + "\n".join(parts) + "</svg>\n"
    )


def picture() -> str:
    """Return the picture of the way of a message."""
    return svg_of(BOXES, ARROWS, HEIGHT, "The way of a delayed message")


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
