"""The columns of a table of messages, and how their names are resolved."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from postdate.errors import PipelineError
from postdate.pipeline.texts import ORIGIN

_OPTIONAL = frozenset({"body", "headers", "expires_at"})
_NEAR = 0.75
"""Similarity at which two names count as one misspelt name: a letter changed in four, or two letters swapped."""


@dataclass(frozen=True, slots=True)
class ColumnMapping:
    """The names of the input's columns. A column named here must exist.

    Args:
        message_id: text, 1 to 250 characters; the job is idempotent by this id.
        due: timestamp, or text in ISO 8601.
        destination: a column; or a fixed queue for all rows, written ``=queue``.
        body: text (stored as UTF-8) or binary; ``None`` for messages without a body. A struct, an array or a map is
            stored as its JSON text.
        headers: map of texts, struct, or text that is a JSON object; ``None`` for messages without headers. A value
            that is not text becomes its JSON text, exactly as it is written. A null field of a struct is no header.
        expires_at: like ``due``; ``None`` for messages that never expire.
    """

    message_id: str = "message_id"
    due: str = "due"
    destination: str = "destination"
    body: str | None = "body"
    headers: str | None = "headers"
    expires_at: str | None = "expires_at"

    @classmethod
    def match_columns(
        cls, columns: Sequence[str], unused: Collection[str] = (), *, case_sensitive: bool = False, **given_names: Any
    ) -> ColumnMapping:
        """Return ``given_names`` and the default names of other columns, without the optional columns that are missing.

        Args:
            columns: names of the input's columns.
            unused: columns that resemble an optional column, but do not stand for it.
            case_sensitive: whether names that differ only in case are different, as ``spark.sql.caseSensitive`` says.
            given_names: columns by field, instead of the default names.

        Raises:
            PipelineError: an optional column is missing, and another column has nearly its name: its content would be
                dropped.
        """
        mapping = cls(**given_names)
        for name in sorted(_OPTIONAL - given_names.keys()):
            if _matching_columns(name, columns, case_sensitive=case_sensitive):
                continue
            candidates = [column for column in columns if column not in {*unused, *asdict(mapping).values()}]
            if similar := _find_nearest(name, candidates):
                raise PipelineError(
                    f"the input has no column {name!r}, but {similar!r}: rename it, or name it as {name}, or name it "
                    f"as "
                    f"unused if it is none of the message"
                )
            mapping = replace(mapping, **{name: None})
        return mapping


def resolve_columns(
    columns: ColumnMapping | None, input_columns: Sequence[str], unused: Collection[str], *, case_sensitive: bool
) -> tuple[ColumnMapping, tuple[str, ...]]:
    """Return the names of the input's columns, and the names of unused columns.

    Args:
        columns: the wanted columns; ``None``: those of the usual names.
        input_columns: all columns of the input.
        unused: see :meth:`ColumnMapping.match_columns`.
        case_sensitive: whether names that differ only in case are different.
    """
    names = [name for name in input_columns if name != ORIGIN]
    columns = columns or ColumnMapping.match_columns(names, unused, case_sensitive=case_sensitive)
    resolved_names = dict[str, Any]()
    for field_name, column in asdict(columns).items():
        if column is None or column.startswith("="):
            resolved_names[field_name] = column
            continue
        matches = _matching_columns(column, names, case_sensitive=case_sensitive)
        if not matches:
            raise PipelineError(
                f"the input has no column {column!r}; it has {', '.join(names)}{_delimiter_hint(names)}"
            )
        if len(matches) > 1:
            raise PipelineError(f"the input has several columns {column!r}: {', '.join(matches)}; rename one")
        resolved_names[field_name] = matches[0]
    unused = tuple(name for name in names if name not in resolved_names.values())
    return ColumnMapping(**resolved_names), unused


def _delimiter_hint(names: Sequence[str]) -> str:
    """Return what to do if one name is probably the whole header line of a CSV file with another delimiter."""
    if len(names) != 1:
        return ""
    delimiter = next((each for each in ";\t|" if each in names[0]), None)
    return "" if delimiter is None else f": if these are several columns, say --delimiter {delimiter!r}"


def _matching_columns(name: str, columns: Sequence[str], *, case_sensitive: bool) -> list[str]:
    """Return the columns that match a name."""
    return [each for each in columns if each == name or (not case_sensitive and each.lower() == name.lower())]


def _find_nearest(name: str, columns: Sequence[str]) -> str | None:
    """Return the column that differs from the name only by a slip: spaces, case, separators, or one letter."""
    plain_names = {re.sub(r"[\W_]", "", column).lower(): column for column in columns}
    similar = difflib.get_close_matches(name.replace("_", ""), plain_names, n=1, cutoff=_NEAR)
    return plain_names[similar[0]] if similar else None
