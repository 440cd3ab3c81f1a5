"""A send leaves once and says how far it got; credentials go where they must and nowhere else."""

from __future__ import annotations

import asyncio
import datetime
import json
import ssl
import traceback
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from app import __version__
from app.core.headers import HEADER_CHARS_MAX, is_refused_upstream, is_well_formed
from app.core.protocol import Failure, SessionFacts
from app.upstream import client as client_module
from app.upstream.client import UpstreamClient
from app.upstream.exchange import segment
from app.upstream.failures import MESSAGE_CHARS_MAX, UpstreamError
from app.upstream.headers import Credential
from app.upstream.transport import SEND_S, Timeouts, connector, open_session, timeout
from tests.upstream.conftest import API_KEY, MakeClient
from tests.upstream.wire import WAIT_S, Script, Wire, closed_port, cut, events, hang, reply, serve_bytes

pytestmark = pytest.mark.anyio

SESSION = "/v1/sessions/sesn_1"
EVENTS = f"{SESSION}/events"
STREAM = f"{EVENTS}/stream"
RESULT = b'{"type":"user.custom_tool_result","custom_tool_use_id":"ctu1","is_error":false,"content":[]}'


async def failure_of_send(client: UpstreamClient, event: bytes = RESULT) -> Failure:
    with pytest.raises(UpstreamError) as caught:
        await client.send("sesn_1", event)
    return caught.value.failure


async def ask_everything(client: UpstreamClient, wire: Wire) -> None:
    """One STREAM, LIST, RETRIEVE (with its environment) and SEND."""
    wire.on("GET", STREAM, events())
    wire.on("GET", EVENTS, reply(body={"data": []}))
    wire.on("GET", SESSION, reply(body={"environment_id": "env_1"}))
    wire.on("POST", EVENTS, reply())
    async with client.stream("sesn_1", previews=True):
        pass
    async for _ in client.pages("sesn_1", None):
        pass
    await client.retrieve("sesn_1")
    await client.send("sesn_1", RESULT)
    assert [seen.path for seen in wire.seen] == [STREAM, EVENTS, SESSION, "/v1/environments/env_1", EVENTS]


# ---- headers


async def test_an_api_key_travels_alone_with_version_beta_and_helper(
    client: UpstreamClient, wire: Wire
) -> None:
    """R-004: STREAM, LIST, RETRIEVE and SEND; no bearer token."""
    await ask_everything(client, wire)

    for seen in wire.seen:
        assert API_KEY.secret == seen.headers["x-api-key"]
        assert "authorization" not in seen.headers
        assert seen.headers["anthropic-version"] == "2023-06-01"
        assert seen.headers["anthropic-beta"] == "managed-agents-2026-04-01"
        assert seen.headers["x-stainless-helper"] == "bascule-runner"
        assert seen.headers["user-agent"] == f"bascule/{__version__}"
        assert seen.headers["user-agent"].startswith("bascule/")
        assert seen.headers["accept-encoding"] == "identity"


