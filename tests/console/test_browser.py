"""The console as a person meets it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, expect
from sqlalchemy import func, select, text, update

from app.console.text import PAGE_CHARS
from app.store import keys, tables
from tests.console.browser import open_page, sign_in
from tests.console.service import Site
from tests.store.rows import add_attachment, add_call, add_delivery, add_message

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


async def hold(site: Site, call_id: str, input_: Any = None, **values: Any) -> None:
    raw = json.dumps(input_ or {"command": f"echo {call_id}"})
    async with site.engine.begin() as connection:
        await add_call(connection, call_id, input=raw, **values)


async def attach(site: Site) -> None:
    async with site.engine.begin() as connection:
        await add_attachment(connection)
        await add_message(connection, "m_1", ["I will look first."], seq=1)


async def signed_in(browser: Browser, site: Site, name: str = "Ana", **values: Any) -> Page:
    page = await open_page(browser, site, **values)
    await sign_in(page, await site.key(name))
    return page


def card(page: Page, words: str) -> Any:
    return page.locator(".card").filter(has_text=words)


async def decided(site: Site, call_id: str) -> Any:
    return (await site.http.get(f"/sessions/sesn_1/calls/{call_id}")).json()["decision"]


async def shown_ms(site: Site, call_id: str) -> int:
    seen = select(tables.audit.c.shown_ms).where(tables.audit.c.call_id == call_id)
    async with site.engine.connect() as connection:
        return int((await connection.execute(seen)).scalar_one())


async def test_the_one_time_link_opens_the_inbox_with_a_button(browser: Browser, site: Site) -> None:
    page = await open_page(browser, site)
    await page.goto(await site.link())
    await page.get_by_role("button", name="Sign in").click()
    await expect(page.get_by_role("heading", name="Waiting for a person")).to_be_visible()
    await expect(page.get_by_text("Nothing waits.")).to_be_visible()
    assert "link=" not in page.url


async def test_a_call_appears_without_a_reload_and_is_read_out(browser: Browser, site: Site) -> None:
    await attach(site)
    page = await signed_in(browser, site)
    await page.evaluate("window.same = true")
    await hold(site, "tu_1")
    await expect(card(page, "echo tu_1")).to_be_visible()
    await expect(page.locator("#news")).to_have_text("New: Run the command echo tu_1")
    await expect(page).to_have_title("(1) Inbox · Bascule")
    await expect(card(page, "tu_1")).to_contain_text("I will look first.")
    await expect(card(page, "tu_1")).to_contain_text("policy asks a person before this tool runs")
    assert await page.evaluate("window.same")


async def test_two_keystrokes_allow_the_oldest_and_nothing_is_on_allow_before(
    browser: Browser, site: Site
) -> None:
    await attach(site)
    await hold(site, "tu_1")
    await hold(site, "tu_2")
    page = await signed_in(browser, site)
    assert await page.evaluate("document.activeElement.tagName") == "BODY"
    await page.keyboard.press("Enter")
    await page.keyboard.press("a")
    await expect(page.locator("button.allow:focus")).to_have_count(1)
    assert await decided(site, "tu_1") is None
    await page.keyboard.press("a")
    await expect(card(page, "tu_1").locator(".outcome")).to_contain_text("Allowed by Ana,")
    await expect(card(page, "tu_1")).to_contain_text("The call waits for upstream to take the decision.")
    assert {"result": "allow", "via": "console"}.items() <= (await decided(site, "tu_1")).items()
    assert await decided(site, "tu_2") is None
    assert 0 <= await shown_ms(site, "tu_1") <= 60_000
    await expect(page.locator("#count")).to_have_text("1")


async def test_j_and_k_move_and_a_third_keystroke_decides_nothing_more(browser: Browser, site: Site) -> None:
    await attach(site)
    for n in range(1, 4):
        await hold(site, f"tu_{n}")
    page = await signed_in(browser, site)
    for key in "jjk":
        await page.keyboard.press(key)
    await expect(card(page, "tu_1")).to_be_focused()
    await page.keyboard.press("j")
    for _ in range(4):
        await page.keyboard.press("a")
    await expect(card(page, "tu_2")).to_contain_text("Allowed by Ana")
    for call_id in ("tu_1", "tu_3"):
        assert await decided(site, call_id) is None


async def test_a_deny_carries_its_reason(browser: Browser, site: Site) -> None:
    await attach(site)
    for n in range(1, 4):
        await hold(site, f"tu_{n}")
    page = await signed_in(browser, site)
    await page.keyboard.press("d")
    await page.keyboard.press("Enter")
    await expect(card(page, "tu_1")).to_contain_text("Denied by Ana")
    await page.keyboard.press("j")
    await page.keyboard.press("2")
    await page.keyboard.press("Enter")
    await expect(card(page, "tu_2")).to_contain_text("Told to the agent: Wrong target.")
    third = card(page, "tu_3")
    await third.get_by_text("Deny …").click()
    await third.get_by_label("Why").fill("Ask <b>Bo</b> first")
    await third.get_by_role("button", name="Deny", exact=True).click()
    await expect(third).to_contain_text("Told to the agent: Ask <b>Bo</b> first")
    assert (await decided(site, "tu_1"))["deny_message"].startswith("Declined by a reviewer.")
    assert (await decided(site, "tu_3"))["deny_message"] == "Ask <b>Bo</b> first"


async def test_what_the_reviewer_types_stays_while_calls_come_and_go(browser: Browser, site: Site) -> None:
    await attach(site)
    await hold(site, "tu_1")
    page = await signed_in(browser, site)
    await page.keyboard.press("d")
    await page.keyboard.type("half a sen")
    await hold(site, "tu_2")
    table = tables.calls
    async with site.engine.begin() as connection:  # its card is replaced
        await connection.execute(
            update(table)
            .where(table.c.id == "tu_1")
            .values(gate_reason="unread_policy", updated_at=func.now())
        )
    await expect(card(page, "tu_2")).to_be_visible()
    await expect(card(page, "tu_1")).to_contain_text("could not be read")
    await page.keyboard.type("tence")
    await expect(card(page, "tu_1").get_by_label("Why")).to_have_value("half a sentence")


async def test_of_two_who_race_one_decides_and_the_other_is_told(browser: Browser, site: Site) -> None:
    await attach(site)
    await hold(site, "tu_1")
    await hold(site, "tu_2")
    ana, bo = await signed_in(browser, site, "Ana"), await signed_in(browser, site, "Bo")
    # Bo's page hears of nothing, so the click comes late.
    await bo.route("**/console", lambda route: route.abort())
    await bo.route("**/console/sessions/**", lambda route: route.abort())
    await card(ana, "tu_1").get_by_role("button", name="Allow").click()
    await expect(card(ana, "tu_1")).to_contain_text("Allowed by Ana")
    await bo.keyboard.press("d")
    await bo.keyboard.press("Enter")
    await expect(card(bo, "tu_1")).to_contain_text("Your decision was not recorded. Somebody decided")
    await expect(card(bo, "tu_1")).to_contain_text("Allowed by Ana")
    assert (await decided(site, "tu_1"))["result"] == "allow"
    # And who only looks is told by itself.
    await bo.unroute_all()
    await card(ana, "tu_2").get_by_role("button", name="Allow").click()
    await expect(card(bo, "tu_2")).to_contain_text("Allowed by Ana")
    await expect(bo.locator("#news")).to_contain_text("Allowed by Ana")
    await expect(bo.locator("#count")).to_have_text("0")


async def test_hostile_input_is_text_and_all_of_it_is_seen(browser: Browser, site: Site) -> None:
    await attach(site)
    hostile = {
        "<img src=x onerror=alert(1)>": "</pre></article><script>document.title='owned'</script>`${1}`",
        "path": "invoice\u202egpj.exe",
        "gap": "top" + "\n" * 301 + "bottom",
    }
    page = await signed_in(browser, site)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("dialog", lambda _: pytest.fail("a dialog opened"))
    await hold(site, "tu_1", hostile, tool="<b>bash</b>`", kind="custom", thread_id="<u>t</u>")
    async with site.engine.begin() as connection:
        await add_message(connection, "m_2", ["<img src=//evil.example/x.png> \u202e"], seq=2)
    shown = card(page, "invoice")
    await expect(shown).to_contain_text("<img src=x onerror=alert(1)>")
    await expect(shown).to_contain_text("</pre></article><script>document.title='owned'</script>`${1}`")
    await expect(shown).to_contain_text("invoiceU+202Egpj.exe")
    await expect(shown).to_contain_text("300 blank lines")
    await expect(shown.get_by_text("bottom", exact=False).first).to_be_in_viewport()
    await expect(shown.locator(".tag")).to_have_text("<b>bash</b>`")
    for path in ("/console/sessions", "/console/sessions/sesn_1", "/console/sessions/sesn_1/calls/tu_1"):
        await page.goto(path)
        await expect(page.get_by_role("heading", level=1)).to_be_visible()
    assert await page.locator("img, main script, iframe").count() == 0
    assert "owned" not in await page.title()
    assert all(url.startswith(site.base) for url in asked)


async def test_two_megabytes_are_shown_in_parts_with_their_exact_number(browser: Browser, site: Site) -> None:
    await attach(site)
    await hold(site, "tu_1", {"content": "x" * 2_097_000 + " rm -rf / "})
    page = await signed_in(browser, site)
    count = f"{len(json.dumps({'content': ''})) + 2_097_010:,}"
    await expect(card(page, "A long input")).to_contain_text(f"4,000 of {count} characters are shown here")
    await page.get_by_role("link", name="Read all of it").click()
    await expect(page.get_by_text(f"characters 1 to {PAGE_CHARS:,} of {count}")).to_be_visible()
    await page.get_by_role("link", name="Last").click()
    await expect(page.locator("pre.whole")).to_contain_text('rm -rf / "}')
    await page.get_by_role("button", name="Allow").click()
    await expect(page.locator(".outcome")).to_contain_text("Allowed by Ana")


async def test_a_session_that_ends_says_so_and_stops(browser: Browser, site: Site) -> None:
    await attach(site)
    await hold(site, "tu_1")
    page = await signed_in(browser, site)
    async with site.engine.begin() as connection:
        await connection.execute(
            update(tables.browser_passes).values(expires_at=func.now() - text("interval '1 second'"))
        )
    await expect(page.get_by_role("alert").filter(has_text="You are signed out")).to_be_visible()
    await page.keyboard.press("a")
    await page.keyboard.press("a")
    await expect(page.locator("#trouble")).to_contain_text("signed out")
    assert await decided(site, "tu_1") is None
    await page.reload()
    await expect(page.get_by_label("Key")).to_be_visible()


async def test_a_revoked_key_sees_no_further_call(browser: Browser, site: Site) -> None:
    await attach(site)
    page = await signed_in(browser, site)
    async with site.engine.begin() as connection:
        key_id = await connection.scalar(select(tables.keys.c.id))
        await keys.revoke(connection, "default", str(key_id))
    await hold(site, "tu_1")
    await expect(page.locator("#trouble")).to_contain_text("signed out")
    assert await page.locator(".card").count() == 0


async def test_a_phone_shows_thirty_cards_without_a_sideways_scroll(browser: Browser, site: Site) -> None:
    await attach(site)
    await site.http.put("/tools/bash", json={"url": "https://tools.example/" + "long" * 40})
    await site.http.post("/rules", json={"effect": "ask", "tool": "long" * 32, "note": "w" * 300})
    for n in range(30):
        await hold(site, f"tu_{n:02}", {"command": "x" * 300, "n": n})
    async with site.engine.begin() as connection:
        await add_delivery(connection, "tu_00", reply_excerpt="y" * 300, code="timeout")
    page = await signed_in(browser, site, is_phone=True)
    await expect(page.locator(".card")).to_have_count(30)
    for path in (
        "/console", "/console/sessions", "/console/sessions/sesn_1", "/console/tools", "/console/tools/bash",
        "/console/sessions/sesn_1/calls/tu_00", "/console/rules",
    ):  # fmt: skip
        await page.goto(path)
        await expect(page.get_by_role("heading", level=1)).to_be_visible()
        assert await page.evaluate("document.documentElement.scrollWidth") <= 360, path
    await page.goto("/console")
    first = page.locator(".card").first
    await first.get_by_role("button", name="Allow").click()
    await expect(first).to_contain_text("Allowed by Ana")
    box = await page.locator(".card button.allow").first.bounding_box()
    assert box is not None
    assert box["height"] >= 44


@pytest.mark.parametrize("is_dark", [False, True])
async def test_no_page_has_a_serious_fault_of_accessibility(
    browser: Browser, site: Site, is_dark: bool
) -> None:
    await attach(site)
    await site.http.put("/tools/bash", json={"url": "https://tools.example/hook"})
    await hold(site, "tu_1", {"command": "a\u202eb"})
    async with site.engine.begin() as connection:
        await add_delivery(connection, "tu_1", code="timeout", reply_excerpt="no")
        await add_message(connection, "m_2", ["so f"], state="partial")
    page = await open_page(browser, site, is_dark=is_dark)
    await page.goto("/console")
    await no_fault(page)
    await sign_in(page, await site.key("Ana"))
    await no_fault(page)
    await page.keyboard.press("d")
    await no_fault(page)
    await page.keyboard.press("l")
    await no_fault(page)
    await page.keyboard.press("Escape")
    await page.keyboard.press("a")
    await no_fault(page)
    await page.keyboard.press("a")
    await expect(page.locator(".outcome")).to_be_visible()
    await no_fault(page)
    await page.keyboard.press("?")
    await no_fault(page)
    for path in (
        "sessions",
        "sessions/sesn_1",
        "sessions/sesn_1/calls/tu_1",
        "tools",
        "tools/bash",
        "tools/none",
        "rules",
        "audit",
    ):
        await page.goto(f"/console/{path}")
        await no_fault(page)


async def no_fault(page: Page) -> None:
    found = await Axe().run(page)
    serious = [
        (one["id"], node["html"][:200])
        for one in found.response["violations"]
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]
    assert [] == serious


async def test_the_filter_hides_what_does_not_match_and_its_keys_are_letters(
    browser: Browser, site: Site
) -> None:
    await attach(site)
    await hold(site, "tu_1", {"command": "deploy"})
    await hold(site, "tu_2", {"command": "aardvark"})
    page = await signed_in(browser, site)
    await page.keyboard.press("/")
    await page.keyboard.type("aard")
    await expect(card(page, "deploy")).to_be_hidden()
    await expect(card(page, "aardvark")).to_be_visible()
    await page.keyboard.press("Escape")
    await page.keyboard.press("a")
    await page.keyboard.press("a")
    await expect(card(page, "aardvark")).to_contain_text("Allowed by Ana")
    assert await decided(site, "tu_1") is None


async def test_a_link_in_another_sites_page_leads_there_with_no_second_sign_in(
    browser: Browser, site: Site
) -> None:
    """The browser holds a strict cookie back on the way in; our own page then asks again."""
    await attach(site)
    page = await signed_in(browser, site)
    await page.goto(f"data:text/html,<a href='{site.base}/console/sessions/sesn_1'>decide</a>")
    await page.get_by_role("link", name="decide").click()
    await expect(page.get_by_role("heading", level=1)).to_have_text("Session sesn_1")


async def test_without_script_a_form_still_decides(browser: Browser, site: Site) -> None:
    await attach(site)
    await hold(site, "tu_1")
    context = await browser.new_context(base_url=site.base, java_script_enabled=False)
    page = await context.new_page()
    await sign_in(page, await site.key("Ana"))
    await page.get_by_role("button", name="Allow").click()
    await expect(page.locator(".outcome")).to_contain_text("Allowed by Ana")


ASKS: dict[str, Any] = {
    "kind": "custom", "tool": "refund", "permission": None, "gate_by": "tool", "gate_reason": "tool_asks",
}  # fmt: skip
REFUND = {"order": "A-1", "amount": 900, "note": "all of it"}


async def test_an_input_is_edited_and_allowed_by_keyboard(browser: Browser, site: Site) -> None:
    await attach(site)
    await hold(site, "tu_1", REFUND, **ASKS)
    page = await signed_in(browser, site)
    await page.keyboard.press("e")
    field = card(page, "refund").get_by_label("The input to run instead")
    await expect(field).to_be_focused()
    await expect(field).to_have_value(json.dumps(REFUND))
    await expect(card(page, "refund").get_by_role("button", name="Allow", exact=True)).to_be_hidden()
    await page.keyboard.press("Control+a")
    await page.keyboard.type('{"order": "A-1",\n "amount": 90.10}')
    assert await decided(site, "tu_1") is None
    await page.keyboard.press("Tab")
    await expect(page.get_by_role("button", name="Allow the edited input")).to_be_focused()
    await page.keyboard.press("Enter")
    shown = card(page, "refund")
    await expect(shown.locator(".outcome")).to_contain_text("Allowed by Ana,")
    await expect(shown.locator(".edited")).to_contain_text("90.10")
    await expect(shown.locator(".edited dt", has=page.get_by_text("edited"))).to_have_text(["amount edited"])
    await expect(shown.locator(".edited")).to_contain_text("Left out: note")
    await expect(shown).to_contain_text("all of it")
    stored = (await site.http.get("/sessions/sesn_1/calls/tu_1")).text
    assert '"edited_input":{"order":"A-1","amount":90.10}' in stored
    await no_fault(page)
    assert 0 <= await shown_ms(site, "tu_1") <= 60_000


async def test_an_edit_that_is_no_json_says_where_and_keeps_what_was_typed(
    browser: Browser, site: Site
) -> None:
    await attach(site)
    await hold(site, "tu_1", REFUND, **ASKS)
    page = await signed_in(browser, site)
    await page.keyboard.press("e")
    await page.keyboard.press("Control+a")
    await page.keyboard.type('{"amount" 90}')
    await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("alert")).to_contain_text("line 1, column 11")
    field = page.get_by_label("The input to run instead")
    await expect(field).to_have_value('{"amount" 90}')
    await expect(field).to_be_focused()
    await no_fault(page)
    async with site.engine.begin() as connection:  # its card is replaced
        await connection.execute(update(tables.calls).values(gate_reason="ask", updated_at=func.now()))
    await expect(card(page, "refund")).to_contain_text("own policy asks")
    await expect(field).to_have_value('{"amount" 90}')
    await expect(field).to_be_focused()
    await field.fill('{"amount": 90}')
    await page.get_by_role("button", name="Allow the edited input").click()
    await expect(page.locator(".outcome")).to_contain_text("Allowed by Ana,")


async def test_a_second_person_allows_what_the_first_one_edited(browser: Browser, site: Site) -> None:
    await attach(site)
    rules = {"url": "https://tools.example/hook", "approvals_required": 2}
    assert (await site.http.put("/tools/refund", json=rules)).status_code == 201
    await hold(site, "tu_1", REFUND, **ASKS)
    ana, ben = await signed_in(browser, site), await signed_in(browser, site, "Ben")
    await ana.keyboard.press("e")
    await ana.keyboard.press("Control+a")
    await ana.keyboard.type('{"amount": 90}')
    await ana.keyboard.press("Tab")
    await ana.keyboard.press("Enter")
    await expect(card(ben, "refund").locator(".edited")).to_contain_text("this runs if it is allowed")
    await ben.keyboard.press("a")
    await expect(ben.get_by_role("button", name="Allow as edited")).to_be_focused()
    await ben.keyboard.press("a")
    await expect(card(ben, "refund").locator(".outcome")).to_contain_text("Allowed by Ben,")
    shown = (await site.http.get("/sessions/sesn_1/calls/tu_1")).json()
    assert {"amount": 90} == shown["edited_input"]


async def test_what_no_eye_sees_is_edited_as_an_escape(browser: Browser, site: Site) -> None:
    raw = {"to": "a\u202eb\u200b", "é": "ok \U0001f600"}
    await attach(site)
    async with site.engine.begin() as connection:
        await add_call(connection, "tu_1", input=json.dumps(raw, ensure_ascii=False), **ASKS)
    page = await signed_in(browser, site)
    await page.keyboard.press("e")
    field = page.get_by_label("The input to run instead")
    await expect(field).to_have_value('{"to": "a\\u202eb\\u200b", "é": "ok \U0001f600"}')
    await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")
    await expect(page.locator(".outcome")).to_contain_text("Allowed by Ana,")
    assert (await site.http.get("/sessions/sesn_1/calls/tu_1")).json()["edited_input"] is None


async def test_what_cannot_be_edited_here_has_no_field(browser: Browser, site: Site) -> None:
    await attach(site)
    await hold(site, "tu_1")
    await hold(site, "tu_2", {"text": "x" * 5_000}, **ASKS)
    page = await signed_in(browser, site)
    await expect(card(page, "too long to be edited here")).to_have_count(1)
    await expect(page.locator("textarea")).to_have_count(0)
    await page.keyboard.press("e")
    await expect(page.locator(".card")).to_have_count(2)


async def test_without_script_an_input_is_edited_too(browser: Browser, site: Site) -> None:
    await attach(site)
    await hold(site, "tu_1", REFUND, **ASKS)
    context = await browser.new_context(base_url=site.base, java_script_enabled=False)
    page = await context.new_page()
    await sign_in(page, await site.key("Ana"))
    field = page.get_by_label("The input to run instead")
    for typed, words in [("[]", "no JSON object"), ('{"amount": 90}', "Allowed by Ana")]:
        if not await field.is_visible():
            await page.get_by_text("Edit …").click()
        await field.fill(typed)
        await page.get_by_role("button", name="Allow the edited input").click()
        await expect(page.locator(".card")).to_contain_text(words)
    await expect(page.locator(".edited")).to_contain_text("90")
