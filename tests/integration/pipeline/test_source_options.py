"""The options of the format: what is wrong is refused before anything begins, with what to write instead."""

import re
from pathlib import Path

import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DateType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from postdate.errors import ConfigurationError, PipelineError
from postdate.pipeline import session
from postdate.pipeline.source import PostdateDataSource
from postdate.pipeline.source.options import OPTIONS, SourceOptions, StoreUse
from postdate.pipeline.source.reading import columns_of_schema
from postdate.pipeline.source.streaming import FollowPlan
from postdate.pipeline.source.writing import WritePlan, check_columns
from pyspark_postdate import DefaultSource

SECRET = "t0p-s3cret"
PAGE = Path(__file__).parents[3] / "docs" / "guides" / "spark-source.md"


def options(use: StoreUse = StoreUse.READING, **given: str) -> SourceOptions:
    return SourceOptions({name.lower(): value for name, value in given.items()}, use)


def struct(**types) -> StructType:
    return StructType([StructField(name, kind) for name, kind in types.items()])


MESSAGE = {"message_id": StringType(), "destination": StringType(), "due": TimestampType()}


# --- names and values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("use", "given", "words"),
    [
        (StoreUse.READING, {"stor": "sqlite:///a.db"}, "no option 'stor'; did you mean store?"),
        (StoreUse.READING, {"zzz": "1"}, "no option 'zzz'; there are store, config"),
        (StoreUse.READING, {"path": "a.db"}, "load() and save() without one"),
        (StoreUse.READING, {"maxRowsPerBatch": "5"}, "maxRowsPerBatch is for spark.readStream"),
        (StoreUse.WRITING, {"columns": "due"}, "columns is for spark.read and spark.readStream"),
        (StoreUse.READING, {"batch": "5"}, "batch is for df.write and df.writeStream"),
        (
            StoreUse.READING,
            {"what": "recrds"},
            "one of pending, records, queued (did you mean 'records'?), not 'recrds'",
        ),
        (StoreUse.READING, {"partitions": "0"}, "partitions must be a whole number, 1 or more, not '0'"),
        (StoreUse.READING, {"partitions": "many"}, "partitions must be a whole number, 1 or more, not 'many'"),
        (StoreUse.WRITING, {"batch": "-1"}, "batch must be a whole number, 1 or more, not '-1'"),
        (StoreUse.READING, {"synchronous": "off"}, "synchronous must be one of full, normal, not 'off'"),
        (StoreUse.READING, {"recording": "some"}, "recording must be one of"),
        (StoreUse.READING, {"endpoint": " "}, "endpoint must be the name of a queue"),
        (StoreUse.FOLLOWING, {"startingAt": "now"}, "startingAt must be one of earliest, latest, not 'now'"),
        (StoreUse.FOLLOWING, {"snapshot": "1-1"}, "snapshot is for spark.read; remove it"),
    ],
)
def test_wrong_options_are_refused_with_what_is_allowed(use: StoreUse, given: dict[str, str], words: str) -> None:
    with pytest.raises(PipelineError, match=re.escape(words)):
        options(use, **given)


def test_what_spark_adds_by_itself_is_let_pass() -> None:
    assert options(StoreUse.WRITING_A_STREAM, checkpointLocation="/tmp/x", batch="7").get("batch") == 7


def test_the_page_of_the_format_has_every_option() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert {option.name for option in OPTIONS.values()} <= set(rows)


# --- which store --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "name one store"),
        ({"store": "sqlite:///a.db", "config": "postdate.toml"}, "not with store and config both"),
        ({"store": "sqlight:///a.db"}, "did you mean sqlite"),
        ({"store": "memory:"}, "lives in one process"),
        ({"store": "env:POSTDATE_NOT_SET"}, "names the environment variable 'POSTDATE_NOT_SET'"),
        ({"store": "file:/not/there"}, "file:/not/there cannot be read"),
        ({"store": "sqlite:///a.db", "schema": "x"}, "schema is not for SQLite, which takes recording, synchronous"),
        ({"store": "postgresql://u@h/d", "synchronous": "full"}, "synchronous is not for PostgreSQL"),
        ({"config": "/not/there.toml"}, "there is no file '/not/there.toml'"),
    ],
)
def test_a_store_that_cannot_be_is_refused(given: dict[str, str], words: str) -> None:
    with pytest.raises((PipelineError, ConfigurationError), match=re.escape(words)):
        SourceOptions(given, StoreUse.READING).spec()


@pytest.mark.parametrize(
    "address",
    [
        f"postgresql://user:{SECRET}@host/database",
        f"postgresql://user@host/database?password={SECRET}",
        f"mariadb://user:{SECRET}@host/database",
        f"POSTGRESQL://user:{SECRET}@host/database",
        f"postgresql://user:{SECRET}@ho st/database",
    ],
)
def test_a_password_in_an_option_is_refused_and_not_shown(address: str) -> None:
    with pytest.raises((PipelineError, ConfigurationError)) as caught:
        options(store=address).spec()
    assert SECRET not in str(caught.value)


