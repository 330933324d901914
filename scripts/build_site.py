"""Build the site of the documentation into build/site: ``make site``, or ``python scripts/build_site.py``.

The pages are those of docs/, which also read well in the repository. A copy of them, build/site-pages, differs in this:

- Pages from outside of docs/ are in it (the architecture, the changelog and others). Links to any other file of the
  repository lead to the repository, whose address is in pyproject.toml.
- A block of code that names a file, as ``toml postdate.toml``, has the name as its title.
- Lists are indented by four spaces, as Python-Markdown needs it.
- It has the reference: what public modules offer, from their docstrings, and the help of all commands.

A link to a file that does not exist is an error here. Links between pages, and anchors, are checked by zensical, whose
option ``--strict`` makes each warning an error, and once more in the finished pages by tests/docs/test_site.py.
"""

import argparse
import contextlib
import importlib
import io
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from package_readme import revision_of

ROOT = Path(__file__).resolve().parents[1]
CONFIGURATION = ROOT / "scripts" / "site.toml"
BUILD = ROOT / "build"

PAGES_OUTSIDE_OF_DOCS = {
    "ARCHITECTURE.md": "contribute/architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "contribute/code-of-conduct.md",
    "CONTRIBUTING.md": "contribute/contributing.md",
    "RELEASING.md": "contribute/releasing.md",
    "SECURITY.md": "report-a-weakness.md",
    "benchmarks/README.md": "contribute/benchmarks.md",
    "examples/README.md": "contribute/examples.md",
}
"""Where each is on the site. The README has no page of its own: docs/index.md stands for it, and its part *Install* is
a page, so that there is one place to change when something is published."""

INSTALL = PurePosixPath("start/install.md")

MODULES = {
    "postdate": "The names of `postdate`: endpoint, client, databases, sagas",
    "postdate.client.testing": "The client of tests",
    "postdate.client.django": "The database of Django",
    "postdate.errors": "Errors",
    "postdate.ports": "Interfaces of stores and transports",
    "postdate.testing": "Tools for tests",
}
"""The modules of the reference, and the title of the page of each."""

JOBS = {
    "Session and store": ("session.spark_session", "stores.StoreSpec", "source.register"),
    "Schedule": (
        "schedule.schedule",
        "schedule.ScheduleJob",
        "schedule.ColumnMapping",
        "schedule.Rejects",
        "schedule.ScheduleResult",
        "loads.list_loads",
        "loads.show_load",
        "loads.undo_load",
    ),
    "Sweep": ("sweep.sweep", "sweep.sweep_continuously", "dispatching.SweepSpec", "sweep.SweepResult"),
    "Delay": ("delay.delay", "delay.run_delay", "delay.read_waiting"),
    "Audit, forecast, history": (
        "audit.audit",
        "audit.AuditResult",
        "forecast.forecast",
        "forecast.forecast_frame",
        "forecast_result.ForecastOptions",
        "history.write_history",
        "history.read_history",
    ),
    "Expiry of messages in a column": ("expiry_of", "is_expired", "has_malformed_expiry"),
}
"""The names of :mod:`postdate.pipeline` that have a page of the reference together."""

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_FENCE_OF_FILE = re.compile(r"^```(\w+) (\S+)$", re.MULTILINE)
_LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)\s]+)(?=\))")
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
_INDENTED = re.compile(r"^( {2,6})(?=\S)", re.MULTILINE)
_PICTURES = {".png", ".svg"}
_ABOUT_ADAPTERS = """\
They are what the database objects make, such as `Postgres(url).store`. Their methods are those of
[the interfaces](postdate.ports.md).
"""
_ONLY_ITS_DOCSTRING = """\
    options:
      members: false
      show_root_heading: false
      show_root_toc_entry: false
"""


# --- the pages of the repository --------------------------------------------------------------------------------------


