"""Scripts for the simulator, replies of the receiver, and facts that several tests wait for."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from app.simulator.server import Server
from tests.runner.receiver import Delivery, echo
from tests.runner.service import Service


def turn(*steps: dict[str, Any], environment: str = "self_hosted") -> dict[str, Any]:
    """A scenario of one turn that ends well."""
    return {"name": "t", "environment": environment, "turns": [{"steps": [*steps, {"do": "end"}]}]}


def custom(*names: str, **values: Any) -> dict[str, Any]:
    """A step of parallel custom calls of these tools."""
    calls = [{"tool": "custom", "name": name, "input": {"n": n}, **values} for n, name in enumerate(names)]
    return {"do": "call", "calls": calls}


def bash() -> dict[str, Any]:
    """A step of one built-in call that asks."""
    asks = {"tool": "builtin", "name": "bash", "input": {"command": "ls"}, "permission": "ask"}
    return {"do": "call", "calls": [asks]}


class Gate:
    """A reply that waits until it is opened; `inside` are waiting now, `peak` were at most."""

    def __init__(self) -> None:
        self.inside = self.peak = 0
        self._opened = asyncio.Event()

    async def __call__(self, delivery: Delivery) -> web.StreamResponse:
        self.inside += 1
        self.peak = max(self.peak, self.inside)
        try:
            await self._opened.wait()
        finally:
            self.inside -= 1
        return await echo(delivery)

    def open(self) -> None:
        self._opened.set()


async def live(service: Service, session_id: str, **body: Any) -> None:
    """Attach the session and wait until history has been read on an open stream."""
    await service.attach(session_id, **body)
    await service.until(f"/sessions/{session_id}", lambda shown: shown["status"] == "live")
    await listed(service.upstream, session_id)


async def listed(upstream: Server, session_id: str, count: int = 1) -> None:
    """Wait until so many lists of the session's events were answered."""
    await upstream.until(
        lambda: len([r for r in asked(upstream, session_id, "list") if r.status == 200]) >= count
    )


def asked(upstream: Server, session_id: str, *endpoints: str) -> list[Any]:
    """The requests that came for the session, in order."""
    requests = upstream.world.requests
    return [one for one in requests if one.session_id == session_id and one.endpoint in endpoints]


async def came(upstream: Server, session_id: str, endpoint: str) -> Any:
    """Wait until such a request came, whether or not it was answered; return the last one."""
    async with asyncio.timeout(10):
        while not (found := asked(upstream, session_id, endpoint)):  # noqa: ASYNC110 - a fault keeps quiet
            await asyncio.sleep(0.01)
    return found[-1]


async def in_state(service: Service, session_id: str, *states: str, limit_s: float = 15.0) -> list[Any]:
    """Wait until the session's calls are in just these states, in order; return them."""

    def fact(shown: Any) -> bool:
        return [call["state"] for call in shown["data"]] == list(states)

    path = f"/sessions/{session_id}/calls?limit=200"
    shown = await service.until(path, fact, limit_s=limit_s)
    return list(shown["data"])


async def ended(service: Service, session_id: str, *, limit_s: float = 15.0) -> tuple[str, str | None]:
    """Wait until the attachment is over; return its status and reason."""
    over = ("ended", "detached")
    shown = await service.until(
        f"/sessions/{session_id}", lambda shown: shown["status"] in over, limit_s=limit_s
    )
    return shown["status"], shown["end_reason"]


def results(upstream: Server, session_id: str) -> dict[str, list[dict[str, Any]]]:
    """What upstream accepted as results, by call."""
    return upstream.world.answers(session_id)
