"""What the gate leaves out: tests that kill, are slow, or rest on time. ``make soak`` runs them, part by part.

A test is left out by its mark, which says why, to which part it belongs, and which test of the gate proves the same
promise meanwhile::

    @pytest.mark.soak("kills a server of its own", part="kills", proven_by="tests/unit/test_poller.py::test_…")

Collection fails where the proof does not exist, or is left out itself; with several workers, the test of this module
does. ``tests/soak.txt`` lists what is left out until it has been mended or marked. A test that is named on the command
line runs in any case.
"""

import ast
import functools
import os
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, settings

ROOT: Final = Path(__file__).parents[1]
LIST: Final = Path(__file__).with_name("soak.txt")
PAGE: Final = ROOT / "docs" / "proofs.md"
CONFORMANCE: Final = "tests/conformance/test_adapters.py"
_ROWS: Final = "| promise | its proof in the gate | part | where, and why not in the gate |\n|---|---|---|---|\n"
ALL: Final = "all"
PROBLEMS: Final = pytest.StashKey[list[str]]()
"""What is wrong with marks and list, for the one test of them: each worker collects all tests."""

GATE_SECONDS: Final = 300
"""A test of the gate that hangs ends so; one of a soak may take as long as pyproject.toml says."""

PARTS: Final = {
    "kills": "processes and servers that are killed amid their work",
    "faults": "the fault lab: every kind of fault, every message accounted for",
    "silence": "servers, processes and links that stand still, and outages",
    "clocks": "clocks that are wrong, lateness, wake-ups in real time",
    "spark": "whole Spark jobs and streams",
    "cluster": "Spark on a cluster whose parts are killed",
    "docs": "whole pages and guides, executed",
    "bench": "every benchmark on every deployment",
    "random": "random input with a new seed at each run",
    "servers": "the servers of the tests themselves",
}
"""The parts of ``make soak``: each takes at most forty minutes on two processors."""


@dataclass(frozen=True, slots=True, order=True)
class Soak:
    """Why a test is left out of the gate.

    Args:
        why: the reason.
        part: one of :data:`PARTS`.
        proven_by: node ids, without parameters, of tests of the gate that prove the promise; none in the list.
    """

    why: str
    part: str
    proven_by: tuple[str, ...] = ()

    @classmethod
    def of_mark(cls, mark: pytest.Mark) -> "Soak":
        """Read ``soak("why", part="…", proven_by="…" or ("…", "…"))``."""
        (why,) = mark.args
        proven_by = mark.kwargs["proven_by"]
        proofs = (proven_by,) if isinstance(proven_by, str) else tuple(proven_by)
        if mark.kwargs["part"] not in PARTS:
            raise ValueError(f"part must be one of {', '.join(PARTS)}, not {mark.kwargs['part']!r}")
        if not why or not proofs or not all(proofs):
            raise ValueError("it needs a reason, and the test of the gate that proves the promise")
        if any(proof.partition("::")[0] == CONFORMANCE and "[" not in proof for proof in proofs):
            raise ValueError(f"a test of {CONFORMANCE} without its parameter is a whole suite, and proves anything")
        return cls(why, mark.kwargs["part"], proofs)


@functools.cache
def listed() -> dict[str, Soak]:
    """Return what :data:`LIST` leaves out: lines of ``[part] reason``, and below each the ids of its tests."""
    found = dict[str, Soak]()
    part, why = "", ""
    for line in LIST.read_text("utf-8").splitlines() if LIST.exists() else ():
        if line.startswith("["):
            part, _, why = line[1:].partition("] ")
            if part not in PARTS:
                raise pytest.UsageError(f"{LIST.name}: {line!r}: the part must be one of {', '.join(PARTS)}")
        elif line and not line.startswith("#"):
            found[line] = Soak(why, part)
    return found


def soak_of(item: pytest.Item, problems: list[str]) -> Soak | None:
    """Return why the gate leaves out this test, or ``None``; add what is wrong with its mark."""
    mark = item.get_closest_marker("soak")
    if mark is None:
        return listed().get(item.nodeid)
    try:
        return Soak.of_mark(mark)
    except (ValueError, KeyError, TypeError) as error:
        problems.append(f"{item.nodeid}: mark soak: {error!r}; see tests/soak.py")
        return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak",
        metavar="PARTS",
        default="",
        help=f"run what the gate leaves out: parts, with commas between them, of {', '.join(PARTS)}; or {ALL}",
    )

    parser.addoption("--proofs", action="store_true", help=f"write into {PAGE.name} who proves what, and run nothing")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    for part in parts_of(config):
        if part not in {ALL, *PARTS}:
            raise pytest.UsageError(f"--soak: no part is called {part!r}; there are {', '.join(PARTS)}, and {ALL}")
    settings.load_profile("soak" if parts_of(config) else "gate")
    seed = seed_of(config)  # before workers are started, which are given it
    if parts_of(config):
        config.option.hypothesis_seed = str(seed)


