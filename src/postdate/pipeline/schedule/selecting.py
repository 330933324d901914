"""From the columns of a table to those of messages, in Spark SQL."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses
from pyspark.sql import types as sql_types

from postdate.errors import PipelineError
from postdate.messages import Headers
from postdate.pipeline import rows as pipeline_rows
from postdate.pipeline.files import ORIGIN, ORIGIN_FIELD
from postdate.pipeline.lapsing import relative_expiry_of
from postdate.pipeline.local_time import ZoneTimes, add_time
from postdate.pipeline.schedule import storing
from postdate.pipeline.schedule.columns import ColumnMapping
from postdate.ports.scanning import WRITTEN_COLUMNS

_CONTENT = pipeline_rows.spark_schema(pipeline_rows.MESSAGE_COLUMNS)


def select_messages(messages: DataFrame, columns: ColumnMapping, zone_times: ZoneTimes | None, limit: int) -> DataFrame:
    """Return the columns of a message, ``reason`` (null for good rows), and in ``shown`` the bytes of a bad row.

    ``wall_time`` is the clock time and zone of rows that are due by the clocks of a zone. ``origin`` says where a row
    of a file stands.

    Headers become text if they are a map. The content of a text is checked later, together with everything that Spark
    would alter. A body over ``limit`` bytes is removed here: a few of them would fill the memory of every later step.
    """
    types = {column.name: column.dataType for column in messages.schema}
    for name in (columns.message_id, columns.destination):
        if isinstance(types.get(name), (*_NESTED, sql_types.VariantType)):
            raise PipelineError(f"{name} must be a text, not {types[name].simpleString()}; convert it first")
    prefix = "postdate~"
    while any(name.lower().startswith(prefix) for name in messages.columns):
        prefix += "~"

    def step(name: str) -> Column:
        return F.col(pipeline_rows.quote_name(prefix + name))

    # Each step is a column that the next ones name; for the reason see add_time().
    rows = messages.withColumns(
        {prefix + "headers": _headers(messages, columns.headers), prefix + "body": _body(messages, columns.body)}
    )
    due_column = F.col(pipeline_rows.quote_name(columns.due))
    rows = add_time(rows, prefix + "due", due_column, types[columns.due], zone_times)
    due, headers, body = step("due"), step("headers"), step("body")
    reasons = [
        F.when(_has_invalid_text(messages, columns), F.lit(pipeline_rows.NOT_UTF8)),
        *_missing_reasons(columns),
        due["problem"],
    ]
    expires_at: Column = F.lit(None).cast("timestamp")
    if columns.expires_at is not None:
        expiry_column = F.col(pipeline_rows.quote_name(columns.expires_at))
        rows = add_time(rows, prefix + "expires_at", expiry_column, types[columns.expires_at], zone_times)
        expires_at, problem = step("expires_at")["instant"], step("expires_at")["problem"]
        reasons.append(F.when(problem.isNotNull(), F.concat(F.lit("expiry_"), problem)))
    # The time to be received counts from the time sent, not from the due time: such a message would never be handled
    # (docs/specification-rows.md, row 75). A message whose end is malformed is accepted, and fails at its receiver.
    expires_before_due = relative_expiry_of(_expiry_headers(headers)) < due["instant"]
    reasons += [
        F.when(F.octet_length(body) > limit, F.lit(storing.TOO_LARGE)),
        F.when(expires_before_due, F.lit("lapses_before_due")),
    ]
    origin = F.col(ORIGIN) if ORIGIN in messages.columns else F.lit(None).cast(ORIGIN_FIELD.dataType)
    reason, good = step("reason"), step("reason").isNull()
    return rows.withColumn(prefix + "reason", F.coalesce(origin["reason"], *reasons)).select(
        F.when(good, F.col(pipeline_rows.quote_name(columns.message_id)).cast("string")).alias("message_id"),
        F.when(good, _destination(columns.destination)).alias("destination"),
        due["instant"].alias("due"),
        expires_at.alias("expires_at"),
        F.when(good, headers).alias("headers"),
        F.when(good, body).alias("body"),
        reason.alias("reason"),
        F.when(reason.isNotNull(), _original_bytes(messages, columns)).alias("shown"),
        F.when(good, due["wall_time"]).alias("wall_time"),
        origin.alias("origin"),
    )


def _destination(name: str) -> Column:
    return F.lit(name[1:]) if name.startswith("=") else F.col(pipeline_rows.quote_name(name)).cast("string")


def _missing_reasons(columns: ColumnMapping) -> list[Column]:
    required = {
        "missing_id": F.col(pipeline_rows.quote_name(columns.message_id)).cast("string"),
        "missing_due": F.col(pipeline_rows.quote_name(columns.due)).cast("string"),
        "missing_destination": _destination(columns.destination),
    }
    return [F.when(column.isNull() | (F.trim(column) == ""), F.lit(reason)) for reason, column in required.items()]


def _has_invalid_text(messages: DataFrame, columns: ColumnMapping) -> Column:
    """Return whether a text of a row is not UTF-8. Spark's own functions would alter such a text."""
    not_utf8 = F.lit(False)
    for name in asdict(columns).values():
        if name is None or name.startswith("="):
            continue
        column, data_type = F.col(pipeline_rows.quote_name(name)), messages.schema[name].dataType
        is_id_in_bytes = isinstance(data_type, sql_types.BinaryType) and name in {
            columns.message_id,
            columns.destination,
        }
        if isinstance(data_type, sql_types.StringType) or is_id_in_bytes:
            not_utf8 |= F.coalesce(~F.is_valid_utf8(column.cast("string")), F.lit(False))
        elif _is_map_of_texts(data_type):  # Headers as a map. To make its text by a cast takes several times as long.
            texts = F.concat_ws(",", F.map_keys(column), F.map_values(column))
            not_utf8 |= ~F.is_valid_utf8(texts)
        elif isinstance(data_type, _NESTED):  # This text has the bytes of all texts in the value.
            not_utf8 |= F.coalesce(~F.is_valid_utf8(column.cast("string")), F.lit(False))
    return not_utf8


