"""A listener that speaks as much of TDS as a login and simple statements need, and writes down what it hears.

It stands in for SQL Server where only the wire counts: encryption, packets, refusals. It runs no SQL.
"""

import socket
import ssl
import struct
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from postdate.backends.sqlserver.channel import _receive_exactly
from postdate.backends.sqlserver.login import ENCRYPT_NOT_SUPPORTED, ENCRYPT_ON, HEADER, packet, read_encryption

BATCH, RPC, REPLY, ATTENTION, LOGIN, PRELOGIN = 0x01, 0x03, 0x04, 0x06, 0x10, 0x12
_ENDS_WITHIN_SECONDS = 10.0
_CHUNK = 65_536
_PACKET = 4096 - HEADER.size


@dataclass(frozen=True)
class Certificates:
    """Files of one certificate, and of the authority that issued it."""

    authority: Path
    certificate: Path
    key: Path


def issue(folder: Path, *names: str, subject: str = "a server") -> Certificates:
    """Return a certificate for the alternative ``names``, hosts and addresses, of an authority of its own."""
    made = Certificates(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca_name = _name("an authority")
    ca = (
        _certificate(ca_name, ca_name, ca_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(*_CERTIFIES), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    certificate = (
        _certificate(_name(subject), ca_name, key.public_key())
        .add_extension(x509.SubjectAlternativeName([_alternative(name) for name in names]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    made.authority.write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    made.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    made.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return made


_CERTIFIES = (False, False, False, False, False, True, True, False, False)
_VALID = datetime(2020, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC)


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    named = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    return named.serial_number(x509.random_serial_number()).not_valid_before(_VALID[0]).not_valid_after(_VALID[1])


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


# --- tokens -----------------------------------------------------------------------------------------------------------


def _text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode("utf-16-le")


def _change(kind: int, new: str) -> bytes:
    content = bytes([kind]) + _text(new) + _text("")
    return b"\xe3" + struct.pack("<H", len(content)) + content


def done(kind: int = 0xFD, status: int = 0, count: int = 0) -> bytes:
    return struct.pack("<BHHQ", kind, status, 0, count)


def acknowledged(database: str) -> bytes:
    """Return the answer to a login that is granted."""
    program = _text("Microsoft SQL Server")
    content = b"\x01" + struct.pack(">I", 0x74000004) + program + struct.pack(">I", 0x10000000)
    return _change(1, database) + b"\xad" + struct.pack("<H", len(content)) + content + done()


def refused(*errors: tuple[int, str]) -> bytes:
    """Return the answer to a login, or a statement, that goes wrong."""
    return b"".join(_error(*error) for error in errors) + done(status=0x02)


def _error(number: int, text: str) -> bytes:
    said = text.encode("utf-16-le")
    content = struct.pack("<iBBH", number, 1, 14, len(text)) + said + _text("server") + _text("") + struct.pack("<I", 1)
    return b"\xaa" + struct.pack("<H", len(content)) + content


def routed(host: str, port: int) -> bytes:
    """Return the answer to a login that sends the client elsewhere."""
    new = struct.pack("<BHH", 0, port, len(host)) + host.encode("utf-16-le")
    content = b"\x14" + struct.pack("<H", len(new)) + new + b"\0\0"
    whole = acknowledged("elsewhere").removesuffix(done())
    return whole + b"\xe3" + struct.pack("<H", len(content)) + content + done()


def numbers(*values: int, is_procedure: bool) -> bytes:
    """Return the answer with one row of numbers, as a batch or sp_executesql gives it."""
    columns = b"".join(struct.pack("<IHBB", 0, 0, 0x26, 8) + _text("n") for _ in values)
    row = b"\xd1" + b"".join(struct.pack("<Bq", 8, value) for value in values)
    found = b"\x81" + struct.pack("<H", len(values)) + columns + row
    if not is_procedure:
        return found + done(status=0x10, count=1)
    return found + done(0xFF, 0x11, 1) + b"\x79\0\0\0\0" + done(0xFE)


# --- the listener -----------------------------------------------------------------------------------------------------


@dataclass
class TdsServer:
    """Listens on loopback while the block lasts.

    Args:
        certificates: it encrypts by; ``None``: it offers no encryption.
        demands: encryption, also of those who want none.
        strict: TLS comes first, as in TDS 8.
        login: the answer to a login.
        answers: to statements; ``None`` hears it and says nothing.
    """

    certificates: Certificates | None = None
    demands: bool = False
    strict: bool = False
    login: bytes = field(default_factory=lambda: acknowledged("database"))
    answers: Callable[[str, int], bytes | None] | None = None
    port: int = 0
    heard: Counter[int] = field(default_factory=Counter[int])
    wire: bytearray = field(default_factory=bytearray)
    """Every byte that came in, as it came."""
    logins: list[bytes] = field(default_factory=list[bytes])
    statements: list[str] = field(default_factory=list[str])
    connections: int = 0

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, name="tds-server")]
        self._open = list[socket.socket]()
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for end in (self._listener, *self._open):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join(_ENDS_WITHIN_SECONDS)
            assert not thread.is_alive()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                self._open.append(client)
                self._threads.append(threading.Thread(target=self._serve, args=(client,), name="tds-server"))
                self._threads[-1].start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), client:  # the client goes when it likes
            _Conversation(self, client).hold()


class _Conversation:
    def __init__(self, server: TdsServer, client: socket.socket) -> None:
        self._server, self._client = server, client
        self._tls: ssl.SSLObject | None = None
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()

    def hold(self) -> None:
        server = self._server
        if server.strict:
            self._shake_hands(in_packets=False)
        while True:
            kind, content = self._message()
            server.heard[kind] += 1
            if kind == PRELOGIN:
                self._agree(content)
            elif kind == LOGIN:
                server.logins.append(content)
                self._reply(server.login)
            elif kind == ATTENTION:
                self._reply(done(status=0x20))
            else:
                sql = content.decode("utf-16-le", "ignore") if kind == BATCH else content.decode("latin-1")
                text = sql if kind == BATCH else sql.replace("\0", "")
                server.statements.append(text)
                answer = self._answer(text, kind)
                if answer is not None:
                    self._reply(answer)

    def _answer(self, sql: str, kind: int) -> bytes | None:
        if "ProductMajorVersion" in sql:
            return numbers(16, 3, 160, is_procedure=kind == RPC)
        if self._server.answers is not None and not sql.lstrip("\x16\0").startswith("SET QUOTED"):
            return self._server.answers(sql, kind)
        return numbers(1, is_procedure=kind == RPC) if "SELECT" in sql or kind == RPC else done()

    def _agree(self, content: bytes) -> None:
        server = self._server
        wanted = read_encryption(content)
        offered = ENCRYPT_NOT_SUPPORTED
        if server.certificates is not None and (wanted == ENCRYPT_ON or server.demands):
            offered = ENCRYPT_ON
        version = b"\x00\x00\x0b\x00\x06\x01\x00\x11\x00\x01\xff" + b"\x10\0\0\0\0\0" + bytes([offered])
        self._reply(version)
        if offered == ENCRYPT_ON and wanted == ENCRYPT_ON and not server.strict:
            self._shake_hands(in_packets=True)

    def _shake_hands(self, *, in_packets: bool) -> None:
        certificates = self._server.certificates
        assert certificates is not None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates.certificate, certificates.key)
        if not in_packets:
            context.set_alpn_protocols(["tds/8.0"])
        tls = context.wrap_bio(self._in, self._out, server_side=True)
        while True:
            try:
                tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush(in_packets=in_packets)
                if in_packets:
                    kind, content = self._message()
                    assert kind == PRELOGIN
                    self._in.write(content)
                else:
                    self._in.write(self._received())
            else:
                self._flush(in_packets=in_packets)
                self._tls = tls
                return

    def _flush(self, *, in_packets: bool = False) -> None:
        content = self._out.read()
        if content:
            self._client.sendall(packet(PRELOGIN, content) if in_packets else content)

    def _received(self, size: int = _CHUNK) -> bytes:
        got = self._client.recv(size)
        if not got:
            raise ConnectionResetError
        self._server.wire += got
        return got

    def recv(self, size: int, /) -> bytes:
        while self._tls is not None:
            try:
                return self._tls.read(size)
            except ssl.SSLWantReadError:
                self._in.write(self._received())
        return self._received(size)

    def sendall(self, content: bytes, /) -> None:
        if self._tls is None:
            self._client.sendall(content)
        else:
            self._tls.write(content)
            self._flush()

    def _message(self) -> tuple[int, bytes]:
        content = bytearray()
        while True:
            kind, status, length, *_ = HEADER.unpack(_receive_exactly(self, HEADER.size))
            content += _receive_exactly(self, length - HEADER.size)
            if status & 1:
                return kind, bytes(content)

    def _reply(self, content: bytes) -> None:
        parts = [content[at : at + _PACKET] for at in range(0, len(content), _PACKET)] or [b""]
        for part in parts[:-1]:
            self.sendall(HEADER.pack(REPLY, 0, HEADER.size + len(part), 0, 0, 0) + part)
        self.sendall(packet(REPLY, parts[-1]))
