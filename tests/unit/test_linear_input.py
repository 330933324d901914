"""The time that a text from outside costs grows with its length, not with its square: patterns and parsers.

Every pattern of the package is read from its source, so a new one is tested without being listed. It is fed with
100,000 characters of each kind that makes a search begin anew or go back. If its time were quadratic, one of these
texts would take a minute of the processor; a linear one takes a hundredth of a second. The limit between them counts
time of the processor, which other work on the machine does not use up.
"""

import ast
import importlib
import itertools
import re
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from postdate.backends.azure.envelope import from_text
from postdate.backends.azure.login import parse_login
from postdate.backends.azure.queues import queue_name, sanitizer_of
from postdate.backends.msmq.address import parse_address as parse_msmq_address
from postdate.backends.msmq.address import parse_machine
from postdate.backends.msmq.content import decode_headers_xml
from postdate.backends.rabbitmq.address import parse_address as parse_rabbitmq_address
from postdate.backends.rabbitmq.address import parse_url
from postdate.backends.redis.login import parse_address as parse_redis_address
from postdate.backends.sql.timeouts_layout import read_time
from postdate.config import Address, check_server, parse_duration, parse_instant, redact_secrets
from postdate.core.limits import Window
from postdate.core.upkeep.wall_times import WallTime
from postdate.endpoint.message_types import MessageTypes
from postdate.errors import PostdateError
from postdate.messages import Headers, decode_headers, parse_time_span, parse_timestamp
from postdate.operations.plain import escape_control_characters
from postdate.pipeline.failures import failure_cause
from postdate.wiring.causes import CAUSES

_parser: Any = importlib.import_module("re._parser")  # the parts of a pattern, which no public module gives
op: Any = importlib.import_module("re._constants")

SOURCE = Path(__file__).parents[2] / "src"
LENGTH = 100_000
PROCESSOR_SECONDS = 2.0

MADE_BY_US = {
    "postdate/pipeline/page.py": "the drawings of Matplotlib, in which every text is escaped",
    "postdate/backends/sqlite/rows.py": "templates of statements in the source",
    "postdate/backends/sql/migrations.py": "numbered migrations, which are files of the package",
    "postdate/backends/mariadb/objects.py": "the same migrations",
    "postdate/backends/postgres/objects.py": "the same migrations",
    "postdate/errors.py": "names of classes",
}
"""Files whose patterns meet nothing from outside, and what they meet."""

ALTERNATIVES = {"postdate/pipeline/local/csv_records.py": [",|\n", ",|\r", ",|\r\n", ";|\r\n|\n"]}
"""Files with patterns that are made when they run: alternatives without a repetition, such as these."""


@contextmanager
def limited_processor_time() -> Generator[None]:
    def stop(*_: object) -> None:
        pytest.fail(f"took more than {PROCESSOR_SECONDS} s of the processor for {LENGTH:,} characters")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, PROCESSOR_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


# --- patterns ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Use:
    """A pattern, and the methods by which its module applies it."""

    place: str
    pattern: re.Pattern[Any]
    methods: tuple[str, ...]


METHODS = ("search", "match", "fullmatch", "sub", "findall", "finditer", "split")