async def test_a_bearer_token_replaces_the_key(
    make_client: MakeClient, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-005: even if the environment holds a key, or a proxy."""
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-from-the-environment")
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{closed_port()}")

    await ask_everything(make_client(credential=Credential("bearer", "token-1")), wire)

    for seen in wire.seen:
        assert seen.headers["authorization"] == "Bearer token-1"
        assert "x-api-key" not in seen.headers


async def test_extra_headers_pass_through_unchanged(make_client: MakeClient, wire: Wire) -> None:
    """R-006: on every request."""
    await ask_everything(make_client(extra_headers={"x-trace-id": "abc", "X-Team": "Zurich a;b=c"}), wire)

    for seen in wire.seen:
        assert seen.headers["x-trace-id"] == "abc"
        assert seen.headers["x-team"] == "Zurich a;b=c"


@pytest.mark.parametrize(
    "name",
    [
        "authorization", "Authorization", "x-api-key", "X-API-KEY", "x_api_key", "proxy-authorization",
        "cookie", "anthropic-beta", "anthropic-version", "Anthropic_Version", "host", "content-length",
        "content-type", "transfer-encoding", "connection", "upgrade", "expect", "user-agent",
        "x-stainless-helper", "last-event-id", "", "a b", "a:b", "a\r\nb", "é",
    ],
    ids=lambda name: f"R-006 {name!r}",
)  # fmt: skip
async def test_names_that_authenticate_choose_a_beta_or_frame_the_message_are_refused(
    make_client: MakeClient, name: str
) -> None:
    """R-006: a tenant cannot speak with another's voice."""
    assert is_refused_upstream(name) or not is_well_formed(name, "x")
    with pytest.raises(ValueError, match="may not be passed through"):
        make_client(extra_headers={name: "x"})


@pytest.mark.parametrize(
    "name", ["x-trace-id", "traceparent", "anthropic-workspace-id", "cf-access-client-id", "x_y"]
)
def test_other_names_pass(name: str) -> None:
    """R-006."""
    assert not is_refused_upstream(name)
    assert is_well_formed(name, "x")


@pytest.mark.parametrize(
    "value", ["a\r\nx-api-key: b", "a\nb", "a\0b", "x" * (HEADER_CHARS_MAX + 1), "\u2028"]
)
async def test_values_that_no_header_can_carry_are_refused_and_not_repeated(
    make_client: MakeClient, value: str
) -> None:
    with pytest.raises(ValueError, match="x-trace-id") as caught:
        make_client(extra_headers={"x-trace-id": value})
    assert value not in str(caught.value)


@pytest.mark.parametrize("secret", ["", "a b", "a\n", "ключ"])
def test_a_secret_that_no_header_can_carry_is_refused_and_not_repeated(secret: str) -> None:
    with pytest.raises(ValueError, match="secret") as caught:
        Credential("api_key", secret)
    assert not secret or secret not in str(caught.value)


async def test_no_cookie_is_kept(client: UpstreamClient, wire: Wire) -> None:
    wire.on("GET", SESSION, reply(body={}, headers={"set-cookie": "who=other; path=/"}))

    await client.retrieve("sesn_1")
    await client.retrieve("sesn_1")

    assert not any("cookie" in seen.headers for seen in wire.seen)


@pytest.mark.parametrize(
    "base_url",
    [
        "ftp://host", "host", "", "http://", "http://user:pw@host", "http://host?x=1", "http://host#x",
        f"http://{'a' * 64}.example",
    ],
)  # fmt: skip
async def test_an_unusable_base_url_is_refused(make_client: MakeClient, base_url: str) -> None:
    with pytest.raises(ValueError):
        make_client(base_url)


async def test_a_base_url_may_have_a_path(make_client: MakeClient, wire: Wire) -> None:
    wire.on("GET", f"/gateway{SESSION}", reply(body={}))

    await make_client(wire.url + "/gateway/").retrieve("sesn_1")


async def test_a_session_that_trusts_the_environment_is_refused(make_client: MakeClient) -> None:
    async with aiohttp.ClientSession(trust_env=True) as session:
        with pytest.raises(ValueError, match="environment"):
            make_client(requests=session)


@pytest.mark.parametrize(
    ("id_", "path"), [("a/../b", "a%2F..%2Fb"), ("a?b#c%", "a%3Fb%23c%25"), ("é", "%C3%A9")]
)
def test_an_id_stays_one_segment(id_: str, path: str) -> None:
    assert path == segment(id_)


@pytest.mark.parametrize("id_", ["", ".", ".."])
def test_an_id_that_is_no_segment_is_refused(id_: str) -> None:
    with pytest.raises(ValueError, match="dots"):
        segment(id_)


# ---- send


async def test_a_send_holds_one_event_byte_for_byte(client: UpstreamClient, wire: Wire) -> None:
    """R-200: exactly one event and nothing else."""
    event = '{"type": "user.message",  "content":[{"type":"text","text":"ü \\u00fc 1.10"}]}'.encode()
    wire.on("POST", EVENTS, reply(body={"data": [{"id": "sevt_9"}]}))

    body = await client.send("sesn_1", event)

    (seen,) = wire.seen
    assert b'{"events":[' + event + b"]}" == seen.body
    assert seen.headers["content-type"] == "application/json"
    assert body == b'{"data": [{"id": "sevt_9"}]}'


@pytest.mark.parametrize(
    ("script", "body"),
    [
        pytest.param(reply(200, b""), b"", id="R-218 empty"),
        pytest.param(reply(200, b"<html>"), b"<html>", id="R-218 unparsable"),
        pytest.param(reply(202, b""), b"", id="R-218 202"),
        pytest.param(reply(204, b""), b"", id="R-218 204"),
        pytest.param(reply(200, b"\xff\x00"), b"\xff\x00", id="R-218 binary"),
        pytest.param(reply(200, b"x", {"content-encoding": "gzip"}), None, id="R-218 compressed"),
        pytest.param(reply(200, b"x" * (client_module.REPLY_BYTES_MAX + 1)), None, id="R-218 too long"),
        pytest.param(events(b'{"da', end="cut"), None, id="R-218 cut in the body"),
        pytest.param(events(b'{"da', end="hold"), None, id="R-218 body never ends"),
    ],
)
async def test_every_2xx_means_accepted(
    make_client: MakeClient, wire: Wire, script: Script, body: bytes | None
) -> None:
    """R-218: whatever its body."""
    wire.on("POST", EVENTS, script)

    assert body == await make_client(timeouts=Timeouts(send_s=1.0)).send("sesn_1", RESULT)
    assert len(wire.seen) == 1


REACHES = {
    **dict.fromkeys((400, 401, 402, 403, 404, 405, 410, 412, 413, 422, 451), "refused"),
    429: "unsent",
    **dict.fromkeys((408, 409, 500, 502, 503, 504, 529), "unknown"),
    **dict.fromkeys((302, 307, 308), "unknown"),
}


@pytest.mark.parametrize(
    ("status", "reach"), [pytest.param(s, r, id=f"R-217 {s}") for s, r in REACHES.items()]
)
async def test_a_refused_send_is_one_request_and_says_how_far_it_got(
    client: UpstreamClient, wire: Wire, status: int, reach: str
) -> None:
    """R-217: no hidden repeats. R-211: which statuses mean that nothing was accepted."""
    error = {"type": "error", "error": {"type": "some_error", "message": "does not match any tool use"}}
    wire.on("POST", EVENTS, reply(status, error, {"location": f"{wire.url}/elsewhere", "retry-after": "7"}))

    expected = Failure(reach, status, "does not match any tool use", 7.0)  # type: ignore[arg-type]
    assert expected == await failure_of_send(client)
    assert len(wire.seen) == 1


async def test_a_status_is_known_even_if_its_body_never_ends(make_client: MakeClient, wire: Wire) -> None:
    async def stall(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=400)
        await response.prepare(request)
        await response.write(b"no such")
        return await hang(request)

    wire.on("POST", EVENTS, stall)

    assert Failure("refused", 400, "no such") == await failure_of_send(
        make_client(timeouts=Timeouts(send_s=0.1))
    )


async def test_a_send_that_is_not_answered_in_time_is_unknown(make_client: MakeClient, wire: Wire) -> None:
    """R-209, R-217: it may have landed."""
    wire.on("POST", EVENTS, hang)

    failure = await failure_of_send(make_client(timeouts=Timeouts(send_s=0.05)))

    assert Failure("unknown", message="no complete answer within 0.05 s") == failure
    assert len(wire.seen) == 1
    async with asyncio.timeout(WAIT_S):
        await wire.gone.wait()


def test_a_send_ends_when_its_time_is_over_and_not_a_rounded_second_later() -> None:
    assert timeout(SEND_S, 5.0).ceil_threshold > SEND_S


async def test_a_send_cut_on_a_new_connection_is_unknown_and_not_repeated(
    client: UpstreamClient, wire: Wire
) -> None:
    """R-217: the request was written."""
    wire.on("POST", EVENTS, cut)

    failure = await failure_of_send(client)

    assert (failure.reach, failure.status) == ("unknown", None)
    assert len(wire.seen) == 1


async def test_a_send_cut_on_a_reused_connection_is_unknown_and_not_repeated(
    client: UpstreamClient, wire: Wire
) -> None:
    """R-217: a kept-alive connection that dies is no licence to ask again."""
    wire.on("POST", EVENTS, reply(), cut)

    await client.send("sesn_1", RESULT)
    failure = await failure_of_send(client)

    assert (failure.reach, failure.status) == ("unknown", None)
    assert len(wire.seen) == 2
    assert wire.seen[0].peer == wire.seen[1].peer  # the connection was in fact reused


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"", id="R-217 hangs up"),
        pytest.param(b"220 mail ready\r\n", id="R-217 another protocol"),
        pytest.param(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 20_000 + b"\r\n\r\n", id="R-217 endless header"),
        pytest.param(b"HTTP/1.1 400 Bad", id="R-217 half a status line"),
    ],
)
async def test_what_is_no_answer_is_unknown(make_client: MakeClient, answer: bytes) -> None:
    """R-217: an unreadable answer is not a refusal, whatever status aiohttp's error bears."""
    async with serve_bytes(answer) as authority:
        failure = await failure_of_send(make_client(f"http://{authority}"))

    assert (failure.reach, failure.status) == ("unknown", None)


