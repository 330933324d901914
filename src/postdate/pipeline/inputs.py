"""The formats of input files, and where their rows stand: what readers on Spark and without it have in common."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from postdate.errors import PipelineError
from postdate.pipeline import texts
from postdate.pipeline.rows import NOT_UTF8

PACKAGES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "avro": "org.apache.spark:spark-avro_2.13",
        "delta": "io.delta:delta-spark_2.13",
        "iceberg": "org.apache.iceberg:iceberg-spark-runtime",
    }
)
"""Formats that Spark reads only with another package."""

FORMATS: Final = ("csv", "json", "parquet", "orc", *PACKAGES)
_JSON_LINES = frozenset({"jsonl", "ndjson"})

_MALFORMED_DETAIL: Final = (
    "the line has more or fewer cells than the header line, or is not a JSON object with each name once"
)


WHOLE_FILES: Final[Mapping[str, Any]] = MappingProxyType({"ignoreCorruptFiles": False, "ignoreMissingFiles": False})
"""Options of Spark's readers. With other settings of the session, Spark leaves out rows without an error."""


def escape_pattern(path: str) -> str:
    """Return a path for Spark, which takes these characters for a pattern."""
    return re.sub(r"[{}\[\]*?\\]", r"\\\g<0>", path)


def escape_file_path(path: str) -> str:
    """Return a path as Spark's readers take it: that of a file of this machine means that file, and no pattern."""
    return escape_pattern(path) if "://" not in path and Path(path).exists() else path


def input_format_of(paths: Sequence[str], input_format: str | None = None) -> str:
    """Return the format of the files of an input, by default from the ends of their names.

    Raises:
        PipelineError: there is no file, the format is unknown, or the files have different formats.
    """
    if not paths:
        raise PipelineError("there is nothing to read: name a file or a directory")
    subject = ", ".join(map(repr, paths))
    formats = {input_format or _format_by_name(each) for each in paths}
    if len(formats) > 1:
        raise PipelineError(f"{subject} have different formats, {' and '.join(sorted(formats))}; read each alone")
    (name,) = formats
    if name not in FORMATS:
        raise PipelineError(f"cannot tell the format of {subject}; say one of {', '.join(FORMATS)}")
    return name


def _format_by_name(path: str) -> str:
    name = Path(path).name.removesuffix(".gz").rpartition(".")[2].lower()
    return "json" if name in _JSON_LINES else name


def check_encoding(encoding: texts.Encoding, name: str) -> texts.Encoding:
    if name == "json" and not encoding.is_ascii_compatible:
        raise PipelineError(f"JSON is not read in {encoding.name}; convert it to UTF-8")
    return encoding


def origin_of(row: texts.Row, file: str, encoding: texts.Encoding) -> texts.RowOrigin:
    """Return where a row stands, with the reason if it is malformed."""
    if not row.is_malformed:
        return texts.RowOrigin(file, row.line, row.content)
    if encoding.is_valid(row.content):
        return texts.RowOrigin(file, row.line, row.content, "malformed_row", _MALFORMED_DETAIL)
    detail = f"the row is not {encoding.name}; the column bytes has its bytes. Name the encoding of the file"
    return texts.RowOrigin(file, row.line, row.content, NOT_UTF8, detail)
