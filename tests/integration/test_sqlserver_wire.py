"""SQL Server's wire, spoken by a listener of our own: encryption, packets, refusals, silence. No SQL is run."""

import logging
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.limits import insert_limit
from benchmarks.places import opened
from tests import tds_server

from postdate.backends.sql.row_locks.parts import Conflict
from postdate.backends.sqlserver.connection import SqlServerInstance, SqlServerSession
from postdate.backends.sqlserver.login import parse_login_answer
from postdate.backends.sqlserver.schema import SqlServerNames
from postdate.backends.sqlserver.tables import SqlServerTables
from postdate.cli.bench.places import Common
from postdate.errors import ConfigurationError, StoreNotWritable, StoreUnreachable
from postdate.ports import Recording

PASSWORD = "S3cret-pw"
SCRAMBLED = bytes(((byte << 4 & 0xF0) | byte >> 4) ^ 0xA5 for byte in PASSWORD.encode("utf-16-le"))
"""How TDS writes a password: anybody can read it."""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tds_server.Certificates:
    return tds_server.issue(tmp_path_factory.mktemp("tls"), "localhost", "*.postdate.test", "127.0.0.1")


def server_at(port: int, options: str = "", host: str = "localhost") -> SqlServerInstance:
    return SqlServerInstance(f"mssql://user:{PASSWORD}@{host}:{port}/database{options}")


def trusting(certificates: tds_server.Certificates, more: str = "") -> str:
    return f"?cafile={certificates.authority}{more}"


# --- encryption -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"], ids=["by name", "by address"])
def test_the_connection_is_encrypted_by_default(certificates: tds_server.Certificates, host: str) -> None:
    with tds_server.TdsServer(certificates) as server:
        session = server_at(server.port, trusting(certificates), host).connect()
        assert session._channel.tls_version == "TLSv1.2"
        assert session.rows("SELECT %(n)s", {"n": 1}) == [(1,)]
        session.close()
    assert len(server.logins) == 1
    assert SCRAMBLED in server.logins[0], "this is how it looks, and would be seen by the next assertion"
    assert SCRAMBLED not in server.wire, "the password is on the wire in the clear"


def test_a_long_answer_comes_through(certificates: tds_server.Certificates) -> None:
    rows = tds_server.numbers(*range(2_000), is_procedure=True)
    with tds_server.TdsServer(certificates, answers=lambda _sql, _kind: rows) as server:
        session = server_at(server.port, trusting(certificates)).connect()
        assert session.rows("SELECT %(n)s" + " " * 50_000, {"n": 1}) == [tuple(range(2_000))]
        session.close()


def test_strict_encryption_comes_before_anything_else(certificates: tds_server.Certificates) -> None:
    with tds_server.TdsServer(certificates, strict=True) as server:
        session = server_at(server.port, trusting(certificates, "&encrypt=strict")).connect()
        assert session._channel.tls_version == "TLSv1.3"
        assert session.rows("SELECT %(n)s", {"n": 1}) == [(1,)]
        session.close()
    assert server.wire[:1] == b"\x16", "a record of TLS, and no packet of TDS"
    assert SCRAMBLED not in server.wire


def test_a_name_with_a_wildcard_is_matched(certificates: tds_server.Certificates) -> None:
    with tds_server.TdsServer(certificates) as server:
        named = trusting(certificates, "&hostnameincertificate=db7.postdate.test")
        server_at(server.port, named).connect().close()
        with pytest.raises(ConfigurationError, match="hostnameincertificate="):
            server_at(server.port, trusting(certificates, "&hostnameincertificate=a.b.postdate.test")).connect()


@pytest.mark.parametrize("encrypt", ["yes", "strict"])
def test_a_certificate_of_an_unknown_authority_is_refused(certificates: tds_server.Certificates, encrypt: str) -> None:
    with tds_server.TdsServer(certificates, strict=encrypt == "strict") as server:
        with pytest.raises(
            ConfigurationError, match=r"cannot be trusted.*cafile=.*trustservercertificate=yes"
        ) as caught:
            server_at(server.port, f"?encrypt={encrypt}").connect()
        assert isinstance(caught.value.__cause__, ssl.SSLCertVerificationError)
    assert not server.logins
    assert PASSWORD not in str(caught.value)


def test_a_certificate_for_another_name_is_refused(tmp_path: Path) -> None:
    other = tds_server.issue(tmp_path, "other.test", subject="localhost")
    with tds_server.TdsServer(other) as server:
        with pytest.raises(ConfigurationError, match="not valid for 'localhost'"):
            server_at(server.port, trusting(other)).connect()
        with pytest.raises(ConfigurationError, match=r"not valid for '127\.0\.0\.1'"):
            server_at(server.port, trusting(other), "127.0.0.1").connect()
    assert not server.logins