def _is_map_of_texts(data_type: sql_types.DataType) -> bool:
    return isinstance(data_type, sql_types.MapType) and all(
        isinstance(each, sql_types.StringType) for each in (data_type.keyType, data_type.valueType)
    )


def _headers(messages: DataFrame, name: str | None) -> Column:
    """Return the headers as a text that is a JSON object."""
    if name is None:
        return F.lit(None).cast("string")
    column, data_type = F.col(pipeline_rows.quote_name(name)), messages.schema[name].dataType
    if isinstance(data_type, sql_types.StringType):
        return F.when(F.trim(column) != "", column)
    if isinstance(data_type, sql_types.VariantType):
        return F.to_json(column)
    if isinstance(data_type, sql_types.StructType):
        _refuse_alteration(data_type, "headers")
        if any(isinstance(field.dataType, _NESTED) for field in data_type.fields):
            column = F.when(column.isNotNull(), F.struct(*(_header_of_field(column, field) for field in data_type)))
        # A null field is no header; nulls inside of a field stay.
        return F.to_json(column, {**pipeline_rows.TIME_FORMATS, "ignoreNullFields": "true"})
    if not isinstance(data_type, sql_types.MapType):
        raise PipelineError(f"headers must be a map, a struct or a text, not {data_type.simpleString()}")
    value = data_type.valueType
    _refuse_bytes(data_type, "headers")
    _refuse_alteration(value, "headers")
    if isinstance(data_type.keyType, _NESTED):
        raise PipelineError(f"headers must be texts, not {data_type.simpleString()}; convert them first")
    if isinstance(value, _NESTED):
        column = F.transform_values(column, lambda _, nested: F.to_json(nested, _JSON))
    return F.to_json(column.cast("map<string,string>"))


def _header_of_field(column: Column, field: sql_types.StructField) -> Column:
    value = column[field.name]
    return (F.to_json(value, _JSON) if isinstance(field.dataType, _NESTED) else value).alias(field.name)


_JSON = {"ignoreNullFields": "false", **pipeline_rows.TIME_FORMATS}
_NESTED = (sql_types.ArrayType, sql_types.MapType, sql_types.StructType)


def _refuse_bytes(data_type: sql_types.DataType, what: str) -> None:
    """Raise PipelineError for a value with bytes in it: JSON has none, and Spark would write them as base64."""
    if _has_bytes(data_type):
        raise PipelineError(f"{what} must be texts, not {data_type.simpleString()}; convert them first")


_PLAIN_KEYS = (sql_types.StringType, sql_types.IntegralType, sql_types.BooleanType)
"""Types of keys that Spark writes into JSON as they are; of a date it writes the number of the day."""


def _refuse_alteration(data_type: sql_types.DataType, what: str) -> None:
    """Raise PipelineError for a value that Spark alters when it becomes JSON: with bytes, or with times as keys."""
    _refuse_bytes(data_type, what)
    if (key := _key_without_text(data_type)) is not None:
        raise PipelineError(
            f"{what} must not have keys of the type {key.simpleString()} in a map; convert them to texts first"
        )


def _key_without_text(data_type: sql_types.DataType) -> sql_types.DataType | None:
    match data_type:
        case sql_types.ArrayType():
            return _key_without_text(data_type.elementType)
        case sql_types.MapType():
            is_plain = isinstance(data_type.keyType, _PLAIN_KEYS)
            return _key_without_text(data_type.valueType) if is_plain else data_type.keyType
        case sql_types.StructType():
            keys = (_key_without_text(field.dataType) for field in data_type.fields)
            return next((key for key in keys if key is not None), None)
        case _:
            return None


