"""Read Parquet and ORC by Arrow, with the types that Spark gives their columns."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# The stubs of Arrow make arrays generic in a type that is known only at run time.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet as pq

from postdate.errors import PipelineError
from postdate.pipeline.engines import NeedsSpark
from postdate.pipeline.rows import INSTANT, pc
from postdate.pipeline.texts import ORIGIN

_ROWS_AT_ONCE: Final = 20_000
_CLOCK_TIME: Final = pa.timestamp("us")


def read_columnar_files(
    files: Sequence[Path], name: str, subject: str
) -> tuple[pa.Schema, Callable[[], Iterator[pa.RecordBatch]]]:
    """Return the columns of all files together, and a function that reads their rows.

    Raises:
        PipelineError: a file cannot be read.
        NeedsSpark: the files do not agree on a type, or have a type that Arrow reads in another way than Spark.
    """
    if not files:
        raise NeedsSpark(f"{subject} has no files")
    schema_of, batches_of = {
        "parquet": (_parquet_schema, _parquet_batches),
        "orc": (_orc_schema, _orc_batches),
    }[name]
    columns = dict[str, Any]()
    for file in files:
        try:
            fields = schema_of(file)
        except (OSError, pa.ArrowException) as error:
            raise PipelineError(f"cannot read {file}: {str(error).partition(chr(10))[0]}") from error
        for field in fields:
            earlier = columns.setdefault(field.name.lower(), field)
            if (earlier.name, earlier.type) != (field.name, field.type):
                raise NeedsSpark(f"{subject} have different columns {field.name!r}")
        if len({field.name.lower() for field in fields}) < len(fields):
            raise NeedsSpark(f"{file} has a column twice")
    if ORIGIN in columns:
        raise PipelineError(f"a column must not have the name {ORIGIN!r}; rename it")
    schema = pa.schema(list(columns.values()))
    return schema, partial(_read_batches, files, schema, batches_of)


def _read_batches(
    files: Sequence[Path], schema: pa.Schema, batches_of: Callable[[Path], Iterator[pa.RecordBatch]]
) -> Iterator[pa.RecordBatch]:
    for file in files:
        for batch in batches_of(file):
            arrays = [
                _convert(batch.column(field.name), field.type)
                if field.name in batch.schema.names
                else pa.nulls(batch.num_rows, field.type)
                for field in schema
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type in which a column is read here: one of few, with times in microseconds."""
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind) or pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    if pa.types.is_timestamp(kind):
        return _CLOCK_TIME if kind.tz is None else INSTANT
    return pa.date32() if pa.types.is_date64(kind) else kind


def _convert(column: pa.Array[Any], kind: pa.DataType) -> pa.Array[Any]:
    if column.type == kind:
        return column
    if pa.types.is_timestamp(kind) and column.type.unit == "ns":
        return _round_up(column.cast(pa.int64())).cast(kind)
    try:
        # A text that is not UTF-8 is no error here: its row is set aside later.
        return column.cast(kind, safe=not pa.types.is_string(kind))
    except pa.ArrowInvalid as error:
        raise NeedsSpark(f"a column has values that are not {kind}") from error


def _round_up(nanoseconds: Any) -> Any:
    """Return microseconds that are not before the nanoseconds, so that no message is early."""
    rounded_down = pc.divide(nanoseconds, 1_000)  # Towards zero.
    is_below = pc.less(pc.multiply(rounded_down, 1_000), nanoseconds)
    return pc.add(rounded_down, is_below.cast(pa.int64()))


# --- Parquet ----------------------------------------------------------------------------------------------------------


def _open_parquet(file: Path) -> pq.ParquetFile:
    return pq.ParquetFile(file, coerce_int96_timestamp_unit="us")


def _parquet_schema(file: Path) -> list[pa.Field[Any]]:
    with _open_parquet(file) as opened:
        instants = _int96_columns(opened)
        return [
            pa.field(field.name, INSTANT if field.name in instants else _plain_type(field.type))
            for field in opened.schema_arrow
        ]


def _int96_columns(opened: pq.ParquetFile) -> set[str]:
    """Return the columns in Spark's old type of instants, which Arrow takes for clock times."""
    columns = [opened.schema.column(number) for number in range(len(opened.schema.names))]
    return {column.path for column in columns if column.physical_type == "INT96"}


def _parquet_batches(file: Path) -> Iterator[pa.RecordBatch]:
    with _open_parquet(file) as opened:
        instants = _int96_columns(opened)
        for batch in opened.iter_batches(_ROWS_AT_ONCE):
            yield pa.RecordBatch.from_arrays(
                [
                    column.cast(_CLOCK_TIME).cast(INSTANT) if name in instants else column
                    for name, column in zip(batch.schema.names, batch.columns, strict=True)
                ],
                names=batch.schema.names,
            )


# --- ORC --------------------------------------------------------------------------------------------------------------


def _orc_schema(file: Path) -> list[pa.Field[Any]]:
    fields = list[Any]()
    for field in pyarrow.orc.ORCFile(file).schema:
        if pa.types.is_timestamp(field.type):
            # Arrow counts them in nanoseconds, which end in the year 2262.
            raise NeedsSpark(f"the column {field.name!r} of {file} is a time of ORC")
        fields.append(pa.field(field.name, _plain_type(field.type)))
    return fields


def _orc_batches(file: Path) -> Iterator[pa.RecordBatch]:
    yield from pyarrow.orc.ORCFile(file).read().to_batches(_ROWS_AT_ONCE)