def parts_of(config: pytest.Config) -> Sequence[str]:
    """Return the parts that are asked for; none for the gate."""
    return [part for part in str(config.getoption("--soak")).split(",") if part]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    parts, named = parts_of(config), [str(argument) for argument in config.args if "::" in str(argument)]
    problems = list[str]()
    soaks = {item.nodeid: soak for item in items if (soak := soak_of(item, problems)) is not None}
    problems += _without_proof(soaks, [item.nodeid for item in items] if not named else [])
    if _is_whole(config):
        known = {item.nodeid for item in items}
        problems += [f"{LIST.name}: there is no test {test}" for test in listed() if test not in known]
        problems += _proofs(soaks, write=config.option.proofs)
    config.stash[PROBLEMS] = problems
    if problems and not hasattr(config, "workerinput"):  # of a worker pytest would say only that it has gone
        raise pytest.UsageError("\n".join(problems))

    def chosen(item: pytest.Item) -> bool:
        soak = soaks.get(item.nodeid)
        if config.option.proofs:
            return False
        if parts:
            part = soak.part if soak is not None else "random" if _draws(item) else None
            return part is not None and (ALL in parts or part in parts)
        return soak is None or any(item.nodeid.startswith(argument) for argument in named)

    for item in items if not parts else ():
        item.add_marker(pytest.mark.timeout(GATE_SECONDS))
    left_out = [item for item in items if not chosen(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if chosen(item)]


def _draws(item: pytest.Item) -> bool:
    """Tell whether the test has random input, which is always the same in the gate."""
    by_hypothesis = "property" in item.path.parts or getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    return by_hypothesis or "chance" in getattr(item, "fixturenames", ())


def _is_whole(config: pytest.Config) -> bool:
    return {(config.invocation_params.dir / argument).resolve() for argument in config.args} <= {ROOT, ROOT / "tests"}


def _proofs(soaks: dict[str, Soak], *, write: bool) -> Iterator[str]:
    """Say whether the page has the table of what is left out and what proves it meanwhile; or write it."""
    variants = defaultdict[tuple[str, Soak], list[str]](list)
    for test, soak in sorted(soaks.items()):
        function, _, variant = test.partition("[")
        variants[function, soak].append(variant.removesuffix("]"))
    rows = list[str]()
    for (function, soak), left_out in sorted(variants.items(), key=lambda each: (each[0][0], each[1])):
        file, _, name = function.partition("::")
        promise = name.split("::")[-1].removeprefix("test_").replace("_", " ")
        which = "" if left_out == [""] else f" ({left_out[0] if len(left_out) == 1 else f'{len(left_out)} variants'})"
        proofs = "<br>".join(f"`{proof}`" for proof in soak.proven_by) or f"none yet: {LIST.name}"
        rows.append(f"| {promise}{which} | {proofs} | {soak.part} | `{file}`: {soak.why} |\n")
    text = PAGE.read_text("utf-8")
    table = text[: text.index(_ROWS) + len(_ROWS)] + "".join(rows)
    if write:
        PAGE.write_text(table, "utf-8")
    elif table != text:
        yield f"{PAGE.name} is not what the marks say: make proofs"


def _without_proof(soaks: dict[str, Soak], collected: Sequence[str]) -> Iterator[str]:
    """Say which proofs do not exist, or are left out of the gate themselves; ``collected`` are tests of whole files."""
    gate, out, whole = set[str](), set[str](), set[str]()
    for test in collected:
        whole.add(test.partition("::")[0])
        (out if test in soaks else gate).update((test, test.partition("[")[0]))
    for proof in sorted({proof for soak in soaks.values() for proof in soak.proven_by}):
        file = proof.partition("::")[0]
        if proof in gate:
            continue
        if proof in out:
            yield f"the proof {proof} is left out of the gate itself"
        elif file in whole or proof.partition("[")[0].split("::")[-1] not in _functions_of(file):
            yield f"the proof {proof} does not exist"


@functools.cache
def _functions_of(file: str) -> set[str]:
    path = ROOT / file
    tree = ast.parse(path.read_text("utf-8")) if path.exists() else ast.Module([], [])
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


# --- chance -----------------------------------------------------------------------------------------------------------

SEED: Final = "POSTDATE_SOAK_SEED"

# A shared machine stalls, so that no example has a deadline: the timeout of its test is the limit.
settings.register_profile("gate", max_examples=50, deadline=None, derandomize=True, database=None, print_blob=True)
settings.register_profile(
    "soak", max_examples=200, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)


def seed_of(config: pytest.Config) -> int:
    """Return the seed of this run: always the same in the gate; in a soak that of the variable, or a new one."""
    if not parts_of(config):
        return 0
    if SEED not in os.environ:
        os.environ[SEED] = str(random.SystemRandom().randrange(1_000_000_000))
    return int(os.environ[SEED])


def pytest_report_header(config: pytest.Config) -> str | None:
    parts = parts_of(config)
    return f"soak: {', '.join(parts)}; {SEED}={seed_of(config)} repeats its random input" if parts else None


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """Return random numbers of the test's own: the same at each run of the gate, others at each soak."""
    return random.Random(f"{seed_of(request.config)} {request.node.nodeid}")