def uses_in(path: Path) -> Iterator[Use]:
    """Yield the patterns of a source file."""
    file, source = path.relative_to(SOURCE).as_posix(), path.read_text()
    imports = re.findall(r"^\s*(?:from re import|import re\b).*$", source, re.MULTILINE)
    if not imports:
        return
    assert {each.strip() for each in imports} == {"import re"}, f"{file}: write `import re`"
    nodes = list(ast.walk(ast.parse(source)))
    names = {
        node.value: target.id
        for node in nodes
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    applied = [
        (node.value.id, node.attr)
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in METHODS
    ]
    for node in nodes:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "re") or node.func.attr == "escape":
            continue
        pattern, *_ = node.args
        name = names.get(node)
        if isinstance(pattern, ast.Constant):
            flags = [each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute) and each.attr.isupper()]
            text: Any = pattern.value
            compiled = re.compile(text, sum((getattr(re, each) for each in flags), start=re.NOFLAG))
        elif name is not None:  # its text is made of others
            compiled = getattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), name)
        elif file in ALTERNATIVES:
            for each in ALTERNATIVES[file]:
                yield Use(f"{file}:{node.col_offset}-{each!r}", re.compile(each), ("search", "match"))
            continue
        else:
            text = ast.unparse(node)
            assert ast.unparse(pattern) == "each.pattern", f"{file}: name the pattern {text!r} in its module"
            for each in CAUSES:
                yield Use(f"{file}-{each.pattern[:20]}", re.compile(each.pattern, re.IGNORECASE), ("search",))
            continue
        methods = tuple({method for owner, method in applied if owner == name}) or ("search",)
        place = f"{file}:{node.lineno}:{node.col_offset}"
        yield Use(place, compiled, methods if node.func.attr == "compile" else (node.func.attr,))


FILES = [path for path in sorted(SOURCE.rglob("*.py")) if path.relative_to(SOURCE).as_posix() not in MADE_BY_US]
USES = [use for path in FILES for use in uses_in(path)]


def pieces_of(parsed: Any, choice: int) -> list[Any]:
    """Return texts, one for each part of a pattern, that match it one after the other."""
    pieces: list[Any] = [""]
    for operator, value in parsed:
        if operator is op.LITERAL:
            pieces[-1] += chr(value)
        elif operator is op.IN:
            pieces += [one_of(value, choice), ""]
        elif operator is op.ANY:
            pieces += ["x "[choice % 2], ""]
        elif operator is op.NOT_LITERAL:
            pieces += ["x" if value != ord("x") else "y", ""]
        elif operator in {op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT}:
            least, _, inner = value
            pieces += [*pieces_of(inner, choice) * max(least, 1), ""]
        elif operator is op.SUBPATTERN:
            pieces += [*pieces_of(value[-1], choice), ""]
        elif operator is op.BRANCH:
            pieces += [*pieces_of(value[1][choice % len(value[1])], choice), ""]
        else:
            assert operator in {op.AT, op.ASSERT, op.ASSERT_NOT}, operator
    return [piece for piece in pieces if piece]


def one_of(members: Sequence[Any], choice: int) -> str:
    """Return a character that a class of a pattern takes."""
    wanted = re.compile(_class_of(members))
    candidates = [each for each in "a0 A_-.\n:x/@," + "".join(map(chr, range(256))) if wanted.fullmatch(each)]
    return candidates[choice % len(candidates)]


def _class_of(members: Sequence[Any]) -> str:
    """Return a class of a pattern as it is written."""
    categories = {
        op.CATEGORY_DIGIT: r"\d",
        op.CATEGORY_NOT_DIGIT: r"\D",
        op.CATEGORY_SPACE: r"\s",
        op.CATEGORY_NOT_SPACE: r"\S",
        op.CATEGORY_WORD: r"\w",
        op.CATEGORY_NOT_WORD: r"\W",
    }
    texts = []
    for operator, value in members:
        if operator is op.NEGATE:
            texts.append("^")
        elif operator is op.LITERAL:
            texts.append(re.escape(chr(value)))
        elif operator is op.RANGE:
            texts.append("-".join(re.escape(chr(each)) for each in value))
        else:
            texts.append(categories[value])
    return f"[{''.join(texts)}]"