def site_path(path: PurePosixPath) -> PurePosixPath | None:
    """Return where a file or folder of the repository is on the site; ``None``: it is not there."""
    if path == PurePosixPath("README.md"):
        return PurePosixPath("index.md")
    if str(path) in PAGES_OUTSIDE_OF_DOCS:
        return PurePosixPath(PAGES_OUTSIDE_OF_DOCS[str(path)])
    if path.parts[0] != "docs":
        return None
    on_site = path.relative_to("docs")
    if (ROOT / path).is_dir():
        return on_site / "index.md" if (ROOT / path / "index.md").is_file() else None
    return on_site if path.suffix == ".md" or path.suffix in _PICTURES else None


def outside_of_fences(text: str, change: Callable[[str], str]) -> str:
    """Return the text with everything changed but code."""
    parts, position = list[str](), 0
    for fence in _FENCE.finditer(text):
        parts += [change(text[position : fence.start()]), fence[0]]
        position = fence.end()
    return "".join([*parts, change(text[position:])])


def with_links_of_the_site(text: str, source: PurePosixPath, page: PurePosixPath, repository: str) -> str:
    """Return the text of the file ``source`` with links that are right on its page of the site.

    Raises:
        SystemExit: there is no such file.
    """

    def changed(link: re.Match[str]) -> str:
        target, _, anchor = link["target"].partition("#")
        if not target or _ADDRESS.match(target):
            return link[0]
        path = PurePosixPath(os.path.normpath(source.parent / target))
        if not (ROOT / path).exists():
            raise SystemExit(f"build_site: {source} links to {link['target']}, and {path} does not exist")
        if (str(path), anchor) == ("README.md", "install"):
            on_site, anchor = INSTALL, ""
        else:
            on_site = site_path(path)
        address = f"{repository}/{path}" if on_site is None else os.path.relpath(on_site, page.parent)
        return f"{link['before']}{address}" + (f"#{anchor}" if anchor else "")

    return outside_of_fences(text, lambda part: _LINK.sub(changed, part))


def with_lists_of_python_markdown(text: str) -> str:
    """Return the text with what belongs to a list item indented by four spaces a level instead of two or three."""

    def indented(part: str) -> str:
        return _INDENTED.sub(lambda spaces: "    " * (1 + (len(spaces[1]) > 3)), part)

    return outside_of_fences(text, indented)


def sources() -> Iterator[tuple[PurePosixPath, PurePosixPath]]:
    """Yield each file of the repository that is on the site, and its path there."""
    files = [ROOT / path for path in PAGES_OUTSIDE_OF_DOCS] + sorted((ROOT / "docs").rglob("*"))
    for file in files:
        source = PurePosixPath(file.relative_to(ROOT).as_posix())
        if file.is_file() and (page := site_path(source)) is not None:
            yield source, page


def write_pages(folder: Path, repository: str) -> None:
    """Write the pages of the repository as the site needs them."""
    for source, page in sources():
        target = folder / page
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix != ".md":
            shutil.copyfile(ROOT / source, target)
            continue
        text = (ROOT / source).read_text("utf-8")
        text = with_lists_of_python_markdown(with_links_of_the_site(text, source, page, repository))
        target.write_text(_FENCE_OF_FILE.sub(r'```\1 title="\2"', text), "utf-8")
    readme = (ROOT / "README.md").read_text("utf-8")
    part = readme.partition("\n## Install\n")[2].partition("\n## ")[0]
    if not part:
        raise SystemExit("build_site: README.md has no part Install")
    text = with_links_of_the_site(f"# Install\n{part}\n", PurePosixPath("README.md"), INSTALL, repository)
    (folder / INSTALL).write_text(text, "utf-8")
    shutil.copyfile(CONFIGURATION.with_name("site.css"), folder / "site.css")


# --- the reference ----------------------------------------------------------------------------------------------------


def public_names(module_name: str) -> dict[str, str]:
    """Return the classes and functions of a module, or that a package hands on, and the module that each is from."""
    module = importlib.import_module(module_name)
    homes = {name: getattr(getattr(module, name), "__module__", "") for name in dir(module) if name[0] != "_"}
    own = f"{module_name.partition('.')[0]}." if hasattr(module, "__path__") else module_name
    names = sorted((name for name in homes if callable(getattr(module, name))), key=str.lower)
    return {name: homes[name] for name in names if homes[name].startswith(own)}


