"""The files of an input on this machine, as Spark lists them."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from postdate.errors import PipelineError
from postdate.pipeline.engines import NeedsSpark

_ILLEGAL_IN_URLS: Final = frozenset(' "#%<>?[\\]^`{|}')


def local_paths(source: str) -> list[Path]:
    """Return the files and folders of this machine that a path or a pattern names."""
    path = Path(source)
    if path.exists():
        return [path]
    return sorted(Path(each) for each in glob.glob(source))  # noqa: PTH207 - any path, as given


def list_input_files(sources: Sequence[str]) -> list[Path]:
    """Return the files of an input: those named, and those in a folder, but for hidden ones.

    Folders inside a folder are ignored.

    Raises:
        NeedsSpark: a source is elsewhere, or a folder has folders whose names are columns.
        PipelineError: a source does not exist.
    """
    files = list[Path]()
    for source in sources:
        if "://" in source:
            raise NeedsSpark(f"{source!r} is not a path of this machine")
        paths = local_paths(source)
        if not paths:
            raise PipelineError(f"there is no file or folder {source!r} to read")
        for path in paths:
            files += _list_folder(path) if path.is_dir() else [path]
    hidden = next((file for file in files if _is_hidden(file)), None)
    if hidden is not None:
        raise NeedsSpark(f"{hidden} has the name of a hidden file")
    return files


def _list_folder(folder: Path) -> list[Path]:
    entries = sorted(each for each in folder.iterdir() if not _is_hidden(each))
    folders = [each for each in entries if each.is_dir()]
    if any("=" in each.name for each in folders):
        raise NeedsSpark(f"{folder} has folders in it whose names are columns")
    return [each for each in entries if each not in folders]


def _is_hidden(path: Path) -> bool:
    is_metadata = path.name.startswith("_") and "=" not in path.name
    return is_metadata or path.name.startswith(".") or path.name.endswith("._COPYING_")


def url_of_file(file: Path) -> str:
    """Return the address of a file as Spark writes it."""
    path = "".join(
        "".join(f"%{byte:02X}" for byte in each.encode()) if each in _ILLEGAL_IN_URLS or each < " " else each
        for each in str(file.absolute())
    )
    return f"file:{path}"


def size_in_bytes(sources: Sequence[str]) -> int | None:
    """Return the number of bytes of all files that the sources name; ``None`` if one is not on this machine."""
    if any("://" in source for source in sources):
        return None
    paths = (path for source in sources for path in local_paths(source))
    files = (each for path in paths for each in (path, *path.rglob("*")) if each.is_file())
    return sum(each.stat().st_size for each in files)