def hostile_texts(pattern: re.Pattern[Any]) -> Iterator[str]:
    """Yield what matches the beginning of a pattern, and then some of its parts over and over, and never its end."""
    parsed, texts = _parser.parse(pattern.pattern, pattern.flags & ~re.DEBUG), set[tuple[str, str]]()
    for choice in range(4):
        pieces = pieces_of(parsed, choice)
        for begin, end in itertools.combinations(range(len(pieces) + 1), 2):
            texts.add(("".join(pieces[:begin]), "".join(pieces[begin:end])))
        for place in range(len(pieces) + 1):
            texts.update(("".join(pieces[:place]), pump) for pump in (" ", "\n", "a", "0", ".", "-", "a "))
    step = len(texts) // 100 + 1  # a pattern of many parts has many parts that are alike
    for prefix, pump in sorted(texts)[::step]:
        text = prefix + pump * (LENGTH // len(pump))
        yield text
        yield text + "\1"


@pytest.mark.parametrize("use", USES, ids=lambda use: use.place)
def test_every_pattern_takes_time_that_grows_with_the_length_of_the_text(use: Use) -> None:
    for text in hostile_texts(use.pattern):
        given = text.encode() if isinstance(use.pattern.pattern, bytes) else text
        with limited_processor_time():
            for method in use.methods:
                if method == "sub":
                    use.pattern.sub(given[:0], given)
                elif method == "finditer":
                    list(use.pattern.finditer(given))
                else:
                    getattr(use.pattern, method)(given)


# --- parsers ----------------------------------------------------------------------------------------------------------

PARSERS: dict[str, Callable[[str], object]] = {
    "postdate.config.redact_secrets": redact_secrets,
    "postdate.config.Address.redacted_text": lambda text: Address(text).redacted_text,
    "postdate.config.addresses.check_server": check_server,
    "postdate.config.values.parse_duration": parse_duration,
    "postdate.config.values.parse_instant": parse_instant,
    "postdate.messages.parse_timestamp": parse_timestamp,
    "postdate.messages.parse_time_span": parse_time_span,
    "postdate.messages.decode_headers": decode_headers,
    "postdate.backends.sql.timeouts_layout.read_time": read_time,
    "postdate.operations.plain.escape_control_characters": escape_control_characters,
    "postdate.pipeline.failures.failure_cause": lambda text: failure_cause(ValueError(text)),
    "postdate.core.limits.Window.read": Window.parse_and_check_zone,
    "postdate.core.upkeep.wall_times.WallTime.parse": lambda text: WallTime.parse(text, text),
    "postdate.endpoint.message_types.MessageTypes.decode": lambda text: MessageTypes().decode(
        {Headers.ENCLOSED_MESSAGE_TYPES: text}, text.encode()
    ),
    "postdate.backends.azure.envelope.from_text": lambda text: from_text("mails", "1", text),
    "postdate.backends.azure.login.parse_login": lambda text: parse_login(f"azure:{text}", {}),
    "postdate.backends.azure.queues.queue_name": lambda text: queue_name(text, sanitizer_of("legacy")),
    "postdate.backends.msmq.address.parse_address": parse_msmq_address,
    "postdate.backends.msmq.address.parse_machine": parse_machine,
    "postdate.backends.msmq.content.decode_headers_xml": lambda text: decode_headers_xml(text.encode()),
    "postdate.backends.rabbitmq.address.parse_address": parse_rabbitmq_address,
    "postdate.backends.rabbitmq.address.parse_url": lambda text: parse_url(f"amqp://{text}"),
    "postdate.backends.redis.login.parse_address": lambda text: parse_redis_address(f"redis://{text}"),
}
"""Functions that take a text from outside apart."""

PUMPS = (
    *("a", "9", " ", "\n", "\0", "\\", '"', "[", "<", "%", "%41", ":", "/", "@", ".", ";", "=", "-", "\U0001f600"),
    *(
        "://a:",
        "a=",
        "key=",
        "a.b.",
        "1d",
        '{"a":',
        '[{"',
        '"a","',
        "<a>",
        "<HeaderInfo>",
        "2026-",
        "Server=a;",
        "a/b@",
    ),
)


@pytest.mark.parametrize("name", PARSERS)
def test_every_parser_takes_time_that_grows_with_the_length_of_the_text(name: str) -> None:
    for (prefix, suffix), pump in itertools.product((("", ""), ("x://a:", "\1@")), PUMPS):
        text = prefix + pump * (LENGTH // len(pump)) + suffix
        with limited_processor_time(), suppress(PostdateError):
            PARSERS[name](text)
