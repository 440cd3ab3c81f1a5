"""`bascule sessions follow`: what it prints, and how it comes back after a cut."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import typer
from aiohttp import web

from app.commands.client import Client, Exit
from app.commands.following import CUTS_MAX, Event, Printer, events
from app.simulator.server import Server
from tests.api.test_serve import ENVIRON, ROOT
from tests.commands.conftest import Terminal
from tests.console.service import Site
from tests.runner.scripts import turn

pytestmark = pytest.mark.anyio

LIMIT_S = 15.0


def frame(type_: str, data: Any, id_: int | None = None) -> bytes:
    head = f"event: {type_}\n" + ("" if id_ is None else f"id: {id_}\n")
    return f"{head}data: {json.dumps(data)}\n\n".encode()


@contextlib.asynccontextmanager
async def streaming(*connections: list[bytes]) -> AsyncIterator[tuple[str, list[str | None]]]:
    """A service whose stream is cut after each list of frames; yield its URL and the ids it was asked for."""
    asked: list[str | None] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(request.headers.get("last-event-id"))
        if len(asked) > len(connections):
            return web.json_response({"code": "session_not_found", "detail": "Gone."}, status=404)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for one in connections[len(asked) - 1]:
            await response.write(one)
        assert request.transport is not None
        request.transport.close()
        return response

    async def show(_: web.Request) -> web.Response:
        return web.json_response({"status": "live"})

    app = web.Application()
    app.router.add_get("/sessions/sesn_1/events", answer)
    app.router.add_get("/sessions/sesn_1", show)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", asked
    finally:
        await runner.cleanup()


async def told(url: str) -> tuple[list[Event], list[float]]:
    """The events up to the first one of type `over`, and the pauses that were made."""
    pauses: list[float] = []

    def read() -> list[Event]:
        found = []
        for event in events(Client(url, "key"), "/sessions/sesn_1", None, pauses.append):
            found.append(event)
            if event.type == "over":
                break
        return found

    return await asyncio.to_thread(read), pauses


async def test_a_cut_is_followed_by_the_same_stream_behind_the_last_id() -> None:
    first = [b"retry: 1000\n\n: ping\n\n", frame("call", {"n": 1}, 7), frame("message.partial", {"n": 2})]
    # In the middle of an event, of which nothing is told.
    cut = [frame("call", {"n": 3}, 8)[:-9]]
    async with streaming(first, cut, [], [frame("over", {"n": 4}, 9)]) as (url, asked):
        found, pauses = await told(url)
    assert [(one.type, one.id) for one in found] == [
        ("status", None),
        ("call", "7"),
        ("message.partial", None),
        ("over", "9"),
    ]
    assert asked == [None, "7", "7", "7"]
    assert pauses == [0.5, 1.0, 2.0]


async def test_a_service_that_renews_its_stream_is_read_on() -> None:
    renewed = [frame("call", {}, 7), frame("end", {"code": "renew", "detail": "An hour."})]
    async with streaming(renewed, [frame("over", {}, 8)]) as (url, asked):
        await told(url)
    assert asked == [None, "7"]


async def test_an_event_in_many_pieces_is_one() -> None:
    whole = frame("over", {"text": "Grüße" * 100}, 7)
    async with streaming([whole[n : n + 1] for n in range(len(whole))]) as (url, _):
        (_, found), _ = await told(url)
    assert json.loads(found.data) == {"text": "Grüße" * 100}


async def test_an_end_for_good_is_told_and_a_service_that_is_gone_is_given_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with streaming([frame("end", {"code": "unauthenticated", "detail": "Revoked."})]) as (url, _):
        with pytest.raises(typer.Exit) as ended:
            await told(url)
    assert ended.value.exit_code == Exit.FAILED
    assert "unauthenticated: Revoked." in capsys.readouterr().err
    async with streaming(*[[] for _ in range(CUTS_MAX + 1)]) as (url, asked):
        with pytest.raises(typer.Exit) as ended:
            await told(url)
    assert (ended.value.exit_code, len(asked)) == (Exit.UNREACHED, CUTS_MAX + 1)


async def test_a_service_that_was_never_there_is_not_waited_for() -> None:
    with pytest.raises(typer.Exit) as ended:
        await told("http://127.0.0.1:1")
    assert ended.value.exit_code == Exit.UNREACHED


def test_text_is_printed_as_it_grows_and_once(capsys: pytest.CaptureFixture[str]) -> None:
    def message(id_: str, text: str, type_: str = "message.partial") -> None:
        printer.print(Event(type_, None, json.dumps({"id": id_, "text": text}).encode()))

    printer = Printer()
    message("a", "Let me")
    message("a", "Let me look.")
    message("b", "Meanwhile")
    message("a", "Let me look. Found")
    message("a", "Let me look. Found it.", "message.final")
    message("b", "", "message.discarded")
    message("c", "Done.", "message.final")
    assert capsys.readouterr().out.splitlines() == [
        "Let me look.",
        "Meanwhile",
        " Found it.",
        "[the agent dropped that message]",
        "Done.",
    ]


async def test_a_session_that_is_over_is_told_and_not_waited_for(
    terminal: Terminal, site: Site, upstream: Server
) -> None:
    session_id = upstream.create(turn()).id
    assert (await terminal.run("sessions", "attach", session_id)).exit_code == 0
    assert (await terminal.run("sessions", "detach", session_id)).exit_code == 0
    done = await terminal.run("sessions", "follow", session_id)
    assert (done.exit_code, done.stdout.splitlines()) == (
        0,
        [f"[{session_id} is detached (detached); calls: none]"],
    )
    gone = await terminal.run("sessions", "attach", "sesn_unknown")
    assert gone.exit_code == Exit.FAILED
    assert "sesn_unknown is ended (session_gone)" in gone.stdout


async def test_ctrl_c_ends_following_without_a_traceback(
    terminal: Terminal, site: Site, upstream: Server
) -> None:
    session_id = upstream.create(turn({"do": "message", "text": "I look."})).id
    assert (await terminal.run("sessions", "attach", session_id, "--set", "max_idle_s=null")).exit_code == 0
    following = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "app", "sessions", "follow", session_id, "--from-start", "--json",
        cwd=ROOT, env=ENVIRON | terminal.environ,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        # As in a terminal: what a shell starts in its background, such as these tests, ignores Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert following.stdout is not None
    try:
        async with asyncio.timeout(LIMIT_S):
            upstream.say(session_id)
            while json.loads(await following.stdout.readline())["event"] != "message.final":
                pass
            following.send_signal(signal.SIGINT)
            _, errors = await following.communicate()
    finally:
        if following.returncode is None:
            following.kill()
            await following.wait()
    assert following.returncode == Exit.INTERRUPTED
    assert b"Traceback" not in errors
