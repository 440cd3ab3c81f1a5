from __future__ import annotations

import asyncio
import re
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from sqlalchemy import func, select, text, update
from sqlalchemy.ext.asyncio import AsyncEngine

from app.api.bridge import Bridge
from app.console.access import caller_of
from app.console.inbox import CARDS_MAX
from app.console.sign_in import FAILURES_PER_MIN, sign_in_link
from app.core.calls import digest
from app.store import keys, passes, tables
from tests.console.service import ADMIN_KEY, Site, serving
from tests.store.rows import add_attachment, add_call

pytestmark = pytest.mark.anyio

PAGES = ["/console", "/console/sessions", "/console/sessions/sesn_1", "/console/tools", "/console/audit"]


async def hold(site: Site, *call_ids: str, tenant: str = "default") -> None:
    async with site.engine.begin() as connection:
        await add_attachment(connection, tenant)
        for call_id in call_ids:
            await add_call(connection, call_id, tenant)


def form_token(page: httpx.Response) -> str:
    found = re.search(r'name="form_token" value="(\w+)"', page.text)
    assert found, page.text
    return found[1]


def decision(call_id: str, **more: str) -> dict[str, str]:
    body = {"session_id": "sesn_1", "call_id": call_id, "result": "allow"}
    return body | {"input_digest": digest(b'{"command": "ls"}'), "tool_version": "0"} | more


async def decisions(site: Site) -> int:
    async with site.engine.connect() as connection:
        return await connection.scalar(select(func.count()).select_from(tables.decisions)) or 0


async def test_no_page_is_shown_to_whoever_is_not_signed_in(site: Site) -> None:
    visitor = await site.visitor()
    for path in PAGES:
        answer = await visitor.get(path)
        assert (303, f"/console/sign-in?next={path}") == (answer.status_code, answer.headers["location"])
        live = await visitor.get(path, headers={"x-console-live": "1"})
        assert 401 == live.status_code
    posted = await visitor.post("/console/decisions", data=decision("tu_1"))
    assert 303 == posted.status_code


async def test_every_page_has_the_headers_that_keep_it_to_itself(site: Site) -> None:
    visitor = await site.visitor(await site.key("Ana"))
    outside = await site.visitor()
    answers = [await visitor.get(path) for path in PAGES]
    answers += [await outside.get("/console"), await outside.get("/console/sign-in")]
    answers += [await outside.get("/console/static/console.js"), await outside.post("/console/sign-in")]
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        for part in (
            "default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self'",
            "connect-src 'self'", "form-action 'self'", "frame-ancestors 'none'", "base-uri 'none'",
        ):  # fmt: skip
            assert part in policy.split("; ")
        assert "unsafe" not in policy
        assert "nosniff" == answer.headers["x-content-type-options"]
        assert "same-origin" == answer.headers["referrer-policy"]
        assert answer.headers["cache-control"] in ("no-store", "no-cache")
        if "html" in answer.headers.get("content-type", ""):
            assert "no-store" == answer.headers["cache-control"]
            assert not re.search(
                r"<script(?! src=\"/console/static/)|\son\w+=|<style|\sstyle=|javascript:", answer.text
            )


async def test_a_link_signs_in_once_and_looking_at_it_does_not_count(site: Site) -> None:
    link = await site.link()
    token = link.partition("link=")[2]
    one, other = await site.visitor(), await site.visitor()
    for visitor in (one, other, one):
        page = await visitor.get(link)
        assert 200 == page.status_code
        assert "This link signs you in once" in page.text
    answers = await asyncio.gather(*(v.post("/console/sign-in", data={"link": token}) for v in (one, other)))
    assert [303, 401] == sorted(answer.status_code for answer in answers)
    winner = one if answers[0].status_code == 303 else other
    assert 200 == (await winner.get("/console")).status_code


async def test_a_link_and_a_session_end_with_their_time(site: Site) -> None:
    token = (await site.link()).partition("link=")[2]
    visitor = await site.visitor(await site.key("Ana"))
    assert 200 == (await visitor.get("/console")).status_code
    await _age(site.engine)
    assert 303 == (await visitor.get("/console")).status_code
    assert 401 == (await visitor.post("/console/sign-in", data={"link": token})).status_code