async def test_a_refused_connection_is_unsent(make_client: MakeClient) -> None:
    """R-211, R-046: nothing was written."""
    failure = await failure_of_send(make_client(f"http://127.0.0.1:{closed_port()}"))

    assert (failure.reach, failure.status) == ("unsent", None)


class Resolver(AbstractResolver):
    """Knows no name, or never answers."""

    def __init__(self, *, hangs: bool) -> None:
        self.hangs = hangs

    async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[ResolveResult]:
        if self.hangs:
            await asyncio.Event().wait()
        raise OSError(f"{host} is unknown")

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(
    "hangs", [pytest.param(False, id="R-046 DNS"), pytest.param(True, id="R-046 connect timeout")]
)
async def test_a_name_that_does_not_resolve_is_unsent(make_client: MakeClient, hangs: bool) -> None:
    """R-211: nothing was written."""
    pool = aiohttp.TCPConnector(resolver=Resolver(hangs=hangs))
    async with aiohttp.ClientSession(connector=pool) as session:
        client = make_client("http://upstream.example", requests=session, timeouts=Timeouts(connect_s=0.05))
        failure = await failure_of_send(client)

    assert (failure.reach, failure.status) == ("unsent", None)


async def test_a_send_that_got_no_connection_from_the_pool_is_unsent(
    make_client: MakeClient, wire: Wire
) -> None:
    """R-211: the pool's only connection is taken."""
    wire.on("POST", EVENTS, hang)
    async with open_session(1) as session:
        client = make_client(requests=session, timeouts=Timeouts(connect_s=0.05))
        first = asyncio.create_task(client.send("sesn_1", RESULT))
        async with asyncio.timeout(WAIT_S):
            await wire.arrived.wait()
        failure = await failure_of_send(client)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first

    assert failure.reach == "unsent"
    assert len(wire.seen) == 1


