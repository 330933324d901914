"""CSV and JSON from bytes: each row as another reader has it, or malformed with all its bytes; nothing in between."""

import csv
import io
import json
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from postdate.errors import PipelineError
from postdate.pipeline import texts

CELLS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\r"), max_size=6) | st.sampled_from(
    ['"', '""', "\n", ",", "a\n\nb", '"a",\n', " x ", "Müller", "\\", "🕰"]
)
ENCODINGS = ["UTF-8", "latin-1", "cp1252", "utf-16"]


def rows_of(content: bytes, header: Sequence[str], encoding: str = "UTF-8") -> list[texts.Row]:
    """Read a file as Spark hands it over: in characters of one byte each, or decoded where that cannot be."""
    chosen = texts.Encoding(encoding)
    text = content.decode("latin-1" if chosen.is_ascii_compatible else encoding)
    return list(texts.CsvFile("file.csv", header, chosen).rows(text.removesuffix("\n")))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(CELLS, min_size=2, max_size=2), max_size=5), st.sampled_from(ENCODINGS))
@example([["a", 'x "y",\nz'], ["", ""]], "UTF-8")
def test_the_rows_are_those_that_another_reader_has(rows: list[list[str]], encoding: str) -> None:
    """Python's own writer and reader are the independent count."""
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows([["id", "body"], *rows])
    content = written.getvalue().encode(encoding, "replace")
    expected = list(csv.reader(io.StringIO(content.decode(encoding), newline="")))[1:]
    came = rows_of(content, ["id", "body"], encoding)
    assert [[cell or "" for cell in row.cells] for row in came] == expected
    assert not any(row.is_malformed for row in came)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=30))
def test_any_bytes_are_rows_or_malformed_or_refused(content: bytes) -> None:
    file = texts.CsvFile("file.csv", ["id", "body"], texts.Encoding())
    list(file.rows("id,body"))
    try:
        came = list(file.rows(content.decode("latin-1")))
    except PipelineError as error:
        assert "is never closed" in str(error)  # noqa: PT017 - refused, or read
        return
    assert came
    for row in came:
        assert row.content == content or (row.content in content and b"\n" in content)
        assert not row.is_malformed or list(row.cells) == [None, None]


@pytest.mark.parametrize(
    ("record", "line"), [('a,"never\nc,y\nd,z', 2), ('"a,never\nc,y', 2), ('a,x\nb,"y', 3), ('a,"x\ny",', None)]
)
def test_a_quote_that_is_never_closed_is_refused_by_file_and_line(record: str, line: int | None) -> None:
    file = texts.CsvFile("orders.csv", ["id", "body"], texts.Encoding())
    list(file.rows("id,body"))
    if line is None:
        assert [(row.is_malformed, row.line, row.content) for row in file.rows(record)] == [(True, 2, record.encode())]
        return
    with pytest.raises(PipelineError, match=rf"orders\.csv has a quote in line {line} .* never closed"):
        list(file.rows(record))


def test_bytes_in_another_encoding_are_malformed_whole() -> None:
    content = "id,body\na,Müller\nb,plain".encode("latin-1")
    lines = content.split(b"\n")
    assert rows_of(content, ["id", "body"], "latin-1") == [
        texts.Row(["a", "Müller"], is_malformed=False, content=lines[1], line=2),
        texts.Row(["b", "plain"], is_malformed=False, content=lines[2], line=3),
    ]
    file = texts.CsvFile("file.csv", ["id", "body"], texts.Encoding())
    came = [row for line in content.decode("latin-1").split("\n") for row in file.rows(line)]
    assert came == [
        texts.Row([None, None], is_malformed=True, content="a,Müller".encode("latin-1"), line=2),
        texts.Row(["b", "plain"], is_malformed=False, content=b"b,plain", line=3),
    ]


def test_whether_bytes_are_valid_depends_on_the_encoding_of_the_file() -> None:
    assert texts.Encoding("cp1252").is_valid("Müller".encode("cp1252"))
    assert not texts.Encoding().is_valid("Müller".encode("cp1252"))
    (row,) = list(texts.CsvFile("file.csv", ["id"], texts.Encoding("utf-16"), lines=1).rows("a,é"))
    assert row.is_malformed
    assert texts.Encoding("utf-16").is_valid(row.content)
    assert not texts.Encoding("utf-16").is_valid("\ufffd".encode())


def test_a_mark_of_the_encoding_is_none_of_the_name() -> None:
    assert texts.read_header("f", "\xef\xbb\xbfid,body", texts.Encoding()) == ["id", "body"]
    with pytest.raises(PipelineError, match=r"looks like UTF-16 .* say encoding UTF-16"):
        texts.read_header("f", "id,body".encode("utf-16").decode("latin-1"), texts.Encoding())
    with pytest.raises(PipelineError, match="no encoding 'utf-9'"):
        texts.Encoding("utf-9")


def test_names_are_those_that_spark_makes() -> None:
    assert texts.header_names(["id", "text", "text", None], case_sensitive=False) == ["id", "text1", "text2", "_c3"]
    assert texts.header_names(["a", "A"], case_sensitive=True) == ["a", "A"]
    assert texts.header_names(["a", "A"], case_sensitive=False) == ["a0", "A1"]


def test_text_behind_a_quoted_cell_is_no_record() -> None:
    assert list(texts.records('"a"x,b')) == [None]
    assert list(texts.records('"a" ,b')) == [["a", "b"]]
    assert list(texts.records('a "q",b')) == [['a "q"', "b"]]


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_cells_may_have_another_delimiter(delimiter: str) -> None:
    written = io.StringIO()
    cells = [["id", "body"], ["a", f'x{delimiter}"y,\nz'], ["b", ""], ["", " x "]]
    csv.writer(written, delimiter=delimiter, lineterminator="\n").writerows(cells)
    came = list(texts.records(written.getvalue().removesuffix("\n"), delimiter))
    assert [[cell or "" for cell in row or []] for row in came] == cells
    with pytest.raises(PipelineError, match="a delimiter is one character"):
        texts.Delimiter(delimiter * 2)


# --- JSON -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        b'{"a": 1} x',
        b'{"a": 1} {"a": 2}',
        b'{"a": 1, "a": 2}',
        b'{"a": 1, "A": 2}',
        b"[1]",
        b"1",
        b"",
        b'{"a": NaN}',
        b'{"a": "\xfc"}',
        rb'{"a": "\ud800"}',
        b"{'a': 1}",
        b'{"a": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
    ],
)
def test_a_line_that_is_more_or_less_than_an_object_is_malformed(line: bytes) -> None:
    assert texts.json_object(line, texts.Encoding(), case_sensitive=False) is None


def test_values_are_texts_as_they_are_written() -> None:
    line = '\ufeff{"id": 12300000000000000000, "Due": "é\\u0041", "f": 1e400, "o": {"b": [1.50, null]}, "n": null}'
    assert texts.json_object(line.encode(), texts.Encoding(), case_sensitive=False) == {
        "id": "12300000000000000000",
        "due": "éA",
        "f": "1e400",
        "o": '{"b": [1.50, null]}',
        "n": None,
    }


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(max_size=5), st.text(max_size=5) | st.none(), max_size=4), st.booleans())
def test_pairs_are_those_that_another_reader_has(values: dict[str, str | None], ascii_only: bool) -> None:
    assert dict(texts.json_pairs(json.dumps(values, ensure_ascii=ascii_only))) == values