def _has_bytes(data_type: sql_types.DataType) -> bool:
    match data_type:
        case sql_types.BinaryType():
            return True
        case sql_types.ArrayType():
            return _has_bytes(data_type.elementType)
        case sql_types.MapType():
            return _has_bytes(data_type.keyType) or _has_bytes(data_type.valueType)
        case sql_types.StructType():
            return any(_has_bytes(field.dataType) for field in data_type.fields)
        case _:
            return False


def _expiry_headers(headers: Column) -> Column:
    """Return headers that may set an expiry as a map; null for all other headers, which are nearly all."""
    may_expire = headers.contains(Headers.TIME_TO_BE_RECEIVED) | headers.contains("\\u")
    return F.when(may_expire, F.from_json(headers, "map<string,string>"))


def _body(messages: DataFrame, name: str | None) -> Column:
    if name is None:
        return F.lit(None).cast("binary")
    column, data_type = F.col(pipeline_rows.quote_name(name)), messages.schema[name].dataType
    if isinstance(data_type, sql_types.BinaryType | sql_types.StringType):
        return column.cast("binary")
    if isinstance(data_type, (*_NESTED, sql_types.VariantType)):
        _refuse_alteration(data_type, "a body that becomes JSON")
        return F.to_json(column, _JSON).cast("binary")
    raise PipelineError(f"a body must be binary, a text or a struct, not {data_type.simpleString()}")


def _original_bytes(messages: DataFrame, columns: ColumnMapping) -> Column:
    """Return the original bytes of a row's message, to set it aside."""
    contents = {name: F.lit(None).cast("binary") for name in WRITTEN_COLUMNS}
    for name, column in asdict(columns).items():
        if column is not None and column.startswith("="):
            contents[name] = F.lit(column[1:]).cast("binary")
        elif column is not None:
            data_type, value = messages.schema[column].dataType, F.col(pipeline_rows.quote_name(column))
            # This also works for a value with bytes that are not UTF-8, which JSON cannot represent.
            text = value.cast("string")
            if isinstance(data_type, _NESTED):
                text = F.when(F.is_valid_utf8(text), F.to_json(value, _JSON)).otherwise(text)
            contents[name] = value if isinstance(data_type, sql_types.BinaryType) else text.cast("binary")
    return F.struct(*(contents[name].alias(name) for name in WRITTEN_COLUMNS))


def find_checksums(messages: DataFrame, columns: ColumnMapping) -> DataFrame:
    """Return the number of all rows, with a null ``id_checksum``, and the checksums of ids that may be repeated.

    There are nearly never such checksums. Only the column of ids is read, and eight bytes of each id are shuffled.
    """
    id_ = F.col(pipeline_rows.quote_name(columns.message_id)).cast("string")
    checksum = F.coalesce(F.xxhash64(id_), F.lit(0)).alias("id_checksum")
    checksum_counts = messages.select(checksum).rollup("id_checksum").agg(F.count("*").alias("rows"))
    return checksum_counts.where("id_checksum IS NULL OR rows > 1")


def mark_conflicts(rows: DataFrame, candidates: DataFrame, limit: int) -> DataFrame:
    """Set the reason ``conflicting_rows`` for all rows whose id is in the input with different content.

    None of these rows can be preferred. Only good rows are compared, in the form in which they will be stored. Only ids
    and checksums are shuffled, never bodies.
    """
    headers = F.array_sort(F.map_entries(F.from_json("headers", "map<string,string>")))
    parts = [*map(F.col, ("due", "destination", "expires_at")), headers, F.col("body")]
    content = F.xxhash64(*parts, *(part.isNull() for part in parts))  # The checksum includes which parts are null.
    conflicting = (
        rows.where(F.col("reason").isNull())
        .withColumn("id_checksum", F.xxhash64("message_id"))
        .join(candidates, "id_checksum", "left_semi")
        .select(*pipeline_rows.MESSAGE_COLUMNS.names, "wall_time")
        .mapInArrow(partial(_select_good, limit), _CONTENT)
        .select("message_id", content.alias("content"))
        .groupBy("message_id")
        .agg(F.min("content").alias("least"), F.max("content").alias("greatest"))
        .where(F.col("least") != F.col("greatest"))
        .select("message_id", F.lit("conflicting_rows").alias("conflict"))
    )
    return rows.join(F.broadcast(conflicting), "message_id", "left").withColumn(
        "reason", F.coalesce("reason", "conflict")
    )


def _select_good(limit: int, batches: pipeline_rows.Batches) -> pipeline_rows.Batches:
    """Return the rows that are messages, with their headers in the one form in which they are stored."""
    for batch in batches:
        yield pipeline_rows.split_columns(storing.add_own_headers(batch, None), limit)[0]
