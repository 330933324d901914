"""The guide *Testing code that sends*: its files are written as they stand, and its commands run in their folder."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from urllib.parse import unquote, urlsplit

import psycopg
from tests import newcomer

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "testing-code-that-sends.md"

DATABASE = """
import os
DATABASES = {"default": {"ENGINE": "django.db.backends.postgresql", **eval(os.environ["DJANGO_DATABASE"])}}
INSTALLED_APPS += ["orders"]
"""


def blocks(language: str) -> list[str]:
    text = GUIDE.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def run(command: str, folder: Path, **variables: str) -> str:
    environment = newcomer.environment(**variables)
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_every_file_is_run_by_a_command(tmp_path: Path, postgres_url: str, unpacked_wheel: Path) -> None:
    where, name = urlsplit(postgres_url), f"guide_django_{os.getpid()}"
    database = {
        "NAME": name,  # Tests never connect to it: it does not exist.
        "USER": unquote(where.username or ""),
        "PASSWORD": unquote(where.password or ""),
        "HOST": where.hostname,
        "PORT": where.port,
        "TEST": {"NAME": f"test_{name}"},
    }
    variables = {"DJANGO_DATABASE": repr(database)}
    if newcomer.IS_OF_THE_TESTS:  # It has the checkout and not the wheel, so pytest does not find the plugin.
        variables["PYTHONPATH"] = f"{unpacked_wheel}{os.pathsep}."
    run("django-admin startproject site_ . && python manage.py startapp orders", tmp_path)
    with (tmp_path / "site_" / "settings.py").open("a", encoding="utf-8") as settings:
        settings.write(DATABASE)
    files = dict[str, str]()
    for block in blocks("python"):
        head = re.match(r"# (\S+\.py)\n", block)
        assert head is not None, block
        files[head[1]] = block
        (tmp_path / head[1]).write_text(block, encoding="utf-8")
    printed = [run(command.strip(), tmp_path, **variables) for command in blocks("sh")]
    tests = [file.count("def test_") for file in files.values() if "def test_" in file]
    assert [
        int(number) for text in printed for number in re.findall(r"(?:Ran )?(\d+) (?:passed|tests? in)", text)
    ] == tests
    with psycopg.connect(postgres_url) as connection:
        left = connection.execute("SELECT datname FROM pg_database WHERE datname LIKE %s", [f"%{name}"]).fetchall()
    assert left == []