def self_signed(folder: Path) -> ssl.SSLContext:
    """A server's TLS context with a certificate that nobody trusts."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    path = folder / "server.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + certificate.public_bytes(serialization.Encoding.PEM))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return context


async def test_an_untrusted_certificate_is_unsent(make_client: MakeClient, tmp_path: Path) -> None:
    """R-046: TLS failure; the request never left."""
    async with serve_bytes(b"", tls=self_signed(tmp_path)) as authority:
        failure = await failure_of_send(make_client(f"https://{authority}"))

    assert (failure.reach, failure.status) == ("unsent", None)
    assert "certificate" in failure.message.lower()


async def test_a_server_that_speaks_no_tls_is_unsent(make_client: MakeClient, wire: Wire) -> None:
    """R-046: TLS failure of another kind."""
    failure = await failure_of_send(make_client(wire.url.replace("http:", "https:")))

    assert (failure.reach, failure.status) == ("unsent", None)
    assert wire.seen == []


async def test_a_request_that_upstream_would_refuse_for_its_size_is_not_sent(
    client: UpstreamClient, wire: Wire
) -> None:
    """R-208: as if upstream had said 413."""
    failure = await failure_of_send(client, b"x" * client_module.SEND_BYTES_MAX)

    assert (failure.reach, failure.status) == ("refused", 413)
    assert wire.seen == []


async def test_cancelling_a_send_passes_through_and_closes_its_connection(
    client: UpstreamClient, wire: Wire
) -> None:
    wire.on("POST", EVENTS, hang, reply())
    task = asyncio.create_task(client.send("sesn_1", RESULT))
    async with asyncio.timeout(WAIT_S):
        await wire.arrived.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wire.gone.wait()
        await client.send("sesn_1", RESULT)

    assert wire.seen[0].peer != wire.seen[1].peer


# ---- messages


@pytest.mark.parametrize(
    ("body", "message"),
    [
        pytest.param(b'{"error":{"message":"no"}}', "no", id="message"),
        pytest.param(b'{"error":"no"}', "no", id="text"),
        pytest.param(b'{"detail":"no"}', '{"detail":"no"}', id="other JSON"),
        pytest.param(b"<h1>no</h1>", "<h1>no</h1>", id="HTML"),
        pytest.param(b'{"error":{"message":""}}', '{"error":{"message":""}}', id="empty message"),
        pytest.param(b"", "", id="nothing"),
        pytest.param(b"a\xffb\x00c\r\nd", "a\ufffdb c d", id="unprintable"),
        pytest.param(b'{"error":{"message":"a\\ud800b"}}', "a b", id="lone surrogate"),
        pytest.param(b"[" * 100_000, "[" * MESSAGE_CHARS_MAX, id="deep"),
        pytest.param(b"x" * 1_000_000, "x" * MESSAGE_CHARS_MAX, id="long"),
    ],
)
async def test_a_message_is_upstream_s_own_and_short(
    client: UpstreamClient, wire: Wire, body: bytes, message: str
) -> None:
    """R-009: the upstream message is kept, as text that can be stored."""
    wire.on("POST", EVENTS, reply(400, body))

    assert message == (await failure_of_send(client)).message


async def test_secrets_are_in_no_message_repr_or_traceback(make_client: MakeClient, wire: Wire) -> None:
    gateway_secret = "gateway-secret-987654"
    client = make_client(extra_headers={"cf-access-client-secret": gateway_secret})
    echo = f"bad key {API_KEY.secret} and {gateway_secret}"
    wire.on("POST", EVENTS, reply(401, {"error": {"message": echo}}), reply(401, echo.encode()), cut)
    texts = [repr(API_KEY), str(API_KEY), repr(client)]

    for _ in range(3):
        with pytest.raises(UpstreamError) as caught:
            await client.send("sesn_1", RESULT)
        error: BaseException | None = caught.value
        texts += traceback.format_exception(error)
        while error is not None:
            texts += [str(error), repr(error)]
            error = error.__cause__ or error.__context__

    for text in texts:
        assert API_KEY.secret not in text
        assert gateway_secret not in text


async def test_an_unreadable_answer_does_not_show_the_request_s_headers(make_client: MakeClient) -> None:
    async with serve_bytes(b"HTTP/9 nonsense\r\n\r\n") as authority:
        with pytest.raises(UpstreamError) as caught:
            await make_client(f"http://{authority}").send("sesn_1", RESULT)

    assert caught.value.__cause__ is caught.value.__context__ is None


# ---- retrieve


@pytest.mark.parametrize(
    ("session", "is_over"),
    [
        pytest.param({"status": "terminated"}, True, id="R-011 terminated"),
        pytest.param({"status": "idle", "archived_at": "2026-10-29T14:00:00Z"}, True, id="R-011 archived"),
        pytest.param({"status": "running", "archived_at": None}, False, id="R-011 running"),
        pytest.param({"status": "brand_new"}, False, id="R-011 unknown status"),
        pytest.param({}, False, id="R-011 no status"),
    ],
)
async def test_a_session_is_over_when_it_says_so(
    client: UpstreamClient, wire: Wire, session: dict[str, object], is_over: bool
) -> None:
    """R-011: terminated, or archived."""
    wire.on("GET", SESSION, reply(body=session))

    assert SessionFacts(is_over=is_over) == await client.retrieve("sesn_1")


@pytest.mark.parametrize(
    ("told", "at"), [("1970-01-01T00:01:00.5Z", 60.5), ("soon", None), (7, None), (None, None)]
)
async def test_when_a_session_was_created_is_told_if_it_can_be_read(
    client: UpstreamClient, wire: Wire, told: object, at: float | None
) -> None:
    wire.on("GET", SESSION, reply(body={"created_at": told}))

    assert at == (await client.retrieve("sesn_1")).created_at


@pytest.mark.parametrize("tools", [[], [{"type": "custom", "name": "echo"}]])
async def test_the_agent_s_tools_are_told(client: UpstreamClient, wire: Wire, tools: list[object]) -> None:
    wire.on("GET", SESSION, reply(body={"agent": {"tools": tools}}))

    assert tools == (await client.retrieve("sesn_1")).agent_tools


@pytest.mark.parametrize("agent", [None, "agent_1", [], {}, {"tools": None}, {"tools": {"a": 1}}])
async def test_tools_that_cannot_be_read_are_unknown(
    client: UpstreamClient, wire: Wire, agent: object
) -> None:
    wire.on("GET", SESSION, reply(body={"agent": agent}))

    assert (await client.retrieve("sesn_1")).agent_tools is None


@pytest.mark.parametrize(
    ("script", "environment"),
    [
        (reply(body={"config": {"type": "cloud"}}), "cloud"),
        (reply(body={"config": {"type": "self_hosted"}}), "self_hosted"),
        (reply(body={"config": {"type": "lunar"}}), None),
        (reply(body={"config": {"type": ["cloud"]}}), None),
        (reply(body={"config": None}), None),
        (reply(body=[]), None),
        (reply(404), None),
        (reply(500), None),
        (cut, None),
        (hang, None),
    ],
    ids=["cloud", "self_hosted", "unknown", "odd", "null", "array", "404", "500", "cut", "timeout"],
)
async def test_the_environment_is_told_if_it_is_known(
    make_client: MakeClient, wire: Wire, script: Script, environment: str | None
) -> None:
    """R-012 and its like: failing to read the environment fails nothing else."""
    wire.on("GET", SESSION, reply(body={"status": "idle", "environment_id": "env_1"}))
    wire.on("GET", "/v1/environments/env_1", script)

    facts = await make_client(timeouts=Timeouts(retrieve_s=0.2)).retrieve("sesn_1")

    assert environment == facts.environment
    assert len(wire.asked("/v1/environments/env_1")) == 1


@pytest.mark.parametrize("environment_id", [None, "", "..", 7])
async def test_an_environment_without_a_usable_id_is_not_asked_for(
    client: UpstreamClient, wire: Wire, environment_id: object
) -> None:
    wire.on("GET", SESSION, reply(body={"environment_id": environment_id}))

    assert (await client.retrieve("sesn_1")).environment is None
    assert len(wire.seen) == 1


@pytest.mark.parametrize(
    ("script", "status"),
    [
        pytest.param(reply(503), 503, id="R-012 503"),
        pytest.param(reply(403), 403, id="R-012 403"),
        pytest.param(reply(404), 404, id="R-012 404"),
        pytest.param(reply(200, b"nonsense"), 200, id="R-012 no JSON"),
        pytest.param(reply(200, b"[]"), 200, id="R-012 no object"),
        pytest.param(reply(200, b"[" * 100_000), 200, id="R-012 deep"),
        pytest.param(cut, None, id="R-012 cut"),
        pytest.param(hang, None, id="R-012 timeout"),
    ],
)
async def test_a_session_that_cannot_be_read_is_a_failure(
    make_client: MakeClient, wire: Wire, script: Script, status: int | None
) -> None:
    """R-012: which decides nothing by itself."""
    wire.on("GET", SESSION, script)

    with pytest.raises(UpstreamError) as caught:
        await make_client(timeouts=Timeouts(retrieve_s=0.2)).retrieve("sesn_1")

    assert status == caught.value.failure.status
    assert len(wire.seen) == 1


async def test_odd_characters_in_a_session_do_not_hide_it(client: UpstreamClient, wire: Wire) -> None:
    wire.on("GET", SESSION, reply(body=b'{"status":"terminated","title":"\\ud800 \xff"}'))

    assert (await client.retrieve("sesn_1")).is_over


async def test_a_pool_holds_as_many_connections_as_it_was_told() -> None:
    pool = connector(7)
    try:
        assert pool.limit == 7
    finally:
        await pool.close()


def test_a_failure_reads_well() -> None:
    error = UpstreamError(Failure("refused", 400, "no"))

    assert str(error) == "refused, status 400: no"
    assert json.dumps(str(error))
