"""Generated files of every format, encoding and damage: nothing is lost, invented or changed on the way to a store.

The expectation comes from readers of Python's own (``csv``, ``json``, ``pyarrow``), which share no code with the job.
"""

import csv
import io
import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from postdate.errors import PipelineError
from postdate.pipeline.counting import count_rows
from postdate.pipeline.failures import shorten_errors
from postdate.pipeline.files import read_input
from postdate.pipeline.rows import INSTANT
from postdate.pipeline.schedule import ScheduleJob, schedule
from postdate.pipeline.stores import StoreSpec, open_spec
from postdate.ports import Scan

Cells = dict[str, str | None]
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
NAMES: Final = ("message_id", "due", "destination", "body", "headers", "note")
NO_CELLS: Final[Cells] = {"message_id": None, "due": None, "destination": None}
TEXTS: Final = ("", "x", " x ", 'a "q"', '"', "a,b;c\td", "two\nlines", "Müller", "\\", "{}", "null", "\ufffd")
HEADERS: Final = (
    ("", {}),
    ("{}", {}),
    ('{"k": "v"}', {"k": "v"}),
    ('{ "n": 12300000000000000000, "f": 1.10 }', {"n": "12300000000000000000", "f": "1.10"}),
    ('{"o": {"a": [1, null]}, "é": "ü"}', {"o": '{"a": [1, null]}', "é": "ü"}),
    ('{"k": "v"} x', None),
    ('{"k": 1, "k": 2}', None),
    ("[1]", None),
    ('{"k": null}', None),
    (r'{"k": "\ud800"}', None),
)
DUES: Final = (
    ("2031-05-01T12:00:00Z", datetime(2031, 5, 1, 12, tzinfo=UTC)),
    ("20310501T1200Z", datetime(2031, 5, 1, 12, tzinfo=UTC)),
    ("2031-05-01t14:00:00,5+02:00", datetime(2031, 5, 1, 12, 0, 0, 500_000, tzinfo=UTC)),
    ("2031-05-01T12:00", None),
    ("tomorrow", None),
    ("9999-12-31T23:59:59-05:00", None),
)


@dataclass(frozen=True)
class Group:
    """What the files of one folder have in common: one job reads them together."""

    format: str
    encoding: str
    delimiter: str
    names: dict[str, str]
    due_is_instant: bool
    body_is_binary: bool

    @classmethod
    def choose(cls, chance: random.Random) -> "Group":
        """Choose, among others, names in another case, which Spark does not tell apart."""
        name = chance.choice(("csv", "csv", "json", "parquet", "orc"))
        encodings = {"csv": ("utf-8", "utf-8", "latin-1", "cp1252", "utf-16"), "json": ("utf-8", "utf-8", "latin-1")}
        names = {each: chance.choice((each, each, each.upper(), each.title())) for each in NAMES}
        encoding = chance.choice(encodings.get(name, ("utf-8",)))
        return cls(name, encoding, chance.choice(",;\t"), names, chance.random() < 0.5, chance.random() < 0.5)


def stored_of(rows: Sequence[Cells | None]) -> dict[str, tuple[Any, ...]]:
    """Return what is to be stored of rows as another reader has them; ``None`` stands for a line that is no row."""
    by_id = dict[str, set[Any]]()
    for row in rows:
        content = None if row is None else message_of(row)
        if content is not None:
            by_id.setdefault(content[0], set()).add(content)
    return {id_: next(iter(contents)) for id_, contents in by_id.items() if len(contents) == 1}


def message_of(row: Cells) -> tuple[Any, ...] | None:
    """Return what a row is as a message, or ``None``."""
    id_, due = row["message_id"], dict(DUES).get(row["due"] or "")
    headers = dict(HEADERS).get(row.get("headers") or "")
    if not id_ or due is None or headers is None or not (row["destination"] or "").strip():
        return None
    text = json.dumps(headers, ensure_ascii=False, separators=(",", ":"))
    return id_, row["destination"], (due - EPOCH) // timedelta(microseconds=1), text, (row.get("body") or "").encode()


