"""`bascule demo`: the service against the built-in simulator, with a tool and a session to watch.

Everything is real but the agent: an embedded PostgreSQL, the service on its port, a tool behind a signed
webhook. The terminal says what happens and what to do next.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from ipaddress import ip_network
from typing import Any, Final

import httpx
import uvloop
from aiohttp import web
from pydantic import SecretStr

from app import serve
from app.console.sign_in import sign_in_link
from app.logs import set_up_logs
from app.main import build_bridge, create_app
from app.settings import ADMIN_KEY_FILE, Settings, SettingsError, read_settings
from app.simulator.server import running
from app.simulator.world import World

POLL_S: Final = 0.15
REQUEST_LIMIT_S: Final = 10.0
TOOL_WAIT_S: Final = 3_600.0
"""For so long the agent waits for a tool of the reader's own to be started."""
LOOPBACK: Final = "127.0.0.1"
_PORTS: Final = {"http": 80, "https": 443}


def main(tool_url: str | None = None) -> None:
    """Run the demo until Ctrl-C or SIGTERM.

    With a `tool_url` the calls of `lookup_order` go to that webhook, the reader's own; its secret is printed.
    """
    try:
        settings = read_settings(os.environ)
    except SettingsError as error:
        sys.exit(str(error))
    changes: dict[str, Any] = {"data_dir": settings.data_dir / "demo", "log_level": "error"}
    changes |= {"host": LOOPBACK, "anthropic_api_key": SecretStr("the-simulator-takes-any")}
    changes["webhook_allow"] = (*settings.webhook_allow, ip_network("127.0.0.0/8"))
    settings = settings.model_copy(update=changes)
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    set_up_logs(settings)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    say("Starting PostgreSQL, the service, a simulated agent and a tool …")
    cluster = settings.data_dir / "postgres"
    is_new = not os.path.lexists(cluster)
    try:
        with (
            contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError),
            serve.database(settings, os.environ) as url,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            if is_new and cluster.is_symlink():
                say(f"The database lives in {cluster.resolve()}: its user may not enter {cluster.parent}.")
                say("(`make clean` removes it together with .bascule.)")
            runner.run(_until_sigterm(_demo(serve.with_stored_keys(settings), url, tool_url)))
    except serve.CannotServeError as error:
        sys.exit(str(error))


def say(text: str = "") -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


async def _until_sigterm(work: Coroutine[Any, Any, None]) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.create_task(work)
    signal.signal(signal.SIGTERM, lambda *_: loop.call_soon_threadsafe(task.cancel))
    try:
        await task
    finally:
        # What is left is to stop the database, which must not stay behind.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


async def _demo(settings: Settings, database_url: str, tool_url: str | None) -> None:
    # Ids must not repeat: the database remembers the sessions of the last demo.
    async with running(World(seed=time.time_ns())) as upstream, _tool() as tool:
        settings = settings.model_copy(update={"upstream_url": upstream.url})
        await serve.migrate_database(settings, database_url)
        bridge = build_bridge(settings, database_url)
        async with serve.listening(settings, create_app(bridge)) as base:
            assert settings.admin_key is not None
            key = settings.admin_key.get_secret_value()
            async with httpx.AsyncClient(
                base_url=base,
                headers={"authorization": f"Bearer {key}"},
                timeout=REQUEST_LIMIT_S,
                trust_env=False,
            ) as http:
                session_id = upstream.create("demo").id
                story = _Story(http, base, session_id, str((settings.data_dir / ADMIN_KEY_FILE).resolve()))
                say(f"The console, where calls are decided: {await sign_in_link(bridge, base)}")
                say("(The link signs you in once, within 15 minutes.)")
                await story.begin(tool, own=tool_url)
                upstream.say(session_id, "Where is order A-1042? Refund it if it is late.")
                await story.follow()
                await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def _tool() -> AsyncIterator[str]:
    """A tool, as a team would write it in its own language; see examples/ for whole ones."""

    async def answer(request: web.Request) -> web.Response:
        data = (await request.json())["data"]
        if data["tool"] == "lookup_order":
            return web.json_response({"content": "order A-1042 is 9 days late; 49.90 EUR were paid."})
        return web.json_response({"content": "refunded 49.90 EUR."})

    app = web.Application()
    app.router.add_post("/tool", answer)
    site_runner = web.AppRunner(app)
    await site_runner.setup()
    await web.TCPSite(site_runner, LOOPBACK, 0).start()
    try:
        yield f"http://{LOOPBACK}:{site_runner.addresses[0][1]}/tool"
    finally:
        await site_runner.cleanup()


