from __future__ import annotations

import pytest
from playwright.async_api import Browser, expect
from sqlalchemy.ext.asyncio import AsyncEngine

from tests.console.browser import open_page, sign_in
from tests.console.world import desk

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


async def test_a_call_is_allowed_goes_out_and_the_text_that_follows_is_seen_as_it_is_written(
    browser: Browser, engine: AsyncEngine, migrated_url: str
) -> None:
    async with desk(engine, migrated_url, pace=1) as orders:
        key = await orders.site.key("Ana")
        inbox, session = await open_page(browser, orders.site), await open_page(browser, orders.site)
        await sign_in(inbox, key)
        await sign_in(session, key)
        await session.goto(f"/console/sessions/{orders.orders}")
        await expect(inbox.locator(".card")).to_contain_text("refund --order A-1042")
        await expect(session.locator("li.call.held")).to_contain_text("The call waits for a person")
        await inbox.keyboard.press("a")
        await inbox.keyboard.press("a")
        await expect(inbox.locator(".outcome")).to_contain_text("Allowed by Ana")
        await expect(inbox.locator(".outcome")).to_contain_text("The call is done, the result was posted.")
        await expect(session.locator("li.message.partial")).to_contain_text("Here is where")
        await expect(session.locator("li.message.final").last).to_contain_text("will be told by e-mail.")
        await expect(session.locator("#timeline")).to_contain_text("the result was posted; allowed by Ana.")
        await session.goto("/console/tools/bash")
        await expect(session.get_by_role("row").filter(has_text="refunded 49.90 EUR.")).to_contain_text("200")