def random_rows(chance: random.Random, file: str) -> list[Cells]:
    rows = list[Cells]()
    for number in range(chance.randrange(1, 12)):
        plain = chance.random() < 0.6
        due = DUES[0][0] if plain else chance.choice(DUES)[0]
        headers = chance.choice(HEADERS[:5] if plain else HEADERS)[0]
        queue = "q" if chance.random() < 0.9 else chance.choice(("", "очередь", " "))
        id_ = f"{file}-{number}" if chance.random() < 0.93 else f"{file}-0"
        note = chance.choice(TEXTS)
        rows.append(
            {
                "message_id": id_,
                "due": due,
                "destination": queue,
                "body": chance.choice(TEXTS),
                "headers": headers,
                "note": note,
            }
        )
        if chance.random() < 0.05:
            rows.append(dict(rows[-1]))
    return rows


def write_csv(chance: random.Random, group: Group, path: Path, rows: list[Cells]) -> list[Cells | None]:
    """Write a file, and return its rows as Python reads them."""
    written = io.StringIO()
    writer = csv.writer(written, delimiter=group.delimiter, lineterminator=chance.choice(("\n", "\r\n")))
    writer.writerow(group.names.values())
    for row in rows:
        cells = [row[name] for name in group.names]
        writer.writerow(cells[: chance.randrange(1, 6)] if chance.random() < 0.05 else cells)
        if chance.random() < 0.05:
            written.write(writer.dialect.lineterminator)
    content = written.getvalue().encode(group.encoding, "replace")
    if group.encoding == "utf-8" and chance.random() < 0.3:
        content = content.replace("ü".encode(), b"\xfc")
    path.write_bytes(content)
    # Bytes that are no text are kept apart from text, so that rows with them can be told.
    text = content.decode(group.encoding, "surrogateescape" if group.encoding == "utf-8" else "strict")
    header, *records = (each for each in csv.reader(io.StringIO(text, newline=""), delimiter=group.delimiter) if each)
    keys, came = [name.lower() for name in header], list[Cells | None]()
    for record in records:
        is_text = not any(0xDC80 <= ord(character) < 0xDD00 for character in "".join(record))
        # In UTF-16 Spark decodes, and puts U+FFFD for what is no text: it cannot be told from one that is there.
        is_text = is_text and not (group.encoding == "utf-16" and "\ufffd" in "".join(record))
        came.append(dict(zip(keys, record, strict=True)) if is_text and len(record) == len(keys) else None)
    return came


def write_json(chance: random.Random, group: Group, path: Path, rows: list[Cells]) -> list[Cells | None]:
    lines = list[bytes]()
    for row in rows:
        values = {group.names[name]: value for name, value in row.items() if value or chance.random() < 0.5}
        line = json.dumps(values, ensure_ascii=group.encoding != "utf-8" or chance.random() < 0.5)
        lines.append(line.encode(group.encoding))
        if chance.random() < 0.1:
            lines.append(chance.choice((b"", b"{", b"[1]", lines[-1] + b" x", b'{"a": "\xfc"', lines[-1][:-1])))
    path.write_bytes(b"\n".join(lines))
    came = list[Cells | None]()
    for line in filter(bytes.strip, path.read_bytes().splitlines()):
        try:
            values = json.loads(line.decode(group.encoding))
        except ValueError:
            values = None
        if not isinstance(values, dict):
            came.append(None)
            continue
        came.append({**NO_CELLS, **{name.lower(): value for name, value in values.items()}})
    return came


