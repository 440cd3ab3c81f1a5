"""The life of a service among neighbours that fail it, with canaries in all that it is given."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from aiohttp import web
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.simulator.server import Server
from app.simulator.switches import Fault
from tests.runner.collector import Collector
from tests.runner.receiver import Delivery, Receiver
from tests.runner.scripts import turn
from tests.runner.service import POLL_S, Service
from tests.runner.subscriber import Subscriber
from tests.stories.canaries import Canaries


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


async def _registered(service: Service, life: Life, hostile_url: str) -> None:
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
            "upstream_url": f"{hostile_url}/{name}",
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
async def hostile() -> AsyncIterator[str]:
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


async def first_life(service: Service, life: Life, hostile_url: str) -> tuple[str, str]:
    """Until the crash: everything is set up, and all but one call is decided. Returns what waits."""
    http, plant = service.http, life.canaries.plant
    await _in_wrong_places(service, life.wrong)
    await _registered(service, life, hostile_url)
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


async def second_life(service: Service, life: Life, session_id: str, held: str, output: Path) -> None:
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
