"""Allow like this, and the page of the rules, as a person meets them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.async_api import Browser, expect

from app.console import wording
from app.core.rules import ArgumentTest, Rule
from tests.console.service import Site
from tests.console.test_browser import attach, card, decided, hold, no_fault, signed_in
from tests.store.rows import add_attachment, add_call

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

CUSTOM = {
    "kind": "custom",
    "tool": "refund",
    "permission": None,
    "gate_by": "tool",
    "gate_reason": "tool_asks",
}


async def rules(site: Site, *, ended: bool = False) -> list[dict[str, Any]]:
    answer = await site.http.get("/rules", params={"with_ended": str(ended).lower()})
    data: list[dict[str, Any]] = answer.json()["data"]
    return data


LIMITED = Rule(
    "r",
    "allow",
    tool="refund",
    session_id="sesn_1",
    tests=(ArgumentTest("/to", "equals", '"A-1"'), ArgumentTest("/n", "at_most", "100.50")),
    only=frozenset({"to", "n"}),
)
LIMITED_WORDS = (
    "Allows calls of refund in session sesn_1, with no arguments but n, to,"
    ' where to is "A-1" and n is at most 100.50.'
)
NOT_GIVEN = (ArgumentTest("/a/b", "is_given", "false"),)
ONE_OF = (ArgumentTest("", "one_of", "[1]"),)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (Rule("r", "deny"), "Denies every call."),
        (
            Rule("r", "ask", tool="bash", kind="builtin"),
            "Asks a person before calls of bash (built-in tool).",
        ),
        (
            LIMITED,
            LIMITED_WORDS,
        ),
        (
            Rule("r", "allow", tool="now", tests=NOT_GIVEN, only=frozenset()),
            "Allows calls of now, without arguments, where a/b is not given.",
        ),
        (Rule("r", "ask", tests=ONE_OF), "Asks a person before every call, where the input is one of [1]."),
    ],
)
def test_a_rule_is_a_sentence(rule: Rule, words: str) -> None:
    assert words == wording.rule(rule)


async def test_calls_like_this_one_are_allowed_by_keyboard_and_the_rule_is_revoked_on_its_page(
    browser: Browser, site: Site
) -> None:
    await attach(site)
    await hold(site, "tu_1", {"to": "A-1", "amount": 7}, **CUSTOM)
    page = await signed_in(browser, site)
    await page.keyboard.press("l")
    await expect(card(page, "A-1")).to_contain_text(
        "Allow this call, and for a while, without asking, every call of refund"
    )
    await expect(page.get_by_role("checkbox", name="to")).to_be_focused()
    await page.get_by_role("checkbox", name="amount").uncheck()
    await page.get_by_role("combobox", name="For").select_option("8 hours")
    await page.get_by_role("button", name="Allow this and calls like it").click()
    await expect(card(page, "A-1").locator(".outcome")).to_contain_text("Allowed by Ana")
    (made,) = await rules(site)
    assert ("sesn_1", "refund", "custom", ["amount", "to"]) == tuple(
        made[name] for name in ("session_id", "tool", "kind", "only")
    )
    assert [{"argument": "/to", "equals": "A-1"}] == made["tests"]
    await page.get_by_role("link", name="Rules").click()
    await expect(page.locator(".rule")).to_have_text(
        "Allows calls of refund (custom tool) in session sesn_1, with no arguments but amount, to,"
        ' where to is "A-1".'
    )
    await expect(page.locator("main")).to_contain_text("By Ana")
    await expect(page.locator("main")).to_contain_text(re.compile(r"\([78] h left\)"))
    await no_fault(page)
    await page.get_by_role("button", name="Revoke").click()
    await expect(page.get_by_text("No rule is live.")).to_be_visible()
    (ended,) = await rules(site, ended=True)
    assert not ended["is_live"]
    audited = (await site.http.get("/audit")).json()["data"]
    kinds = [(row["kind"], row["via"]) for row in audited]
    assert [("rule.created", "console"), ("rule.revoked", "console")] == kinds[-2:]


async def test_what_no_rule_can_be_made_of_offers_none(browser: Browser, site: Site) -> None:
    await attach(site)
    await hold(site, "tu_1", {"x": "y" * 5_000})
    async with site.engine.begin() as connection:
        await add_call(connection, "tu_2", input='{"a": 1, "a": 2}')
        await add_call(connection, "tu_3", input="{}", gate_reason="outcome_unknown")
    page = await signed_in(browser, site)
    await expect(page.locator(".card")).to_have_count(3)
    await expect(page.locator("details.like")).to_have_count(0)


async def test_a_reviewer_revokes_only_what_is_theirs(site: Site) -> None:
    await site.http.post("/rules", json={"effect": "deny"})
    (made,) = await rules(site)
    visitor = await site.visitor(await site.key("Bo", "confirm"))
    shown = await visitor.get("/console/rules")
    assert "Denies every call." in shown.text
    assert "Revoke" not in shown.text
    token = shown.text.partition('name="form_token" value="')[2].partition('"')[0]
    body = {"form_token": token, "rule_id": made["id"]}
    assert 404 == (await visitor.post("/console/rules/revocations", data=body)).status_code
    assert [made] == await rules(site)


async def test_the_arguments_are_those_of_the_input_that_was_shown(site: Site) -> None:
    """By their numbers: no name that a form carries can be misread."""
    async with site.engine.begin() as connection:
        await add_attachment(connection)
        await add_call(connection, "tu_1", input='{"a\\nb": 1, "c": 2}', **CUSTOM)
    visitor = await site.visitor(await site.key("Ana"))
    shown = (await visitor.get("/console")).text
    given = {
        name: shown.partition(f'name="{name}" value="')[2].partition('"')[0]
        for name in ("form_token", "input_digest", "tool_version", "session_id", "call_id")
    }
    body = given | {"result": "allow_like", "same.0": "on", "expires_in_s": "3600"}
    assert 303 == (await visitor.post("/console/decisions", data=body)).status_code
    (made,) = await rules(site)
    assert [{"argument": "/a\nb", "equals": 1}] == made["tests"]
    assert {"result": "allow", "via": "console"}.items() <= (await decided(site, "tu_1")).items()


@pytest.mark.parametrize("expires_in_s", [None, "1", "999999999"])
async def test_a_rule_lives_as_long_as_the_form_offers(site: Site, expires_in_s: str | None) -> None:
    async with site.engine.begin() as connection:
        await add_attachment(connection)
        await add_call(connection, "tu_1", **CUSTOM)
    visitor = await site.visitor(await site.key("Ana"))
    shown = (await visitor.get("/console")).text
    body = {
        name: shown.partition(f'name="{name}" value="')[2].partition('"')[0]
        for name in ("form_token", "input_digest", "tool_version", "session_id", "call_id")
    } | {"result": "allow_like"}  # fmt: skip
    if expires_in_s is not None:
        body["expires_in_s"] = expires_in_s
    assert 422 == (await visitor.post("/console/decisions", data=body)).status_code
    assert [] == await rules(site)
    assert await decided(site, "tu_1") is None