def test_any_certificate_is_taken_where_that_is_said(tmp_path: Path) -> None:
    other = tds_server.issue(tmp_path, "other.test")
    with tds_server.TdsServer(other) as server:
        session = server_at(server.port, "?TrustServerCertificate=yes").connect()
        assert session._channel.tls_version == "TLSv1.2"
        session.close()
    assert SCRAMBLED not in server.wire


def test_a_server_without_encryption_is_refused_before_the_password_is_sent() -> None:
    with tds_server.TdsServer() as server, pytest.raises(ConfigurationError, match="encrypt=no"):
        server_at(server.port).connect()
    assert not server.logins


def test_in_the_clear_only_where_that_is_said(certificates: tds_server.Certificates) -> None:
    for offering in (None, certificates):
        with tds_server.TdsServer(offering) as server:
            session = server_at(server.port, "?encrypt=no").connect()
            assert session._channel.tls_version is None
            assert session.rows("SELECT %(n)s", {"n": 1}) == [(1,)]
            session.close()
        assert SCRAMBLED in server.wire


def test_a_server_that_demands_encryption_says_so(certificates: tds_server.Certificates) -> None:
    with (
        tds_server.TdsServer(certificates, demands=True) as server,
        pytest.raises(ConfigurationError, match="requires encryption"),
    ):
        server_at(server.port, "?encrypt=no").connect()
    assert not server.logins


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("?encrypt=perhaps", "encrypt=perhaps"),
        ("?trustservercertificate=2", "trustservercertificate=2"),
        ("?encrypt=no&cafile=x", "cafile="),
        ("?encrypt=strict&trustservercertificate=yes", "strict"),
        ("?cafile=/no/such/file", "/no/such/file"),
        ("?trust=1", "'trust'"),
    ],
)
def test_options_that_cannot_be_are_refused(options: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        server_at(1, options)


def test_where_the_server_sends_us_we_go_as_securely(certificates: tds_server.Certificates) -> None:
    with (
        tds_server.TdsServer(certificates) as other,
        tds_server.TdsServer(certificates, login=tds_server.routed("127.0.0.1", other.port)) as server,
    ):
        session = server_at(server.port, trusting(certificates)).connect()
        assert session.rows("SELECT %(n)s", {"n": 1}) == [(1,)]
        session.close()
    assert (len(server.logins), len(other.logins)) == (1, 1)
    assert SCRAMBLED not in other.wire


def test_a_circle_of_servers_is_left() -> None:
    with tds_server.TdsServer() as server:
        server.login = tds_server.routed("127.0.0.1", server.port)
        with pytest.raises(StoreUnreachable, match="from server to server"):
            server_at(server.port, "?encrypt=no").connect()
        assert server.connections == 3


# --- statements -------------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[tds_server.TdsServer]:
    with tds_server.TdsServer() as opened:
        yield opened


@pytest.fixture
def session(server: tds_server.TdsServer) -> Iterator[SqlServerSession]:
    opened = server_at(server.port, "?encrypt=no").connect()
    yield opened
    opened.close()


def test_no_statement_is_followed_by_an_attention(server: tds_server.TdsServer, session: SqlServerSession) -> None:
    for _ in range(30):
        assert session.rows("SELECT %(n)s", {"n": 1}) == [(1,)]
        session.change("UPDATE t SET n = %(n)s", {"n": 1})
    session.begin()
    session.commit()
    assert (server.heard[tds_server.RPC], server.heard[tds_server.ATTENTION]) == (60, 0)


def test_an_error_behind_the_rows_is_heard(server: tds_server.TdsServer, session: SqlServerSession) -> None:
    rows = tds_server.numbers(1, is_procedure=True).removesuffix(tds_server.done(0xFE))
    server.answers = lambda _sql, _kind: rows + tds_server.refused((1205, "you are the victim"))
    with pytest.raises(Conflict, match="victim"):
        session.rows("SELECT %(n)s", {"n": 1})
    with pytest.raises(Conflict, match="victim"):
        session.change("UPDATE t SET n = %(n)s", {"n": 1})
    server.answers = None
    session.rollback()
    assert server.heard[tds_server.ATTENTION] == 0


def test_pages_are_read_to_the_end(server: tds_server.TdsServer, session: SqlServerSession) -> None:
    assert list(session.pages("SELECT %(n)s", {"n": 1}, 10)) == [[(1,)]]
    assert session.rows("SELECT 1") == [(1,)]
    assert server.heard[tds_server.ATTENTION] == 0


def test_what_the_session_needs_is_set_first(server: tds_server.TdsServer, session: SqlServerSession) -> None:
    assert session.is_alive()
    assert "SET QUOTED_IDENTIFIER" in server.statements[0]
    assert server.heard[tds_server.BATCH] >= 2


def test_a_percent_sign_in_a_name_arrives_as_it_is(server: tds_server.TdsServer, session: SqlServerSession) -> None:
    """The driver undoes doubled ones only when there are values: ``find_unknown`` asked for another table."""
    tables = SqlServerTables(SqlServerNames("50% off", "rate 5%"), Recording.ALL)
    server.statements.clear()
    server.answers = lambda sql, kind: tds_server.numbers(
        *([1, 2] if "COUNT" in sql or "MIN" in sql else [1]), is_procedure=kind == tds_server.RPC
    )
    tables.find_unknown_holders(session)
    of_store = {"store": tables.store_id(session)}
    for question in (tables.sql.next_due, tables.sql.record_counts):
        session.rows(question, of_store)
    tables.next_attempt(session, [1, 2])
    tables.find_dead_holders(session)
    tables.remove_holders(session, [1])
    tables.release_leases(session, [1])
    tables.bounds(session, "pending")
    assert len(server.statements) >= 8
    for statement in server.statements:
        assert "%%" not in statement
        assert "[50% off]" in statement


def test_the_first_connection_says_once_that_it_awaits_a_production_server(
    server: tds_server.TdsServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postdate.ports.backends._warned_products", set[str]())
    for _ in range(2):
        server_at(server.port, "?encrypt=no").connect().close()
    said = [record.getMessage() for record in caplog.records if "awaits its first production server" in record.message]
    assert len(said) == 1
    assert "SQL Server" in said[0]


# --- refusals and silence ---------------------------------------------------------------------------------------------


def test_a_missing_database_is_said_at_once_in_the_servers_words(server: tds_server.TdsServer) -> None:
    server.login = tds_server.refused(
        (4060, 'Cannot open database "database" requested by the login.'), (18456, "Login failed for user 'user'.")
    )
    with pytest.raises(StoreUnreachable, match='Cannot open database "database"'):
        server_at(server.port, "?encrypt=no").connect()
    assert server.connections == 1


def test_a_wrong_password_is_said(server: tds_server.TdsServer, caplog: pytest.LogCaptureFixture) -> None:
    server.login = tds_server.refused((18456, "Login failed for user 'user'."))
    with caplog.at_level(logging.WARNING), pytest.raises(StoreNotWritable, match="Login failed for user"):
        server_at(server.port, "?encrypt=no").connect()
    assert server.connections == 1
    assert not caplog.records, "one try, within its time"


def test_a_server_that_says_nothing_is_left(server: tds_server.TdsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postdate.backends.sql.row_locks.connection._ANSWER_WITHIN_SECONDS", 0.3)
    session = server_at(server.port, "?encrypt=no").connect()
    server.answers = lambda _sql, _kind: None
    with pytest.raises(StoreUnreachable, match=r"did not answer within 0\.3 s"):
        session.rows("SELECT %(n)s", {"n": 1})
    session.close()


def test_a_login_that_is_not_answered_is_left(server: tds_server.TdsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postdate.backends.sqlserver.connection.LOG_IN_WITHIN_SECONDS", 0.3)
    server.login = b""
    with pytest.raises(StoreUnreachable, match="neither grants nor refuses"):
        server_at(server.port, "?encrypt=no").connect()
    monkeypatch.setattr("tests.tds_server._Conversation._reply", lambda _self, _content: None)
    with pytest.raises(StoreUnreachable, match=r"did not answer within 0\.3 s"):
        server_at(server.port, "?encrypt=no").connect()


def test_who_waits_hears_of_an_abort(server: tds_server.TdsServer, session: SqlServerSession) -> None:
    def abort(_sql: str, _kind: int) -> None:
        session.abort()

    server.answers = abort
    with pytest.raises(StoreUnreachable):
        session.rows("SELECT %(n)s", {"n": 1})


@pytest.mark.parametrize("size", range(0, len(tds_server.acknowledged("database")) - 1, 7))
def test_an_answer_that_is_cut_short_is_not_taken_for_a_login(size: int) -> None:
    with pytest.raises(ValueError, match="login"):
        parse_login_answer(tds_server.acknowledged("database")[:size])


# --- measured ---------------------------------------------------------------------------------------------------------


def test_bench_makes_a_schema_for_its_run_and_takes_it_away(server: tds_server.TdsServer, tmp_path: Path) -> None:
    server.answers = lambda sql, kind: (
        tds_server.numbers(*([1, 2, 3, 4] if "recovery_model" in sql else [1]), is_procedure=kind == tds_server.RPC)
        if "SELECT" in sql
        else tds_server.done(status=0x10, count=1)
    )
    url = f"mssql://user:{PASSWORD}@localhost:{server.port}/database?encrypt=no"
    with opened(Common(url, "local"), tmp_path) as targets:
        assert (insert_limit(targets, 20, 10) or 0) > 0
        schema = targets.deployment.store.settings["schema"]
        assert f"CREATE SCHEMA [{schema}]" in "".join(server.statements)
    assert f"DROP SCHEMA [{schema}]" in server.statements[-1]
