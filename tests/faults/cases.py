"""Every case of the lab. What is promised is in design.md and ADR 19; a case runs for some seconds."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from tests.faults import faults
from tests.faults.deployments import DEPLOYMENTS, Deployment
from tests.faults.lab import SECOND, Case, Lab
from tests.faults.ledger import Promise

MINUTE = timedelta(minutes=1)

FILE, FILES, SCHEMA = "one SQLite file", "two SQLite files", "one PostgreSQL schema"
RABBITMQ, MARIADB, AZURE = "PostgreSQL, RabbitMQ", "MariaDB, RabbitMQ", "Azure table and queues"

HELD_AT_MOST = 5 * SECOND
"""In cases with a frozen process; the default is a minute."""
_HELD_SHORTLY: dict[str, dict[str, Any]] = {"store": {"holds_at_most": "5s"}}
_SILENT_SHORTLY: dict[str, dict[str, Any]] = {"store": {"answers_within": "5s"}}


def waiting(deployment: Deployment) -> str:
    """Return the table of messages that wait."""
    return deployment.waiting_table


def records(deployment: Deployment) -> str:
    """Return the table of records."""
    return deployment.record_table


def half_came(lab: Lab) -> bool:
    """The fault falls into the middle of deliveries."""
    return len(lab.ledger.arrivals) >= lab.case.messages / 2


def all_came(lab: Lab) -> bool:
    """Nobody needs the end of the fault."""
    return not lab.ledger.missing()


def said_to_be_away(lab: Lab) -> bool:
    """The services have noticed."""
    return all(service.says(" cannot ") for service in lab.services)


def _promise(deployment: str, **more: Any) -> Promise:
    """Return what every case of a deployment must keep: elsewhere, what is in hand may come twice."""
    kind = DEPLOYMENTS[deployment]
    more.setdefault("doubled", 0 if kind.same_database else kind.in_hand)
    return Promise(**more)


def _case(name: str, deployment: str, fault: Any, tests: str, **more: Any) -> Case:
    promised = {key: more.pop(key) for key in _PROMISED if key in more}
    return Case(name, fault, deployment, tests, _promise(deployment, **promised), **more)


_PROMISED = ("doubled", "error_queue", "recovers_within", "while_it_lasts", "unread")

_BAD_HEADERS = {
    FILE: """UPDATE content SET headers = '{{"a": "b' WHERE seq = (SELECT content FROM delayed_message
             WHERE message_id = '{id}')""",
    SCHEMA: """UPDATE {content} SET headers = '{{"a": "b' WHERE number = (SELECT number FROM {waiting}
             WHERE message_id = '{id}')""",
    MARIADB: """UPDATE {waiting} SET headers = '{{"a": "b' WHERE message_id = '{id}'""",
}
_BAD_HEADERS[FILES], _BAD_HEADERS[RABBITMQ] = _BAD_HEADERS[FILE], _BAD_HEADERS[SCHEMA]


def _processes() -> Sequence[Case]:
    killed = [
        _case(
            "SIGKILL of the service",
            deployment,
            faults.KilledService(),
            "three times while messages fall due, and once more; started again at once",
            messages=1_000,
            lasts=2 * SECOND,
            in_gate={"fault": faults.KilledService(1), "over": half_came} if deployment == FILE else None,
        )
        for deployment in (FILE, FILES, SCHEMA, RABBITMQ, MARIADB, AZURE)
    ]
    frozen = [
        _case(
            "SIGSTOP of one of two services",
            deployment,
            faults.FrozenService(8_000 if DEPLOYMENTS[deployment].same_database else 4_000),
            "the other one delivers all within the bound on holding, here 5 s; the first is woken after it",
            messages=0,
            over=all_came,
            recovers_within=40 * SECOND,
            services=2,
            settings=_HELD_SHORTLY,
            while_it_lasts=True,
            stores_meanwhile=False,
        )
        for deployment in (FILE, FILES, SCHEMA, RABBITMQ, MARIADB)
    ]
    azure = _case(
        "SIGSTOP of one of two services",
        AZURE,
        faults.FrozenService(300),
        messages=0,
        tests="the lease ends after 15 s, the other one takes over; the first is woken after it, and does no harm",
        over=all_came,
        services=2,
        while_it_lasts=True,
        stores_meanwhile=False,
        recovers_within=timedelta(seconds=75),  # the first one, too, may have to wait for the lease
    )
    return [*killed, *frozen, azure]


def _servers() -> Sequence[Case]:
    return [
        *[
            _case(
                "SIGSTOP of the store's server",
                deployment,
                faults.FrozenServer("store"),
                "connections stand, nobody answers; then all goes on",
                stores_meanwhile=False,
            )
            for deployment in (SCHEMA, RABBITMQ, MARIADB, AZURE)
        ],
        *[
            _case(
                "SIGKILL of the store's server",
                deployment,
                faults.KilledServer("store"),
                "it comes back after 3 s; what was committed is there",
                lasts=3 * SECOND,
            )
            for deployment in (SCHEMA, RABBITMQ, MARIADB)
        ],
        _case(
            "SIGSTOP of the broker",
            RABBITMQ,
            faults.FrozenServer("queues"),
            "for longer than a confirm is waited for: no message is to blame",
            lasts=40 * SECOND,
        ),
        _case(
            "Restart of the broker",
            RABBITMQ,
            faults.RestartedServer("queues"),
            "stopped in good order, and started again",
        ),
        _case(
            "Broker away with 3,000 due",
            RABBITMQ,
            faults.CutLink("queues"),
            "for a minute: no record for each attempt, hardly any use of the processor, nothing in the error queue",
            messages=3_000,
            lasts=MINUTE,
        ),
        _case(
            "Broker away",
            RABBITMQ,
            faults.CutLink("queues"),
            "connections are refused while messages fall due",
            messages=1_000,
        ),
    ]


def _network() -> Sequence[Case]:
    return [
        *[
            _case(
                "Link to the store cut",
                deployment,
                faults.CutLink("store"),
                "connections are reset, and new ones refused",
                in_gate={"lasts": 2 * SECOND, "over": said_to_be_away} if deployment == SCHEMA else None,
            )
            for deployment in (SCHEMA, RABBITMQ, MARIADB, AZURE)
        ],
        *[
            _case(
                "Link to the store silent",
                deployment,
                faults.BlackHole("store"),
                "nothing is carried, nothing ends",
            )
            for deployment in (SCHEMA, RABBITMQ, MARIADB, AZURE)
        ],
        *[
            _case(
                "Answers of the store lost",
                deployment,
                faults.BlackHole("store", replies_only=True),
                "the server does what it is told, and is not heard",
            )
            for deployment in (SCHEMA, RABBITMQ, MARIADB)
        ],
        *[
            _case(
                "Half-open connections to the store",
                deployment,
                faults.ForgottenConnections("store"),
                "what is open never answers again, and acknowledges; new connections work; the limit of silence is "
                + ("30 s" if deployment == MARIADB else "5 s"),
                settings={} if deployment == MARIADB else _SILENT_SHORTLY,
                messages=1_000,
                lasts=5 * SECOND,
                while_it_lasts=True,
                recovers_within=timedelta(seconds=90),
            )
            for deployment in (SCHEMA, RABBITMQ, MARIADB)
        ],
        _case(
            "Half-open connections to the broker",
            RABBITMQ,
            faults.ForgottenConnections("queues"),
            "what is open never answers again, and acknowledges; new connections work",
            messages=1_000,
            lasts=5 * SECOND,
            while_it_lasts=True,
            recovers_within=timedelta(seconds=90),
        ),
        _case(
            "Link to the broker silent",
            RABBITMQ,
            faults.BlackHole("queues"),
            "for longer than a confirm is waited for: no message is to blame",
            lasts=40 * SECOND,
        ),
        *[
            _case(
                "Slow link to the store",
                deployment,
                faults.SlowLink("store", timedelta(milliseconds=200)),
                "everything takes 0.2 s longer in each direction",
                doubled=0,
            )
            for deployment in (SCHEMA, RABBITMQ, MARIADB)
        ],
        *[
            _case(
                "pg_terminate_backend",
                deployment,
                faults.TerminatedConnections(),
                "of all connections of the service, twice",
                messages=1_000,
                lasts=2 * SECOND,
                in_gate={"over": half_came} if deployment == SCHEMA else None,
            )
            for deployment in (SCHEMA, RABBITMQ)
        ],
    ]


def _time() -> Sequence[Case]:
    apart = (10 * MINUTE, -10 * MINUTE)
    return [
        *[
            _case(
                "Two services, ten minutes ahead and behind",
                deployment,
                faults.SteppedClocks((-10 * MINUTE, 10 * MINUTE), apart),
                "the clocks change places while it lasts, and back; the server's clock judges what is due",
                services=2,
                clocks=apart,
            )
            for deployment in (SCHEMA, RABBITMQ, MARIADB, AZURE)
        ],
        _case(
            "A fast clock is set right",
            FILE,
            faults.SteppedClocks((0 * SECOND,), (0 * SECOND,)),
            "by five minutes, under a service that has just delivered; nobody waits for five minutes",
            messages=0,
            clocks=(5 * MINUTE,),
        ),
        *[
            _case(
                "A message is due at the end of the year 9999",
                deployment,
                faults.NeverDue(),
                "the service goes on, and starts again; the others come",
                lasts=1 * SECOND,
                messages=20,
            )
            for deployment in (FILE, SCHEMA, MARIADB, AZURE)
        ],
        _case(
            "A clock is set ahead and back",
            RABBITMQ,
            faults.SteppedClocks((5 * MINUTE,), (0 * SECOND,)),
            "by five minutes, in the middle of deliveries",
            clocks=(0 * SECOND,),
        ),
    ]


def _refusals() -> Sequence[Case]:
    return [
        _case(
            "Broker low on memory",
            RABBITMQ,
            faults.MemoryAlarm(),
            "it blocks whoever publishes, for longer than a confirm is waited for",
            lasts=30 * SECOND,
        ),
        _case(
            "Full queue",
            RABBITMQ,
            faults.FullQueue(70),
            "it holds 70 messages and refuses the others until somebody takes them out",
            doubled=0,
            lasts=8 * SECOND,
        ),
        *[
            _case(
                "Disk full",
                deployment,
                faults.FullDisk(),
                "messages that fall due meanwhile come when there is room",
                doubled=0,
                stores_meanwhile=False,
            )
            for deployment in (f"{FILE}, small disk", f"{SCHEMA}, small disk")
        ],
        *[
            _case(
                "DELETE revoked on the waiting messages",
                deployment,
                faults.RevokedRight("DELETE", waiting),
                "of the service's role; given back at the end",
                doubled=0,
                messages=50,
                lasts=10 * SECOND,
            )
            for deployment in (SCHEMA, RABBITMQ)
        ],
        *[
            _case(
                "INSERT revoked on the records",
                deployment,
                faults.RevokedRight("INSERT", records),
                "of the service's role; given back at the end",
                doubled=0,
                messages=50,
                lasts=10 * SECOND,
                stores_meanwhile=False,
            )
            for deployment in (SCHEMA, RABBITMQ)
        ],
        *[
            _case(
                f"Records locked, {limit or 'no time limit'}",
                deployment,
                faults.LockedTable(records, "SHARE", limit),
                "as while an index is built",
                doubled=0,
                messages=50,
                lasts=10 * SECOND,
                stores_meanwhile=False,
            )
            for deployment in (SCHEMA, RABBITMQ)
            for limit in ("", "lock_timeout = '500ms'", "statement_timeout = '2s'")
        ],
        *[
            _case(
                "Waiting messages locked",
                deployment,
                faults.LockedTable(waiting, mode),
                "by somebody who does not end",
                doubled=0,
                lasts=8 * SECOND,
                stores_meanwhile=False,
            )
            for deployment, mode in ((SCHEMA, "ACCESS EXCLUSIVE"), (RABBITMQ, "ACCESS EXCLUSIVE"), (MARIADB, "WRITE"))
        ],
        _case(
            "File locked by a writer",
            FILE,
            faults.LockedFile(),
            "by somebody who does not end its transaction",
            doubled=0,
            lasts=8 * SECOND,
            stores_meanwhile=False,
        ),
    ]


def _missing() -> Sequence[Case]:
    return [
        _case(
            "Destination and error queue missing",
            RABBITMQ,
            faults.MissingQueues(),
            "deleted under the service, and made again: every message is in one of the two then",
            messages=50,
            error_queue=1_000,
        )
    ]


def _damage() -> Sequence[Case]:
    return [
        *[
            _case(
                "One row whose headers are damaged",
                deployment,
                faults.DamagedRow(_BAD_HEADERS[deployment]),
                "it alone is marked; the others, due with it, come",
                doubled=0,
                messages=100,
                at_once=True,
                in_gate={"over": half_came} if deployment == FILES else None,
            )
            for deployment in (FILE, FILES, SCHEMA, RABBITMQ, MARIADB)
        ],
        *[
            _case(
                "One row with a due time outside the calendar",
                deployment,
                faults.DamagedRow(
                    "UPDATE {waiting} SET due = 9223372036854775807, attempt_at = 1 WHERE message_id = '{id}'"
                ),
                "it alone is marked; the others, due with it, come",
                doubled=0,
                messages=100,
                at_once=True,
            )
            for deployment in (FILE, FILES, MARIADB)
        ],
        _case(
            "File replaced",
            FILE,
            faults.ReplacedFile(),
            "by a copy of itself, under the running service, which stops by itself and is started again",
        ),
        _case(
            "File torn",
            FILE,
            faults.TornFile(),
            "half of it is gone when the service starts, which says so; then it is whole again",
            stores_meanwhile=False,
        ),
    ]


CASES: Sequence[Case] = [
    replace(case) for part in (_processes, _servers, _network, _time, _refusals, _missing, _damage) for case in part()
]
"""All of them, as ``make soak`` runs them; some in a shorter form in ``make test``, too."""