def write_reference_of_modules(folder: Path) -> None:
    """Write a page for each module: what it is for, then each name.

    The stores and transports of the backends have a page of their own, without their methods: these are described by
    the ports, and their pages would be longer than all others.
    """
    import postdate

    folder.mkdir(parents=True, exist_ok=True)
    adapters = ["# Stores and transports by name\n", _ABOUT_ADAPTERS]
    for module, title in MODULES.items():
        parts = [f"# {title}\n\n::: {module}\n{_ONLY_ITS_DOCSTRING}"]
        for name, home in public_names(module).items():
            if home.startswith("postdate.backends.") and name not in postdate.__all__:
                adapters.append(
                    f"::: {module}.{name}\n    options:\n      inherited_members: false\n      members: false\n"
                )
            else:
                parts.append(f"::: {module}.{name}\n")
        (folder / f"{module}.md").write_text("\n".join(parts), "utf-8")
    (folder / "adapters.md").write_text("\n".join(adapters), "utf-8")
    jobs = ["# Jobs on Spark: `postdate.pipeline`\n"]
    for heading, names in JOBS.items():
        jobs += [f"## {heading}\n", *(f"::: postdate.pipeline.{name}\n" for name in names)]
    (folder / "postdate.pipeline.md").write_text("\n".join(jobs), "utf-8")


def help_of(words: Sequence[str]) -> str:
    """Return what a command prints with ``--help``."""
    from postdate.cli.entry import run

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exit_code = run([*words, "--help"])
    if exit_code:
        raise SystemExit(f"build_site: `postdate {' '.join(words)} --help` ends with {exit_code}")
    return output.getvalue()


def commands(words: Sequence[str] = ()) -> Iterator[tuple[Sequence[str], str]]:
    """Yield each command, as words, with its help. The help of a group names its commands."""
    text = help_of(words)
    yield words, text
    part = re.search(r"^Commands:\n((?:  .*\n)+)", text, re.MULTILINE)
    for name in re.findall(r"^  (\S+)", part[1], re.MULTILINE) if part else ():
        yield from commands([*words, name])


def write_reference_of_commands(path: Path) -> None:
    """Write the page with the help of all commands."""
    os.environ["COLUMNS"] = "100"  # the width of the help, whatever terminal this runs in
    parts = [
        "# All commands and their options\n",
        "This is what `--help` prints. The pages of the commands have examples.\n",
    ]
    for words, text in commands():
        parts.append(f"## {' '.join(['postdate', *words])}\n\n```text\n{text.rstrip()}\n```\n")
    path.write_text("\n".join(parts), "utf-8")


# --- the site ---------------------------------------------------------------------------------------------------------


def configuration(address: str) -> str:
    """Return the settings of zensical: those of site.toml, with the decisions in the navigation, and the address."""
    decisions = sorted(path.name for path in (ROOT / "docs" / "adr").glob("0*.md"))
    text = CONFIGURATION.read_text("utf-8").replace('"adr/*.md",', "\n".join(f'"adr/{name}",' for name in decisions), 1)
    return text.replace("[project]\n", f'[project]\nsite_url = "{address}"\n', 1) if address else text


def repository_address() -> str:
    """Return the address of the files of this version in the repository."""
    import postdate

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return f"{project['urls']['Repository']}/blob/{revision_of(postdate.__version__)}"


def main() -> int:
    """Build the site; return the exit code of zensical."""
    parser = argparse.ArgumentParser(description="Build the site of the documentation into build/site.")
    parser.add_argument("--address", default="", help="where the site will be, for search engines")
    address = parser.parse_args().address
    pages = BUILD / "site-pages"
    for folder in (pages, BUILD / "site"):
        shutil.rmtree(folder, ignore_errors=True)
    write_pages(pages, repository_address())
    write_reference_of_modules(pages / "reference")
    write_reference_of_commands(pages / "reference" / "commands.md")
    settings = BUILD / "zensical.toml"
    settings.write_text(configuration(address), "utf-8")
    command = [Path(sys.executable).with_name("zensical"), "build", "--clean", "--strict", "--config-file", settings]
    return subprocess.run(command, cwd=BUILD, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