async def test_a_pass_is_stored_as_a_hash_and_expired_ones_go(site: Site) -> None:
    token = (await site.link()).partition("link=")[2]
    await _age(site.engine)
    await site.visitor(await site.key("Ana"))
    async with site.engine.connect() as connection:
        rows = (await connection.execute(select(tables.browser_passes))).all()
    assert ["session"] == [row.kind for row in rows]
    assert token not in repr(rows)


async def test_a_revoked_key_ends_its_sessions(site: Site) -> None:
    async with site.engine.begin() as connection:
        key, words = await keys.create(connection, "default", "Ana", ["confirm"])
    visitor = await site.visitor(words)
    assert 200 == (await visitor.get("/console")).status_code
    async with site.engine.begin() as connection:
        await keys.revoke(connection, "default", key.id)
    assert 303 == (await visitor.get("/console")).status_code
    assert 401 == (await visitor.post("/console/sign-in", data={"key": words})).status_code


async def test_a_key_that_expires_ends_its_sessions(site: Site) -> None:
    async with site.engine.begin() as connection:
        _, words = await keys.create(connection, "default", "Ana", ["confirm"], expires_in_s=60)
    visitor = await site.visitor(words)
    assert 200 == (await visitor.get("/console")).status_code
    async with site.engine.begin() as connection:
        await connection.execute(text("update keys set expires_at = now()"))
    assert 303 == (await visitor.get("/console")).status_code
    again = await visitor.post("/console/sign-in", data={"key": words})
    assert 401 == again.status_code
    assert "This key has expired." in again.text


async def test_the_operators_sessions_end_when_the_operators_key_changes(site: Site) -> None:
    visitor = await site.visitor(ADMIN_KEY)
    async with site.engine.connect() as connection:
        found = await passes.find(connection, "session", visitor.cookies["bascule"])
    assert found is not None
    assert caller_of(site.bridge, found) is not None
    settings = site.bridge.settings.model_copy(update={"admin_key": None})
    changed = Bridge(settings, site.engine, site.bridge.secrets, site.bridge.wakeups, lambda _: None)
    assert caller_of(changed, found) is None


async def test_signing_out_ends_the_session_in_the_database_too(site: Site) -> None:
    visitor = await site.visitor(await site.key("Ana"))
    token = visitor.cookies["bascule"]
    body = {"form_token": form_token(await visitor.get("/console"))}
    assert 303 == (await visitor.post("/console/sign-out", data=body)).status_code
    assert "bascule" not in visitor.cookies
    visitor.cookies.set("bascule", token)
    assert 303 == (await visitor.get("/console")).status_code


async def test_the_cookie_is_for_this_site_alone(engine: AsyncEngine, migrated_url: str, site: Site) -> None:
    visitor = await site.visitor()
    plain = await visitor.post("/console/sign-in", data={"key": ADMIN_KEY})
    assert re.fullmatch(r"bascule=[\w-]{43}; HttpOnly; Path=/; SameSite=strict", plain.headers["set-cookie"])
    async with serving(engine, migrated_url, public_url="https://bridge.example") as public:
        visitor = await public.visitor()
        origin = {"origin": "https://bridge.example"}
        secure = await visitor.post("/console/sign-in", data={"key": ADMIN_KEY}, headers=origin)
        assert re.fullmatch(
            r"__Host-bascule=[\w-]{43}; HttpOnly; Path=/; SameSite=strict; Secure",
            secure.headers["set-cookie"],
        )


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "", None, "http://127.0.0.1:1", "file://"]
)
async def test_a_form_from_elsewhere_does_nothing(site: Site, origin: str | None) -> None:
    await hold(site, "tu_1")
    visitor = await site.visitor(await site.key("Ana"))
    token = form_token(await visitor.get("/console"))
    del visitor.headers["origin"]
    headers = {} if origin is None else {"origin": origin}
    for path, body in {
        "/console/decisions": decision("tu_1", form_token=token),
        "/console/sign-out": {"form_token": token},
        "/console/sign-in": {"key": ADMIN_KEY},
    }.items():
        answer = await visitor.post(path, data=body, headers=headers)
        assert 403 == answer.status_code
        assert "set-cookie" not in answer.headers
    assert 0 == await decisions(site)
    assert 200 == (await visitor.get("/console")).status_code


