"""The guide of migrations: that of Django runs in a project, and the functions of Alembic's are called as Alembic does.

Alembic itself is not installed here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import sqlalchemy
from tests import mariadb_subjects, newcomer

import postdate
from postdate import MariaDbStore, TransactionMode
from postdate.errors import StoreNotSetUp

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "migrations.md"

SETTINGS = """
import os
DATABASES = {"default": {"ENGINE": "django.db.backends.postgresql", **eval(os.environ["DJANGO_DATABASE"])}}
INSTALLED_APPS += ["shop"]
"""


def blocks() -> dict[str, str]:
    """Return the files of the guide by their names, and its command under ``sh``."""
    text = GUIDE.read_text(encoding="utf-8")
    files = re.findall(r"^```python\n# (\S+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (command,) = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return {**dict(files), "sh": command}


def run(command: str, folder: Path, **variables: str) -> None:
    environment = newcomer.environment(**variables)
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


async def has_tables(url: str) -> bool:
    """Return whether a client that creates nothing finds all that it needs."""
    try:
        async with postdate.connect(url, create=False) as client:
            await client.list()
    except StoreNotSetUp:
        return False
    return True


async def test_a_migration_of_django_makes_the_tables_and_takes_them_away(tmp_path: Path, empty_database: str) -> None:
    where = urlsplit(empty_database)
    database = {
        "NAME": where.path[1:],
        "USER": unquote(where.username or ""),
        "PASSWORD": unquote(where.password or ""),
        "HOST": where.hostname,
        "PORT": where.port,
    }
    variables = {"DJANGO_DATABASE": repr(database), "DATABASE_URL": empty_database}
    run("django-admin startproject site_ . && python manage.py startapp shop", tmp_path)
    with (tmp_path / "site_" / "settings.py").open("a", encoding="utf-8") as settings:
        settings.write(SETTINGS)
    migrations = tmp_path / "shop" / "migrations"
    (tmp_path / "shop" / "models.py").write_text(
        "from django.db import models\nclass Order(models.Model):\n    name = models.TextField()\n"
    )
    run("python manage.py makemigrations shop", tmp_path, **variables)
    run(blocks()["sh"], migrations, **variables)
    (tmp_path / "shop/migrations/0002_postdate.py").write_text(blocks()["shop/migrations/0002_postdate.py"])
    assert not await has_tables(empty_database)
    run("python manage.py migrate", tmp_path, **variables)
    assert await has_tables(empty_database)
    run("python manage.py makemigrations --check", tmp_path, **variables)
    run(
        "postdate setup --store $DATABASE_URL --print-sql --no-transaction | cmp - postdate.sql",
        migrations,
        **variables,
    )
    run("python manage.py migrate shop 0001", tmp_path, **variables)
    assert not await has_tables(empty_database)


async def test_a_migration_of_alembic_makes_the_tables_in_its_transaction(
    tmp_path: Path, empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Alembic does: it opens the transaction, and `op` has its connection."""
    run(blocks()["sh"], tmp_path, DATABASE_URL=empty_database)
    file = tmp_path / "0002_postdate.py"
    engine = sqlalchemy.create_engine(
        empty_database.replace("postgresql://", "postgresql+psycopg://"), poolclass=sqlalchemy.NullPool
    )
    for ends_well in (False, True):
        with engine.connect() as connection, connection.begin() as transaction:
            operations = types.SimpleNamespace(
                get_bind=lambda: connection,
                execute=lambda text: connection.execute(sqlalchemy.text(text)),
            )
            alembic = types.ModuleType("alembic")
            alembic.__dict__["op"] = operations
            monkeypatch.setitem(sys.modules, "alembic", alembic)
            names: dict[str, Any] = {"__file__": str(file)}
            exec(blocks()["versions/0002_postdate.py"], names)
            names["upgrade"]()
            if not ends_well:
                transaction.rollback()
        assert await has_tables(empty_database) is ends_well
    with engine.begin() as connection:
        names["downgrade"]()
    assert not await has_tables(empty_database)
    engine.dispose()


def seen_by_autogenerate(engine: sqlalchemy.Engine) -> set[tuple[str | None, str]]:
    """Return the tables that Alembic compares: it asks for each schema, and then for each table in it."""
    names: dict[str, Any] = {}
    exec(blocks()["env.py"], names)
    include_name, inspector = names["include_name"], sqlalchemy.inspect(engine)
    schemas = [each for each in inspector.get_schema_names() if each != "information_schema"]
    return {
        (schema, table)
        for schema in schemas
        if include_name(schema, "schema", {})
        for table in inspector.get_table_names(schema)
        if include_name(table, "table", {"schema_name": schema, "schema_qualified_table_name": f"{schema}.{table}"})
    }


async def test_autogenerate_sees_the_tables_of_the_application_only(empty_database: str) -> None:
    async with postdate.connect(empty_database) as client:
        await client.list()
    engine = sqlalchemy.create_engine(
        empty_database.replace("postgresql://", "postgresql+psycopg://"), poolclass=sqlalchemy.NullPool
    )
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text("CREATE TABLE public.shop_order (id integer PRIMARY KEY)"))
    assert sqlalchemy.inspect(engine).get_table_names("postdate")
    assert seen_by_autogenerate(engine) == {("public", "shop_order")}
    engine.dispose()


async def test_autogenerate_sees_the_tables_of_the_application_only_on_mariadb(mariadb_url: str) -> None:
    schema = f"autogenerate_{os.getpid()}"
    store = MariaDbStore(mariadb_url, schema=schema)
    await store.initialize("mails", TransactionMode.RECEIVE_ONLY)
    await store.setup()
    await store.close()
    engine = sqlalchemy.create_engine(
        urlsplit(mariadb_url)._replace(scheme="mysql+pymysql", path=f"/{schema}").geturl(),
        poolclass=sqlalchemy.NullPool,
    )
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text("CREATE TABLE shop_order (id integer PRIMARY KEY)"))
    assert len(sqlalchemy.inspect(engine).get_table_names(schema)) > 4
    assert {each for each in seen_by_autogenerate(engine) if each[0] == schema} == {(schema, "shop_order")}
    engine.dispose()
    mariadb_subjects.drop_schema(mariadb_url, schema)