def write_columns(chance: random.Random, group: Group, path: Path, rows: list[Cells]) -> list[Cells | None]:
    """Write Parquet or ORC."""
    for row in rows:
        for column in ("body", "note", "message_id"):
            row[column] = None if chance.random() < 0.05 else row[column]
    arrays: dict[str, Any] = {
        written: pa.array([row[name] for row in rows], pa.string()) for name, written in group.names.items()
    }
    if group.due_is_instant:
        arrays[group.names["due"]] = pa.array([dict(DUES)[row["due"] or ""] for row in rows], INSTANT)
    if group.body_is_binary:
        arrays[group.names["body"]] = arrays[group.names["body"]].cast(pa.binary())
    writers, readers = (
        {"parquet": pq.write_table, "orc": pyarrow.orc.write_table},
        {"parquet": pq.read_table, "orc": pyarrow.orc.read_table},
    )
    writers[group.format](pa.table(arrays), path)
    table = readers[group.format](path)
    texts = {instant: text for text, instant in reversed(DUES) if instant is not None}
    came = list[Cells | None]()
    for row in table.rename_columns([column.lower() for column in table.column_names]).to_pylist():
        due, body = row["due"], row["body"]
        text = texts[due] if isinstance(due, datetime) else due
        came.append({**row, "due": text, "body": body.decode() if isinstance(body, bytes) else body})
    return came


WRITERS: Final = {"csv": write_csv, "json": write_json, "parquet": write_columns, "orc": write_columns}


def read_store(spec: StoreSpec) -> dict[str, tuple[Any, ...]]:
    columns = ("message_id", "destination", "due", "headers", "body")
    with open_spec(spec) as store:
        scannable = store.require_scannable()
        parts, scan = scannable.scan_parts("pending", 1), Scan("pending", columns)
        return {row[0]: row for part in parts for page in scannable.scan(scan, part, 1_000) for row in page}


def check_files(
    spark: SparkSession, folder: Path, chance: random.Random, now: datetime, groups: int, files: int
) -> None:
    """Schedule folders of files one after the other into one store, and compare all of them at the end."""
    spec, expected = StoreSpec(f"sqlite:///{folder / 'store.db'}", synchronous="normal"), dict[str, tuple[Any, ...]]()
    for number in range(groups):
        group, path, rows = Group.choose(chance), folder / f"rows-{number}", list[Cells | None]()
        path.mkdir()
        for file in range(files):
            given = random_rows(chance, f"{number}.{file}")
            rows += WRITERS[group.format](chance, group, path / f"{file}.{group.format}", given)
        stored, options = stored_of(rows), (group.format, group.encoding, group.delimiter)
        messages = read_input(spark, str(path), *options)
        count = count_rows(spark, str(path), *options)
        result = schedule(messages, ScheduleJob(spec, now, expected_rows=count))
        total = result.accepted + result.already_there + result.conflicting + sum(result.set_aside.values())
        assert result.read == total == len(rows), (result, group)
        assert (result.accepted, result.conflicting) == (len(stored), 0), (result, group)
        expected |= stored
        if group.format == "csv":  # Closed nowhere: the whole folder is refused, and nothing of it is stored.
            with (path / "0.csv").open("ab") as damaged:
                damaged.write('\nz,z,z,"never closed'.replace(",", group.delimiter).encode(group.encoding)[-200:])
            with pytest.raises(PipelineError, match="never closed"), shorten_errors("the job has failed"):
                schedule(read_input(spark, str(path), *options), ScheduleJob(spec, now))
        shutil.rmtree(path)
    assert read_store(spec) == expected


def test_generated_files_are_stored_as_another_reader_has_them(
    spark: SparkSession, tmp_path: Path, chance: random.Random, now: datetime
) -> None:
    check_files(spark, tmp_path, chance, now, groups=2, files=10)


@pytest.mark.soak(
    "ten thousand files take many minutes",
    part="random",
    proven_by="tests/integration/pipeline/test_generated_files.py::test_generated_files_are_stored_as_another_reader_has_them",
)
@pytest.mark.timeout(7_200)
def test_ten_thousand_generated_files_are_stored_as_another_reader_has_them(
    spark: SparkSession, tmp_path: Path, chance: random.Random, now: datetime
) -> None:
    check_files(spark, tmp_path, chance, now, groups=200, files=50)