@pytest.mark.parametrize("token", ["", "0" * 64, None, "ü"])
async def test_a_form_without_the_token_of_this_sign_in_does_nothing(site: Site, token: str | None) -> None:
    await hold(site, "tu_1")
    visitor = await site.visitor(await site.key("Ana"))
    body = decision("tu_1") | ({} if token is None else {"form_token": token})
    assert 403 == (await visitor.post("/console/decisions", data=body)).status_code
    other = await site.visitor(await site.key("Bo"))
    theirs = form_token(await other.get("/console"))
    answer = await visitor.post("/console/decisions", data=decision("tu_1", form_token=theirs))
    assert 403 == answer.status_code
    assert 0 == await decisions(site)


async def test_a_key_that_may_not_confirm_does_not_sign_in(site: Site) -> None:
    visitor = await site.visitor()
    key = await site.key("Reader", "read", "tools", "sessions", "admin")
    answer = await visitor.post("/console/sign-in", data={"key": key})
    assert 401 == answer.status_code
    assert "lacks the scope confirm" in answer.text
    assert key not in answer.text


async def test_a_key_sees_only_the_pages_of_its_scopes(site: Site) -> None:
    await hold(site, "tu_1")
    visitor = await site.visitor(await site.key("Approver", "confirm"))
    inbox = await visitor.get("/console")
    assert 200 == inbox.status_code
    assert 'href="/console/sessions' not in inbox.text.replace("data-address", "")
    assert 'href="/console/tools' not in inbox.text
    for path in ("/console/sessions", "/console/sessions/sesn_1", "/console/tools", "/console/tools/bash"):
        assert 403 == (await visitor.get(path)).status_code


async def test_too_many_failed_sign_ins_have_to_wait(site: Site) -> None:
    visitor = await site.visitor()
    for _ in range(FAILURES_PER_MIN):
        assert 401 == (await visitor.post("/console/sign-in", data={"key": "wrong"})).status_code
    answer = await visitor.post("/console/sign-in", data={"key": ADMIN_KEY})
    assert 429 == answer.status_code
    assert 0 < int(answer.headers["retry-after"]) <= 61


@pytest.mark.parametrize(
    "where",
    ["https://evil.example", "//evil.example", "/console/..//evil.example?", "/tools", "/console\\@x", ""],
)
async def test_signing_in_never_leads_elsewhere(site: Site, where: str) -> None:
    visitor = await site.visitor()
    answer = await visitor.post("/console/sign-in", data={"key": ADMIN_KEY, "next": where})
    leads = urlsplit(str(httpx.URL(site.base).join(answer.headers["location"])))
    assert site.base == f"{leads.scheme}://{leads.netloc}"
    assert leads.path == "/console"


async def test_another_tenants_call_is_an_unknown_one(site: Site) -> None:
    """C-007: to look at and to decide."""
    await hold(site, "tu_1", tenant="a")
    visitor = await site.visitor(await site.key("Bo", tenant="b"))
    token = form_token(await visitor.get("/console"))
    assert "tu_1" not in (await visitor.get("/console")).text
    for path in ("/console/sessions/sesn_1/calls/tu_1", "/console/sessions/sesn_1"):
        assert 404 == (await visitor.get(path)).status_code
    answer = await visitor.post("/console/decisions", data=decision("tu_1", form_token=token))
    assert 404 == answer.status_code
    assert 0 == await decisions(site)


