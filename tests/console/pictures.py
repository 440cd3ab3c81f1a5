"""Takes the pictures in docs/images: `python -m tests.console.pictures`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from playwright.async_api import expect

from app.store.database import create_engine
from tests import postgres
from tests.console.browser import browsing, open_page, sign_in
from tests.console.world import desk
from tests.store.rows import CONNECTIONS_MAX, migrate_once

FOLDER = Path(__file__).parents[2] / "docs" / "images"


async def take(url: str) -> None:
    engine = create_engine(url, connections_max=CONNECTIONS_MAX)
    async with desk(engine, url) as orders, browsing() as browser:
        await orders.held(1)
        await orders.more()
        await orders.held(4)
        key = await orders.site.key("Ana Reyes", "confirm", "read", "tools")
        first = await open_page(browser, orders.site)
        await sign_in(first, key)
        for is_phone in (True, False):
            size = "phone" if is_phone else "desktop"
            page = await open_page(browser, orders.site, is_phone=is_phone)
            await sign_in(page, key)
            await expect(page.locator(".card")).to_have_count(4)
            await page.screenshot(path=FOLDER / f"inbox-{size}.png")
            await page.keyboard.press("j")
            await page.keyboard.press("j")
            await page.keyboard.press("3")
            await page.locator(".card.current").screenshot(path=FOLDER / f"card-{size}.png")
        await first.keyboard.press("a")
        await first.keyboard.press("a")
        await expect(first.locator(".outcome")).to_contain_text("the result was posted")
        for is_phone in (True, False):
            size = "phone" if is_phone else "desktop"
            page = await open_page(browser, orders.site, is_phone=is_phone)
            await sign_in(page, key)
            await page.goto(f"/console/sessions/{orders.orders}")
            await expect(page.locator("li.message.final")).to_have_count(3)
            await page.screenshot(path=FOLDER / f"session-{size}.png")
            await page.goto("/console/tools/bash")
            await expect(page.get_by_role("table")).to_be_visible()
            await page.screenshot(path=FOLDER / f"tools-{size}.png")
    await engine.dispose()


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with postgres.server() as server_url, postgres.database(server_url) as url:
        asyncio.run(migrate_once(url))
        asyncio.run(take(url))


if __name__ == "__main__":
    main()
