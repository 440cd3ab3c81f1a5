"""Certificates: each fault has one readable class and is not retried; C-062."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from app.webhooks.delivery import DeliveryOutcome
from tests.webhooks.conftest import (
    LOOPBACK,
    TRUST,
    Log,
    Time,
    a_request,
    a_tool,
    delivering,
    receiving,
    reply,
)

pytestmark = pytest.mark.anyio

HOST = "tool.example"
Maker = Callable[..., ssl.SSLContext]


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


class Authority:
    """Signs server certificates; `trust` is a client's context that knows nobody else."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = self._sign("test authority", self._key, days=(-10, 10), is_authority=True)
        pem = self._certificate.public_bytes(serialization.Encoding.PEM).decode()
        self.trust = ssl.create_default_context(cadata=pem)

    def server(self, host: str = HOST, days: tuple[int, int] = (-1, 1)) -> ssl.SSLContext:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(host, key, days=days, is_authority=False)
        path = self._folder / "server.pem"
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            + certificate.public_bytes(serialization.Encoding.PEM)
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path)
        return context

    def _sign(
        self, host: str, key: ec.EllipticCurvePrivateKey, *, days: tuple[int, int], is_authority: bool
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        usage = x509.KeyUsage(
            digital_signature=True, key_cert_sign=is_authority, crl_sign=is_authority,
            content_commitment=False, key_encipherment=False, data_encipherment=False,
            key_agreement=False, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        return (
            x509.CertificateBuilder()
            .subject_name(_name(host))
            .issuer_name(_name("test authority"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + timedelta(days=days[0]))
            .not_valid_after(now + timedelta(days=days[1]))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


async def deliver(
    log: Log, server: ssl.SSLContext, trust: ssl.SSLContext, *, host: str = HOST
) -> DeliveryOutcome:
    time_ = Time()

    def lookup(host: str, port: int) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    async with (
        receiving(reply(body=b'"done"'), tls=server) as receiver,
        delivering(LOOPBACK, tls=trust, lookup=lookup, clock=time_.clock, sleep=time_.sleep) as deliverer,
    ):
        tool = a_tool(f"https://{host}:{receiver.port}/", retry="safe", timeout_s=3.0)
        return await deliverer.deliver(a_request(tool), log)


async def test_a_judged_address_is_still_verified_by_the_urls_name(log: Log, authority: Authority) -> None:
    outcome = await deliver(log, authority.server(), authority.trust)
    assert b"done" in outcome.result.content


@pytest.mark.parametrize(
    ("code", "said", "server", "is_trusted"),
    [
        ("tls_expired", b"expired", lambda it: it.server(days=(-3, -1)), True),
        ("tls_expired", b"not yet valid", lambda it: it.server(days=(1, 3)), True),
        ("tls_wrong_host", b"another host", lambda it: it.server(host="other.example"), True),
        ("tls_untrusted", b"not signed by a trusted", lambda it: it.server(), False),
    ],
    ids=["expired", "not yet valid", "wrong host", "untrusted"],
)
async def test_a_bad_certificate_is_permanent_and_says_what_is_wrong(
    log: Log, authority: Authority, code: str, said: bytes, server: Maker, is_trusted: bool
) -> None:
    outcome = await deliver(log, server(authority), authority.trust if is_trusted else TRUST)
    assert (log.codes, outcome.outcome_unknown) == ([code], False)
    assert said in outcome.result.content
    assert b"has not run" in outcome.result.content


async def test_the_name_is_shown_and_verified_without_its_last_dot(log: Log, authority: Authority) -> None:
    server, shown = authority.server(), []
    server.sni_callback = lambda _socket, name, _context: shown.append(name)
    outcome = await deliver(log, server, authority.trust, host=f"{HOST}.")
    assert b"done" in outcome.result.content
    assert shown == [HOST]


async def handshaking(
    log: Log, answer: bytes, *, trust: ssl.SSLContext, timeout_s: float, is_open: bool = True
) -> DeliveryOutcome:
    """Deliver to a server that answers the beginning of a handshake with these bytes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answer)
        if is_open:
            with contextlib.suppress(ConnectionError):
                await reader.read()
        writer.close()

    time_ = Time()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    async with delivering(LOOPBACK, tls=trust, clock=time_.clock, sleep=time_.sleep) as deliverer:
        outcome = await deliverer.deliver(a_request(a_tool(url, timeout_s=timeout_s)), log)
    server.close()
    return outcome


HELLO_OF_TLS_1_1 = bytes.fromhex("160302002a020000260302") + bytes(33) + bytes.fromhex("002f00")
TOO_OLD = {"says so": bytes.fromhex("15030100020246"), "speaks TLS 1.1": HELLO_OF_TLS_1_1}


@pytest.mark.parametrize("answer", TOO_OLD)
async def test_a_server_of_an_old_protocol_is_permanent_and_told(
    log: Log, authority: Authority, answer: str
) -> None:
    outcome = await handshaking(log, TOO_OLD[answer], trust=authority.trust, timeout_s=5.0)
    assert (log.codes, outcome.outcome_unknown) == (["tls_too_old"], False)
    assert b"offers no TLS version from 1.2 on" in outcome.result.content
    assert b"has not run" in outcome.result.content


FAILED = {
    "no common cipher": bytes.fromhex("15030300020228"),
    "name unknown": bytes.fromhex("15030300020270"),
    "internal error": bytes.fromhex("15030300020250"),
    "plain HTTP": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "noise": bytes(50),
}


@pytest.mark.parametrize("answer", FAILED)
async def test_a_handshake_that_fails_is_tried_again(log: Log, authority: Authority, answer: str) -> None:
    """R-156: nothing was sent to the tool, so even the careful policy repeats it."""
    outcome = await handshaking(log, FAILED[answer], trust=authority.trust, timeout_s=1.2)
    assert (log.codes, outcome.outcome_unknown) == (["tls_failed", "tls_failed"], False)
    assert b"the TLS handshake failed" in outcome.result.content


async def test_a_server_that_closes_in_the_handshake_is_tried_again(log: Log, authority: Authority) -> None:
    outcome = await handshaking(log, b"", trust=authority.trust, timeout_s=1.2, is_open=False)
    assert (log.codes, outcome.outcome_unknown) == (["tls_failed", "tls_failed"], False)


async def test_a_handshake_that_hangs_times_out_with_nothing_sent(log: Log, authority: Authority) -> None:
    outcome = await handshaking(log, b"", trust=authority.trust, timeout_s=0.1)
    assert (log.codes[0], outcome.outcome_unknown, log.reports[0].was_written) == ("timeout", False, False)
    assert b"has not run" in outcome.result.content