@pytest.mark.parametrize(
    "body",
    [
        {"result": "Allow"},
        {"result": ""},
        {"input_digest": ""},
        {"input_digest": "sha256:0"},
        {"tool_version": ""},
        {"tool_version": "-1"},
        {"result": "deny", "deny_message": "x" * 10_001},
        {"session_id": "\0"},
        {f"field{n}": "" for n in range(101)},
    ],
)
async def test_a_form_that_names_no_decision_decides_nothing(site: Site, body: dict[str, str]) -> None:
    await hold(site, "tu_1")
    visitor = await site.visitor(await site.key("Ana"))
    token = form_token(await visitor.get("/console"))
    answer = await visitor.post("/console/decisions", data=decision("tu_1", form_token=token) | body)
    assert (404 if "session_id" in body else 422) == answer.status_code
    assert 0 == await decisions(site)


async def test_a_decision_names_who_and_how_and_counts_once(site: Site) -> None:
    await hold(site, "tu_1")
    visitor = await site.visitor(await site.key("Ana"))
    token = form_token(await visitor.get("/console"))
    stale = decision("tu_1", form_token=token, input_digest="sha256:" + "0" * 64)
    refused = await visitor.post("/console/decisions", data=stale)
    assert 409 == refused.status_code
    assert "not the one that" in refused.text
    for _ in range(2):
        answer = await visitor.post("/console/decisions", data=decision("tu_1", form_token=token))
        assert "/console/sessions/sesn_1/calls/tu_1" == answer.headers["location"]
    contrary = await visitor.post(
        "/console/decisions", data=decision("tu_1", form_token=token, result="deny")
    )
    assert 409 == contrary.status_code
    assert "by Ana" in contrary.text
    shown: Any = (await site.http.get("/sessions/sesn_1/calls/tu_1")).json()["decision"]
    assert ("allow", "console") == (shown["result"], shown["via"])
    assert shown["by"].startswith("key_")
    assert 1 == await decisions(site)


async def test_an_unchanged_inbox_is_not_sent_again(site: Site) -> None:
    await hold(site, "tu_1")
    visitor = await site.visitor(await site.key("Ana"))
    for path in ("/console", "/console/sessions", "/console/sessions/sesn_1"):
        tag = {"if-none-match": (await visitor.get(path)).headers["etag"]}
        assert 304 == (await visitor.get(path, headers=tag)).status_code
    async with site.engine.begin() as connection:
        await add_call(connection, "tu_2")
    assert 200 == (await visitor.get("/console", headers=tag)).status_code


async def test_a_card_shows_what_was_decided_before_so_that_every_character_can_be_seen(site: Site) -> None:
    """The reason and the names are other people's text."""
    await hold(site, "tu_1", "tu_2", "tu_3")
    visitor = await site.visitor(await site.key("<b>Ana\u202e</b>"))
    token = form_token(await visitor.get("/console"))
    for call_id, more in (("tu_1", {}), ("tu_2", {"result": "deny", "deny_message": "No <i>way</i>\u202e"})):
        answer = await visitor.post("/console/decisions", data=decision(call_id, form_token=token) | more)
        assert 303 == answer.status_code
    shown = " ".join((await visitor.get("/console")).text.split())
    assert "The last 2 of this tool: 1 allowed, 1 denied (<q>No &lt;i&gt;way&lt;/i&gt;" in shown
    assert ", the last by &lt;b&gt;Ana" in shown
    assert "The very same input was denied by &lt;b&gt;Ana" in shown
    assert "\u202e" not in shown.partition("<article ")[2]


async def test_a_long_inbox_says_that_more_wait(site: Site) -> None:
    await hold(site, *(f"tu_{n}" for n in range(CARDS_MAX + 5)))
    visitor = await site.visitor(await site.key("Ana"))
    shown = (await visitor.get("/console")).text
    assert CARDS_MAX == shown.count("<article ")
    assert f"The oldest {CARDS_MAX} are shown; the next ones appear as these are decided." in shown


async def _age(engine: AsyncEngine) -> None:
    table = tables.browser_passes
    async with engine.begin() as connection:
        await connection.execute(update(table).values(expires_at=func.now() - text("interval '1 second'")))


async def test_the_printed_link_leads_to_the_public_address(site: Site) -> None:
    assert (await sign_in_link(site.bridge, "https://b.example")).startswith(
        "https://b.example/console/sign-in?link="
    )
