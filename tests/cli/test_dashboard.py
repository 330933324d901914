"""``postdate dashboard`` serves the page, to those who ask for it by its names, until it is told to stop."""

import re
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest


@contextmanager
def serving(folder: Path, eventually, *options: str) -> Generator[tuple[str, subprocess.Popen[bytes]]]:
    log = folder / "dashboard.log"
    with log.open("wb") as file:
        command = [sys.executable, "-W", "error", "-m", "postdate.cli", "dashboard", "--listen", "127.0.0.1:0"]
        process = subprocess.Popen([*command, *options], stdout=file, stderr=file)
    try:
        eventually(lambda: "the page is at" in log.read_text(), "it listens")
        yield re.findall(r"http://127\.0\.0\.1:\d+/", log.read_text())[0], process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def served(cli, eventually, own_folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Serve the page of a new store from a process, to act on, too; lend its address, and the process."""
    cli.ok("setup")
    (own_folder / "token").write_text("a token of some length\n")
    may = ("--allow-actions", "--token-file", "token")
    with serving(own_folder, eventually, "--host", "ops.example", *may) as found:
        yield found


def test_it_serves_and_stops_when_told_so(served, own_folder: Path) -> None:
    address, process = served
    assert "Nothing waits" in httpx.get(address).text
    assert httpx.get(address, headers={"Host": "ops.example"}).status_code == 200
    assert httpx.get(address, headers={"Host": "evil.example"}).status_code == 400
    assert "server" not in httpx.get(address).headers
    with httpx.Client(base_url=address) as browser:
        browser.post("/sign-in", data={"name": "ada", "token": "a token of some length"})
        assert ">Pause</button>" in browser.get("/queues").text
    assert ">Pause</button>" not in httpx.get(f"{address}queues").text
    with httpx.stream("GET", f"{address}events") as news:
        next(news.iter_lines())
        process.send_signal(signal.SIGTERM)  # somebody still watches
        process.wait()
    assert process.returncode == 0, (own_folder / "dashboard.log").read_text()


def test_it_shows_others_beside_the_first(cli, eventually, own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of the environment are settings of the first alone."""
    (own_folder / "other.toml").write_text('[store]\naddress = "sqlite:///other.db"\n')
    cli.ok("setup", "--config", "other.toml")
    monkeypatch.setenv("POSTDATE_STORE__ADDRESS", "sqlite:///own.db")
    cli.ok("setup")
    with serving(own_folder, eventually, "--also", "depot=other.toml") as (address, _):
        for name, file in (("postdate", "own.db"), ("depot", "other.db")):
            assert f'href="/{name}/"' in httpx.get(address).text
            assert f"Store <code>sqlite:///{file}</code>" in httpx.get(f"{address}{name}/").text


@pytest.mark.parametrize(
    ("also", "said"),
    [
        ("depot", "--also must be NAME=FILE with a unique name, not 'depot'"),
        ("postdate=other.toml", "--also must be NAME=FILE with a unique name, not 'postdate=other.toml'"),
        ("a/b=other.toml", "'a/b' cannot name a deployment"),
        ("depot=missing.toml", "there is no file 'missing.toml'"),
    ],
)
def test_what_names_no_other_deployment_is_refused(cli, own_folder: Path, also: str, said: str) -> None:
    (own_folder / "other.toml").touch()
    ran = cli("dashboard", "--also", also)
    assert (ran.status, said in ran.err) == (2, True), ran.err


@pytest.mark.parametrize("listen", ["8080", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:70000"])
def test_an_address_that_is_none_is_refused(cli, listen: str) -> None:
    cli.ok("setup")
    ran = cli("dashboard", "--listen", listen)
    assert (ran.status, "--listen must be a host and a port, such as" in ran.err) == (2, True)


def test_an_address_of_another_machine_is_refused(cli) -> None:
    cli.ok("setup")
    ran = cli("dashboard", "--listen", "192.0.2.1:8080")
    assert (ran.status, "cannot listen on 192.0.2.1:8080" in ran.err) == (2, True)


def test_without_the_extra_it_says_which(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    ran = cli("dashboard")
    assert (ran.status, "pip install 'postdate[dashboard]'" in ran.err) == (2, True)


def test_without_a_store_it_does_not_start(cli) -> None:
    ran = cli("dashboard")
    assert (ran.status, "create it with `postdate setup`" in ran.err) == (3, True)


def test_who_may_act_has_to_be_said(cli, own_folder: Path) -> None:
    """Before anything is opened."""
    (own_folder / "token").write_text("a token of some length\n")
    (own_folder / "short").write_text("token\n")
    (own_folder / "bytes").write_bytes(b"\xff" * 16)
    may = ("dashboard", "--allow-actions")
    for arguments, told in (
        (may, "--allow-actions needs --token-file FILE or --user-header NAME"),
        ((*may, "--token-file", "short"), "the token needs 16 characters of ASCII at least: openssl"),
        ((*may, "--token-file", "gone"), "'--token-file': 'gone': No such file"),
        ((*may, "--token-file", "bytes"), "the token needs 16 characters of ASCII at least: openssl"),
        ((*may, "--token-file", "token", "--user-header", "X-User"), "give either a token, or the header"),
        ((*may, "--user-header", "X User"), "'X User' is no name of a header"),
        (("dashboard", "--token-file", "token"), "--allow-actions needs"),
        (("dashboard", "--user-header", "X-User"), "--allow-actions needs"),
    ):
        ran = cli(*arguments)
        assert (ran.status, told in ran.err) == (2, True), ran
    for good in ((*may, "--token-file", "token"), (*may, "--user-header", "X-User"), ("dashboard",)):
        assert cli(*good).status == 3  # there is no store
