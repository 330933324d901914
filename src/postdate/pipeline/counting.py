"""Count the rows of files with another reader than the one that stores them, to verify a job.

CSV is counted by the module :mod:`csv`, JSON by its lines, Parquet and ORC by what their files say at the end. Each
file is read as bytes by one task, which needs memory for it. Runs on the driver and on executors.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# The stubs of Arrow make arrays generic in a type that is known only at run time.

from __future__ import annotations

import bz2
import csv
import gzip
import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet

from postdate.errors import PipelineError
from postdate.pipeline.failures import shorten_errors
from postdate.pipeline.inputs import WHOLE_FILES, escape_file_path, input_format_of
from postdate.pipeline.rows import Batches
from postdate.pipeline.texts import Encoding

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LARGEST_CELL: Final = 2**31 - 1
_DECOMPRESS: Final[Mapping[str, Callable[[bytes], bytes]]] = MappingProxyType(
    {".gz": gzip.decompress, ".bz2": bz2.decompress}
)


def count_rows(
    spark: SparkSession,
    path: str | Sequence[str],
    input_format: str | None = None,
    encoding: str = "UTF-8",
    delimiter: str = ",",
) -> int:
    """Return the number of rows in files or directories.

    For the arguments see :func:`postdate.pipeline.files.read_input`.

    Raises:
        PipelineError: the format has no other reader, or a file cannot be read, for example because it is larger than
            2 GiB.
    """
    paths = [path] if isinstance(path, str) else list(path)
    name = _counted_format_of(paths, input_format)
    count = partial(_count_files, name, Encoding(encoding), delimiter)
    with shorten_errors(f"cannot count the rows of {', '.join(map(repr, paths))}"):
        reader = spark.read.options(**WHOLE_FILES).format("binaryFile")
        files = reader.load([*map(escape_file_path, paths)]).select("path", "content")
        return sum(row["rows"] for row in files.mapInArrow(count, "rows long").collect())


def _counted_format_of(paths: Sequence[str], input_format: str | None) -> str:
    name = input_format_of(paths, input_format)
    if name not in _COUNTERS:
        raise PipelineError(f"rows of {name} have no other reader here; verify {', '.join(_COUNTERS)}")
    return name


def count_rows_in_files(
    files: Sequence[Path], input_format: str | None = None, encoding: str = "UTF-8", delimiter: str = ","
) -> int:
    """Return the number of rows in files of this machine, without Spark."""
    name = _counted_format_of([str(file) for file in files], input_format)
    return sum(_count_file(name, Encoding(encoding), delimiter, str(file), file.read_bytes()) for file in files)


def _count_files(name: str, encoding: Encoding, delimiter: str, batches: Batches) -> Batches:
    for batch in batches:
        counts = list[int]()
        for row in range(batch.num_rows):
            path, content = (batch.column(number)[row].as_py() for number in (0, 1))
            counts.append(_count_file(name, encoding, delimiter, path, content))
        yield pa.record_batch([pa.array(counts, pa.int64())], names=["rows"])


def _count_file(name: str, encoding: Encoding, delimiter: str, path: str, content: bytes) -> int:
    return _COUNTERS[name](decompress(path, content), encoding, delimiter)


def decompress(path: str, content: bytes) -> bytes:
    """Return the content of a file that may be compressed, by the end of its name."""
    unpack = next((each for end, each in _DECOMPRESS.items() if path.endswith(end)), None)
    return content if unpack is None else unpack(content)


def _count_csv(content: bytes, encoding: Encoding, delimiter: str) -> int:
    # The positions of quotes, delimiters and line breaks do not depend on the meaning of the other bytes.
    text = content.decode("latin-1" if encoding.is_ascii_compatible else encoding.name, "replace")
    text = text.removeprefix("\xef\xbb\xbf").removeprefix("\ufeff")  # Before a first cell that begins with a quote.
    limit = csv.field_size_limit(_LARGEST_CELL)
    try:
        rows = sum(1 for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter) if row)
    finally:
        csv.field_size_limit(limit)
    return max(rows - 1, 0)


def _count_json(content: bytes, encoding: Encoding, delimiter: str) -> int:
    del encoding, delimiter
    return sum(1 for line in content.splitlines() if line.strip())


def _count_parquet(content: bytes, encoding: Encoding, delimiter: str) -> int:
    del encoding, delimiter
    return pyarrow.parquet.ParquetFile(pa.BufferReader(content)).metadata.num_rows


def _count_orc(content: bytes, encoding: Encoding, delimiter: str) -> int:
    del encoding, delimiter
    return pyarrow.orc.ORCFile(pa.BufferReader(content)).nrows


_COUNTERS: Final[Mapping[str, Callable[[bytes, Encoding, str], Any]]] = MappingProxyType(
    {"csv": _count_csv, "json": _count_json, "parquet": _count_parquet, "orc": _count_orc}
)
