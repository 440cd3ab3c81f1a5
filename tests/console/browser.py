"""Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator, Mapping

from playwright.async_api import Browser, Page, async_playwright, expect

from tests.console.service import Site

LIMIT_MS = 10_000
PHONE = {"width": 360, "height": 740}
DESKTOP = {"width": 1280, "height": 800}
LEFT_OUT = (
    "left out: the console's browser tests, as Chromium is not installed (Debian: apt install chromium)"
)
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def program() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser")


def is_ci(environ: Mapping[str, str]) -> bool:
    return environ.get("CI", "").lower() in ("1", "true", "yes")


@contextlib.asynccontextmanager
async def browsing() -> AsyncIterator[Browser]:
    """A browser with a profile of its own."""
    expect.set_options(timeout=LIMIT_MS)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program(), args=ARGUMENTS)
        try:
            yield browser
        finally:
            await browser.close()


async def open_page(browser: Browser, site: Site, *, is_phone: bool = False, is_dark: bool = False) -> Page:
    """A page in a context of its own: another person's browser."""
    context = await browser.new_context(
        base_url=site.base,
        viewport=PHONE if is_phone else DESKTOP,  # type: ignore[arg-type]  # a plain dict of its form
        color_scheme="dark" if is_dark else "light",
        locale="en-GB",
        timezone_id="UTC",
    )
    context.set_default_timeout(LIMIT_MS)
    return await context.new_page()


async def sign_in(page: Page, key: str) -> None:
    await page.goto("/console")
    await page.get_by_label("Key").fill(key)
    await page.get_by_role("button", name="Sign in").click()
    await expect(page.get_by_role("heading", level=1)).to_be_visible()
    await page.wait_for_url("**/console")