@dataclass
class _Story:
    """Tells a session as it goes on, from nothing but the service's own API."""

    http: httpx.AsyncClient
    base: str
    session_id: str
    key_file: str
    told: dict[str, str] = field(default_factory=dict)

    async def begin(self, tool: str, own: str | None) -> None:
        say(f"The service listens at {self.base} (its API is described at {self.base}/docs).")
        await self._retire()
        for name, url in (("lookup_order", own or tool), ("bash", tool)):
            await self._ask("PUT", f"/tools/{name}", {"url": url})
            say(f"The tool {name} is registered; its webhook is {url}.")
        if own:
            await self._until_started(own)
        await self._ask("POST", f"/sessions/{self.session_id}/attach", {"max_idle_s": None})
        say(f"Session {self.session_id} is attached.")
        say()
        say("A user asks the agent: Where is order A-1042? Refund it if it is late.")

    async def follow(self) -> None:
        """Tell until the agent has said its last word."""
        path = f"/sessions/{self.session_id}"
        while True:
            messages = (await self._ask("GET", f"{path}/messages"))["data"]
            for message in messages:
                self._tell_message(message)
            calls = (await self._ask("GET", f"{path}/calls"))["data"]
            for call in calls:
                self._tell_call(call)
            # Of what was told: the last message may have ended since.
            finals = [message for message in messages if message["state"] == "final"]
            if len(finals) > len(calls) > 1:
                break
            await asyncio.sleep(POLL_S)
        say()
        say("The agent is done. The whole text, as your front end would poll it:")
        say(f"  curl -s {self._header()} {self.base}{path}/text")
        say("Every call with its attempts, results and decisions:")
        say(f"  curl -s {self._header()} {self.base}{path}/calls")
        say()
        say("The service goes on; Ctrl-C stops it. The README shows how to attach a real session.")

    async def _until_started(self, url: str) -> None:
        # The secret is told once and the last demo may have registered the tool, so it gets a new one.
        rotated = await self._ask("POST", "/tools/lookup_order/rotate-secret", {"overlap_s": 0})
        say("Start it with this secret; the agent waits until it listens:\n")
        say(f"  TOOL_SECRET={rotated['signing_secret']}\n")
        to = httpx.URL(url)
        end = time.monotonic() + TOOL_WAIT_S
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(to.host, to.port or _PORTS.get(to.scheme))
                writer.close()
                return
            await asyncio.sleep(POLL_S)

    async def _retire(self) -> None:
        """Detach what an earlier demo left attached: its simulated agent is gone."""
        cursor: dict[str, str] = {}
        while True:
            page = await self._ask("GET", "/sessions", limit="200", **cursor)
            for session in page["data"]:
                if session["status"] not in ("ended", "detached"):
                    await self._ask("POST", f"/sessions/{session['session_id']}/detach")
            if page["next_cursor"] is None:
                return
            cursor = {"cursor": page["next_cursor"]}

    def _tell_message(self, message: dict[str, Any]) -> None:
        told = self.told.get(message["id"])
        text = message["text"]
        if told is None and text:
            sys.stdout.write("\nThe agent writes: ")
        new = text[len(told or "") :] if text.startswith(told or "") else ""
        sys.stdout.write(new + ("\n" if message["state"] == "final" and told != text + "\n" else ""))
        sys.stdout.flush()
        if text:
            self.told[message["id"]] = text + ("\n" if message["state"] == "final" else "")

    def _tell_call(self, call: dict[str, Any]) -> None:
        told, state = self.told.get(call["id"]), call["state"]
        name, input_ = call["tool"], json.dumps(call["input"])
        if told == state:
            return
        self.told[call["id"]] = state
        if state == "held":
            body = json.dumps({"tool_use_id": call["id"], "result": "allow"})
            say(f"\nThe agent wants to run {name} with {input_}.")
            say("Upstream asks for a person's permission, so the call is held until somebody decides.")
            say("Decide in the console, or allow it from a second terminal (or say deny there):\n")
            json_ = "-H 'content-type: application/json'"
            url = f"{self.base}/sessions/{self.session_id}/confirm"
            say(f"  curl -s {self._header()} {json_} {url} -d {shlex.quote(body)}")
            say()
        elif state == "posted":
            if call["decision"] is not None:
                say("Allowed. The verdict went upstream, then the call went to the webhook.")
            else:
                say(f"\nThe agent called {name} with {input_}. Nothing gates it, so it went to the webhook.")
            answer = "".join(block.get("text", "") for block in call["result"]["content"])
            say(f"The tool answered: {answer} The result was stored, then posted upstream once.")
        elif state == "denied":
            say("Denied. The tool was not called; the agent was told.")

    def _header(self) -> str:
        return f'-H "Authorization: Bearer $(cat {shlex.quote(self.key_file)})"'

    async def _ask(self, method: str, path: str, body: Any = None, **params: str) -> Any:
        response = await self.http.request(method, path, json=body, params=params)
        if response.is_client_error:
            problem = response.json()
            wrong = [f"{error['field']}: {error['message']}" for error in problem.get("errors", ())]
            raise serve.CannotServeError("\n".join(wrong) or problem["detail"])
        response.raise_for_status()
        return response.json()