def test_a_password_is_refused_with_what_to_write() -> None:
    with pytest.raises(PipelineError, match=re.escape(".option('store', 'env:NAME')")) as caught:
        options(store=f"postgresql://user:{SECRET}@host/database").spec()
    assert ".option('store', 'file:/path')" in str(caught.value)
    assert ".option('config', '/path/postdate.toml')" in str(caught.value)


def test_a_misplaced_address_is_not_shown_either() -> None:
    with pytest.raises(PipelineError) as caught:
        options(what=f"postgresql://user:{SECRET}@host/database")
    assert SECRET not in str(caught.value)


def test_a_reference_stays_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ORDERS", f"postgresql://user:{SECRET}@host/database")
    (tmp_path / "address").write_text(f"postgresql://user:{SECRET}@host/database\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert options(store="env:ORDERS", schema="x").spec().address == "env:ORDERS"
    assert options(store="file:address").spec().address == f"file:{tmp_path / 'address'}"


def test_the_settings_of_the_command_line_serve_as_well(tmp_path: Path) -> None:
    file = tmp_path / "postdate.toml"
    file.write_text(
        '[endpoint]\nname = "orders"\n[store]\naddress = "postgresql://user@host/database"\nschema = "delayed"\n',
        encoding="utf-8",
    )
    spec = options(config=str(file)).spec()
    assert (spec.address, spec.endpoint, spec.schema) == ("postgresql://user@host/database", "orders", "delayed")
    assert options(config=str(file), schema="other", endpoint="bills").spec().schema == "other"


def test_settings_without_a_store_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "postdate.toml"
    file.write_text('[endpoint]\nname = "orders"\n', encoding="utf-8")
    with pytest.raises(ConfigurationError, match="names no store"):
        options(config=str(file)).spec()


# --- columns ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"due": None}, "messages need the column 'due'; there are message_id, destination"),
        ({"due": StringType()}, "F.to_timestamp('due') reads texts"),
        ({"due": TimestampNTZType()}, "its times have no zone"),
        ({"due": DateType()}, "a day has no time"),
        ({"due": LongType()}, "the column 'due' is bigint; it must be timestamp"),
        ({"expires_at": StringType()}, "F.to_timestamp('expires_at')"),
        ({"message_id": LongType()}, "F.col('message_id').cast('string')"),
        ({"body": ArrayType(LongType())}, "the column 'body' is array<bigint>; it must be binary or string"),
        ({"headers": MapType(StringType(), LongType())}, "a JSON object of texts"),
        ({"header": StringType()}, "no column 'header', only message_id"),
        ({"header": StringType()}, "rename it to headers"),
        ({"colour": StringType()}, "drop it"),
        ({"Message_ID": StringType(), "message_id": None}, "rename it to message_id"),
    ],
)
def test_columns_that_cannot_be_written_are_refused(changed: dict[str, object], words: str) -> None:
    types = {name: kind for name, kind in (MESSAGE | changed).items() if kind is not None}
    with pytest.raises(PipelineError, match=re.escape(words)):
        check_columns(struct(**types))


def test_all_that_can_be_written_is_taken() -> None:
    full = MESSAGE | {"expires_at": TimestampType(), "number_of_failures": LongType()}
    check_columns(struct(**MESSAGE))
    check_columns(struct(**full, headers=MapType(StringType(), StringType()), body=BinaryType()))
    check_columns(struct(**full, headers=StringType(), body=StringType()))


def test_a_schema_of_the_readers_own_must_be_one_of_columns() -> None:
    reading = options()
    assert columns_of_schema(reading, struct(due=TimestampType(), message_id=StringType())).names == [
        "due",
        "message_id",
    ]
    with pytest.raises(PipelineError, match="column 'due' of pending is timestamp, not string"):
        columns_of_schema(reading, struct(due=StringType()))
    with pytest.raises(PipelineError, match="no column 'colour'"):
        columns_of_schema(reading, struct(colour=StringType()))


def test_only_records_are_followed_and_only_messages_written(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'a.db'}"
    with pytest.raises(PipelineError, match=re.escape(".option('what', 'records')")):
        FollowPlan.of(options(StoreUse.FOLLOWING, store=store), struct(due=TimestampType()))
    with pytest.raises(PipelineError, match="must be pending or queued here, not 'records'"):
        WritePlan.of(options(StoreUse.WRITING, store=store, what="records"))


def test_the_package_that_spark_finds_stands_for_the_format() -> None:
    given = {"store": "sqlite:///a.db", "what": "queued"}
    assert DefaultSource.name() == PostdateDataSource.name() == "postdate"
    assert DefaultSource(given).schema() == PostdateDataSource(given).schema()


def test_the_java_of_executors_goes_by_utc_beside_the_options_of_a_user() -> None:
    """ORC shows a time by the zone of the Java that reads it."""
    name = "spark.executor.extraJavaOptions"
    assert session._settings("spark://host:7077", {name: "-Xss4m"})[name] == "-Duser.timezone=UTC -Xss4m"
    assert name not in session._settings("local[1]", {})
