"""Drawings as SVG elements of the page. Text stays text; colours and fonts come from ``look.css``, light or dark.

Lengths are in units of the drawing, which the page scales to its width. Words and tables beside the drawings have the
same content, so screen readers skip the drawings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import groupby
from typing import Final

from markupsafe import Markup

from postdate.operations import Interval

_MARGIN, _ABOVE, _FLOOR, _HEIGHT = 44, 30, 224, 250
_LINES: Final = 4
_WEEK: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_HEAD, _ROW = 24, 60

Address = Callable[[Interval], str]
"""A function that returns the address of the list of messages in an interval."""


def due_chart(intervals: Sequence[Interval], width: int, address: Address) -> Markup:
    """Return bars of what is due in each minute or hour.

    Herds are cut off at the top, so that other bars stay visible.
    """
    highest, herds = max((each.count for each in intervals if not each.herd), default=0), herds_of(intervals)
    step = _step(highest)
    top = max(math.ceil(highest / step), 1) * step
    bar_height, column = (_FLOOR - _ABOVE) * (0.7 if herds else 1.0), (width - _MARGIN) / len(intervals)
    parts = list[Markup]()
    for value in range(0, top + 1, step):
        y = _FLOOR - bar_height * value / top
        parts.append(_tag("line", class_="grid", x1=_MARGIN, x2=width, y1=y, y2=y))
        parts.append(_text("value", _MARGIN - 8, y + 4, shorten_count(value)))
    for index, each in enumerate(intervals):
        height = _FLOOR - _ABOVE if each.herd else max(bar_height * each.count / top, 2 if each.count else 0)
        parts.append(_bar(each, _MARGIN + index * column, column, height, address(each)))
    for herd in herds:
        places = [place for place, each in enumerate(intervals) if herd.begin <= each.begin < herd.end]
        middle = _MARGIN + (sum(places) / len(places) + 0.5) * column
        parts.append(_text("herd", min(middle, width - 24), _ABOVE - 10, f"{herd.count:,}"))
    return _drawing(width, _HEIGHT, [*parts, *_times(intervals, column)])


def herds_of(intervals: Sequence[Interval]) -> list[Interval]:
    """Return the herds. Adjacent herds are merged into one."""
    runs = [[*run] for is_herd, run in groupby(intervals, lambda each: each.herd) if is_herd]
    return [replace(run[0], end=run[-1].end, count=sum(each.count for each in run)) for run in runs]


def _step(highest: int) -> int:
    """Return the distance between grid lines: 1, 2 or 5 with zeros, so that there are about four lines."""
    rough = max(highest / _LINES, 1)
    size = 10 ** math.floor(math.log10(rough))
    return next(n * size for n in (1, 2, 5, 10) if n * size >= rough)


def _bar(each: Interval, x: float, width: float, height: float, address: str) -> Markup:
    bar_width = max(width * 0.72, 1.5)
    kind, top = "herd" if each.herd else "bar", _FLOOR - height
    parts = [
        _tag("title", _tooltip(each, f"{each.begin:%H:%M} to {each.end:%H:%M}")),
        _tag("rect", class_="back", x=x, width=width, height=_FLOOR),
        _tag(
            "rect",
            class_=kind,
            x=x + (width - bar_width) / 2,
            y=top,
            width=bar_width,
            height=height,
            rx=min(bar_width / 4, 3),
        ),
    ]
    if each.herd:  # A mark shows that this bar is cut off.
        parts.append(_tag("path", class_="cut", d=f"M{x:.1f} {top + 24}l{width:.1f} -6v5l-{width:.1f} 6z"))
    return _tag("a", *parts, href=address, tabindex=-1)


def _times(intervals: Sequence[Interval], column: float) -> list[Markup]:
    """Return labels below the bars: whole times with enough distance from each other."""
    hours = intervals[-1].end - intervals[-1].begin >= timedelta(hours=1)
    step_count = next((n for n in (1, 2, 3, 5, 6, 10, 15) if n * column >= 54), 30)
    return [
        _text("time", _MARGIN + (index + 0.5) * column, _HEIGHT - 6, f"{each.begin:%H:%M}")
        for index, each in enumerate(intervals[:-1])
        if index and (each.begin.hour if hours else each.begin.minute) % step_count == 0
    ]


def calendar(days: Sequence[Interval], width: int, address: Address) -> Markup:
    """Return the days as sheets of a calendar, with weeks from Monday on. A darker day has more due messages."""
    first, cell = days[0].begin.weekday(), (width + 6) / 7
    most = max([each.count for each in days if not each.herd], default=0)
    parts = [_text("name", n * cell + 7, 14, name) for n, name in enumerate(_WEEK)]
    for index, each in enumerate(days):
        x, y = (first + index) % 7 * cell, _HEAD + (first + index) // 7 * _ROW
        shade = 1.0 if each.herd else 0.08 + 0.37 * math.sqrt(each.count / most) if each.count else 0.0
        sheet = {"x": x, "y": y, "width": cell - 6, "height": _ROW - 6, "rx": 8}
        day = f"{each.begin.day} {each.begin:%b}" if not index or each.begin.day == 1 else f"{each.begin.day}"
        inside = [
            _tag("title", _tooltip(each, f"{each.begin:%A, %d %B}")),
            _tag("rect", class_="sheet", **sheet),
            _tag("rect", class_="herd" if each.herd else "bar", opacity=shade, **sheet),
            _text("day on" if each.herd else "day", x + 7, y + 19, day),
            _text("many on" if each.herd else "many", x + 7, y + 43, shorten_count(each.count) if each.count else ""),
        ]
        parts.append(_tag("a", *inside, href=address(each), tabindex=-1))
    return _drawing(width, _HEAD + math.ceil((first + len(days)) / 7) * _ROW, parts)


def share(part: int, whole: int) -> Markup:
    """Return a bar of a list that shows how large a part of the whole is."""
    bar = _tag("rect", class_="bar", width=max(100 * part / max(whole, 1), 1.0 if part else 0.0), height=6)
    room = _tag("rect", class_="sheet", width=100, height=6)
    return _drawing(100, 6, [room, bar], class_="share", preserveAspectRatio="none")


def shorten_count(count: int) -> str:
    """Return a number in at most four characters: ``950``, ``1.2k``, ``38k``, ``5.1M``."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count // size}{unit}" if count >= 10 * size or count % size == 0 else f"{count / size:.1f}{unit}"
    return str(count)


def _tooltip(each: Interval, when: str) -> str:
    return f"{when}: {each.count:,} due{', a herd' if each.herd else ''}"


def _text(kind: str, x: float, y: float, text: str) -> Markup:
    return _tag("text", text, class_=kind, x=x, y=y)


def _drawing(width: int, height: int, parts: Sequence[Markup], **attributes: str) -> Markup:
    attribute_values = {"aria-hidden": "true", "focusable": "false", **attributes}
    return _tag("svg", *parts, viewBox=f"0 0 {width} {height}", **attribute_values)


def _tag(name: str, *inside: str, **attributes: float | str) -> Markup:
    """Return an element. Names of attributes may end in ``_``. Every value that is not `Markup` is escaped."""
    attribute_texts = {key: f"{value:.2f}" if isinstance(value, float) else value for key, value in attributes.items()}
    attribute_text = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_"), value) for key, value in attribute_texts.items()
    )
    return Markup("<{}{}>{}</{}>").format(name, attribute_text, Markup("").join(inside), name)
