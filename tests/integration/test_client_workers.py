"""The client in a web server that forks its workers, after the application was loaded and has used it."""

import itertools
import os
import socket
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.postgres_subjects import drop_schema, fresh_schema
from tests.waiting import Eventually

import postdate
from postdate import Pending

APPLICATION = """
import os
from datetime import timedelta

import psycopg
from flask import Flask, request

import postdate

app, reminders = Flask(__name__), postdate.connect(os.environ["STORE"], schema=os.environ["SCHEMA"]).blocking
HOUR = timedelta(hours=1)
reminders.send(b"", destination="q", delay=HOUR, message_id="before the fork")


@app.post("/<order>")
def create(order):
    with psycopg.connect(os.environ["STORE"]) as connection:
        reminders.send(b"", destination="mails", delay=HOUR, message_id=order, transaction=connection)
        if request.args.get("refused"):
            connection.rollback()
    return str(os.getpid())


@app.delete("/<order>")
def cancel(order):
    with psycopg.connect(os.environ["STORE"]) as connection:
        return reminders.cancel(order, transaction=connection).value
"""


def test_workers_of_gunicorn_have_their_own(postgres_url: str, tmp_path: Path, eventually: Eventually) -> None:
    schema = fresh_schema()
    (tmp_path / "application.py").write_text(APPLICATION)
    listening = socket.create_server(("127.0.0.1", 0))
    where = f"http://127.0.0.1:{listening.getsockname()[1]}"
    options = ["--preload", "--workers", "4", "--bind", f"fd://{listening.fileno()}", "--timeout", "90"]
    environment = {**os.environ, "STORE": postgres_url, "SCHEMA": schema}
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "gunicorn", *options, "application:app"],
            cwd=tmp_path, env=environment, stderr=log, pass_fds=[listening.fileno()],
        )  # fmt: skip

    def ask(path: str, method: str = "POST") -> str:
        with urllib.request.urlopen(urllib.request.Request(f"{where}/{path}", method=method), timeout=90) as answer:
            return answer.read().decode()

    def is_up() -> bool:
        assert server.poll() is None, (tmp_path / "log").read_text()
        return (tmp_path / "log").read_text().count("Booting worker") == 4

    client = postdate.connect(postgres_url, schema=schema).blocking
    try:
        eventually(is_up, "four workers are there")
        orders = [f"order-{number}{'?refused=1' if number % 4 == 0 else ''}" for number in range(200)]
        with ThreadPoolExecutor(16) as threads:
            workers, more = set(threads.map(ask, orders)), itertools.count()
            eventually(lambda: len(workers | {ask(f"more-{next(more)}?refused=1")}) > 1, "several have answered")
            answers = list(threads.map(lambda number: ask(f"order-{number}", "DELETE"), range(100)))
        assert answers == ["not found" if number % 4 == 0 else "done" for number in range(100)]
        assert client.get("before the fork") is not None
        waiting = {each.message_id for each in client.list(Pending("mails"), limit=1_000)}
        assert waiting == {f"order-{number}" for number in range(100, 200) if number % 4}
    finally:
        server.terminate()
        server.wait()
        listening.close()
        client.close()
        drop_schema(postgres_url, schema)
