"""New folders that jobs write to, on this machine."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# The stubs of Arrow make arrays generic in a type that is known only at run time.

from __future__ import annotations

import base64
import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from postdate.errors import PipelineError
from postdate.pipeline.engines import NeedsSpark
from postdate.pipeline.outputs import check_new_path, is_uri


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """A folder that does not exist and can be written, by :func:`check_local_folder`.

    Args:
        location: as the user named it.
    """

    location: str

    @property
    def path(self) -> Path:
        return Path(self.location).expanduser().absolute()

    def write(self, table: pa.Table, output_format: str) -> None:
        """Write a table to the folder, once: as one file of JSON lines, CSV or Parquet."""
        part = self.path / f"part-00000.{output_format}"
        try:
            self.path.mkdir(parents=True)
            match output_format:
                case "json":
                    with part.open("w", encoding="utf-8", newline="\n") as file:
                        for batch in table.to_batches(10_000):
                            file.writelines(f"{_json_line(row)}\n" for row in batch.to_pylist(maps_as_pydicts="strict"))
                case "csv":
                    with part.open("w", encoding="utf-8", newline="") as file:
                        writer = csv.writer(file, lineterminator="\n")
                        writer.writerow(table.column_names)
                        writer.writerows(map(_plain, row.values()) for row in table.to_pylist())
                case _:
                    pq.write_table(table, part)
            (self.path / "_SUCCESS").touch()
        except OSError as error:
            raise PipelineError(f"{self.location} cannot be written: {error}") from error


def check_local_folder(location: str | Path, subject: str) -> LocalFolder:
    """Check that a folder can be made, and return it. Nothing of the check is left there.

    Raises:
        NeedsSpark: it is a URI.
        PipelineError: the folder exists, or cannot be made.
    """
    if is_uri(str(location)):
        raise NeedsSpark(f"{location} is not a folder of this machine")
    check_new_path(location, subject)
    folder = LocalFolder(str(location))
    missing = [path for path in (folder.path, *folder.path.parents) if not path.exists()]
    try:
        folder.path.mkdir(parents=True)
    except OSError as error:
        raise PipelineError(f"{location} cannot be written: {error}") from error
    finally:
        for path in missing:
            if path.is_dir():
                path.rmdir()
    return folder


def _json_line(row: Mapping[str, Any]) -> str:
    """Return a row as JSON without its nulls, with bytes in base64 and times in ISO 8601, as Spark writes it."""
    return json.dumps({name: _plain(value) for name, value in row.items() if value is not None}, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if hasattr(value, "isoformat"):
        return f"{value:%Y-%m-%dT%H:%M:%S}.{value.microsecond:06}Z"
    return value
