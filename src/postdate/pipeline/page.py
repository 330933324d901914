"""A report as one HTML file: nothing to fetch, readable in light and dark, on paper, and by a screen reader.

Runs on the driver. All pages share the template ``page.html``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from postdate.pipeline.charts import duration


def rendered(
    kind: str, title: str, charts: Mapping[str, str | None], filters: Mapping[str, Callable[..., str]], **values: object
) -> str:
    """Return a complete HTML page from the template ``kind``; charts are SVG elements, ``None`` where there is none."""
    environment = Environment(
        loader=PackageLoader("postdate.pipeline"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"duration": duration, **filters}
    # Everything is escaped but the charts, which are made here from numbers and times alone.
    drawn = {name: None if chart is None else Markup(chart) for name, chart in charts.items()}  # noqa: S704
    return environment.get_template(f"{kind}.html").render(kind=kind, title=title, **drawn, **values)
