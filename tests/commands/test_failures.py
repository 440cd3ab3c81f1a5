"""What goes wrong is a sentence on standard error and an exit code, and never a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from app.commands.client import Exit
from tests.api.test_serve import command
from tests.commands.conftest import Terminal
from tests.console.service import Site
from tests.store.rows import add_attachment, add_call

pytestmark = pytest.mark.anyio


async def test_what_is_missing_is_told_with_its_code(terminal: Terminal) -> None:
    done = await terminal.run("tools", "show", "nothing", "--json")
    assert (done.exit_code, done.stdout) == (Exit.NOT_FOUND, "")
    assert done.stderr.startswith("tool_not_found: No tool of that name is registered;")


async def test_each_malformed_member_is_named(terminal: Terminal) -> None:
    done = await terminal.run("tools", "put", "t", "https://tools.example/", "--set", "timeout_s=soon")
    assert done.exit_code == Exit.FAILED
    first, second = done.stderr.splitlines()
    assert first.startswith("invalid_request: ")
    assert second.startswith("  timeout_s: ")


async def test_a_key_that_may_not_is_told_apart_from_one_that_is_wrong(
    terminal: Terminal, site: Site
) -> None:
    reader = await site.key("reader", "read")
    done = await terminal.run("tools", "list", BASCULE_KEY=reader)
    assert (done.exit_code, done.stderr.partition(":")[0]) == (Exit.FORBIDDEN, "forbidden")
    done = await terminal.run("tools", "list", BASCULE_KEY="bsk_wrong")
    assert (done.exit_code, done.stderr.partition(":")[0]) == (Exit.FORBIDDEN, "unauthenticated")
    done = await terminal.run("tools", "list", BASCULE_KEY="bsk_\u00fc")
    assert (done.exit_code, len(done.stderr.splitlines())) == (Exit.USAGE, 1)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "http://[::1"])
async def test_a_service_that_is_not_there_is_told(terminal: Terminal, url: str) -> None:
    done = await terminal.run("sessions", "list", "--url", url)
    assert done.exit_code == Exit.UNREACHED
    assert done.stderr.startswith(f"No answer from {url}: ")
    assert len(done.stderr.splitlines()) == 1


async def test_another_server_is_told(terminal: Terminal, site: Site) -> None:
    done = await terminal.run("sessions", "list", "--url", f"{site.base}/console")
    assert done.exit_code == Exit.UNREACHED
    assert "not as the service does" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("tools", "put", "t", "https://tools.example/", "--set", "gate"),
        ("tools", "put", "t", "https://tools.example/", "--set", "headers=@/nowhere"),
        ("tools", "test", "t", "--input", '{"n": NaN}'),
        ("sessions", "send", "sesn_1", "\udcff"),
        ("tools", "test", "t", "--input", "{"),
        ("tools", "test", "t", "--input", "@/nowhere"),
        ("tools", "show", ".."),
        ("tools", "list", "--limit", "0"),
        ("tools",),
        ("tolls",),
    ],
)
async def test_wrong_usage_asks_nobody(terminal: Terminal, words: tuple[str, ...]) -> None:
    done = (
        await terminal.run(*words, "--url", "http://127.0.0.1:1")
        if len(words) > 1
        else (await terminal.run(*words))
    )
    assert done.exit_code == Exit.USAGE
    assert "Traceback" not in done.output


async def test_what_is_typed_as_json_is_sent_digit_for_digit(
    idle: Terminal, engine: AsyncEngine, tmp_path: Path
) -> None:
    written = '{"amount": 1.10, "big": 12345678901234567890123}'
    (tmp_path / "input.json").write_text(written)
    async with engine.begin() as connection:
        await add_attachment(connection)
        for call in ("sevt_1", "sevt_2"):
            await add_call(
                connection, call, kind="custom", tool="pay", gate_by="tool", gate_reason="tool_asks"
            )
    for call, given in (("sevt_1", written), ("sevt_2", f"@{tmp_path / 'input.json'}")):
        allowed = await idle.run("confirmations", "allow", "sesn_1", call, "--input", given, "--json")
        assert allowed.exit_code == 0, allowed.output
        edited = json.loads(allowed.stdout, parse_float=str)["edited_input"]
        assert edited == {"amount": "1.10", "big": 12345678901234567890123}


async def test_a_value_is_json_a_file_or_text(terminal: Terminal, tmp_path: Path) -> None:
    (tmp_path / "headers.json").write_text('{"authorization": "Bearer secret"}')
    file = f"headers=@{tmp_path / 'headers.json'}"
    words = ("--set", file, "--set", "description=Looks up", "--set", "concurrency=2", "--json")
    done = await terminal.run("tools", "put", "t", "https://tools.example/", *words)
    shown = json.loads(done.stdout)
    assert (shown["header_names"], shown["description"], shown["concurrency"]) == (
        ["authorization"],
        "Looks up",
        2,
    )


def test_a_terminal_of_another_encoding_gets_escapes() -> None:
    said = command("doctor", BASCULE_PORT="x", PYTHONIOENCODING="ascii")
    assert (said.returncode, said.stderr) == (Exit.FAILED, "")
    assert "\\u2192 Correct it" in said.stdout


async def test_a_list_goes_on_over_pages_and_says_when_it_was_cut_short(
    idle: Terminal, engine: AsyncEngine
) -> None:
    async with engine.begin() as connection:
        for n in range(205):
            await add_attachment(connection, session_id=f"sesn_{n}")
    done = await idle.run("sessions", "list", "--json")
    page = json.loads(done.stdout)
    assert (len(page["data"]), page["next_cursor"]) == (205, None)
    done = await idle.run("sessions", "list", "--json", "--limit", "203")
    page = json.loads(done.stdout)
    assert (len(page["data"]), page["next_cursor"] is None) == (203, False)
    assert "more than these 203" in done.stderr


async def test_what_an_agent_wrote_is_shown_digit_for_digit_and_obeyed_by_no_terminal(
    idle: Terminal, engine: AsyncEngine
) -> None:
    hostile = '{"amount": 1.10, "big": 12345678901234567890123, "say": "a\\u001b[2J\u202eb\u009bc"}'
    async with engine.begin() as connection:
        await add_attachment(connection)
        await add_call(connection, "sevt_1", input=hostile)
    for words in (["confirmations", "list"], ["confirmations", "list", "--json"]):
        done = await idle.run(*words)
        assert done.exit_code == 0
        assert "1.10" in done.stdout
        assert "12345678901234567890123" in done.stdout
        assert not set("\u001b\u202e\u009b") & set(done.stdout)
        assert "a\\u001b[2J\\u202eb\\u009bc" in done.stdout
    assert json.loads(done.stdout)["data"][0]["input"]["say"] == "a\u001b[2J\u202eb\u009bc"


def test_without_a_key_the_one_of_the_data_directory_serves(tmp_path: Path) -> None:
    environ = {"BASCULE_DATA_DIR": str(tmp_path), "BASCULE_URL": "http://127.0.0.1:1"}
    done = command("keys", "list", **environ)
    assert done.returncode == Exit.FORBIDDEN
    assert str(tmp_path / "admin.key") in done.stderr
    (tmp_path / "admin.key").write_text("0123456789abcdef\n")
    assert command("keys", "list", **environ).returncode == Exit.UNREACHED
