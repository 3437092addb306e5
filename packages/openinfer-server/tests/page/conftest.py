"""A browser for the page's tests: Chromium from playwright, from PATH, or where OPENINFER_TEST_BROWSER says."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from openinfer_server.testing import ThreadedServer

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")


def browser_path(own: str) -> str | None:
    candidates = (os.environ.get("OPENINFER_TEST_BROWSER"), own, *map(shutil.which, NAMES))
    return next((path for path in candidates if path and Path(path).exists()), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of one module: playwright's event loop must not run while other tests start theirs."""
    with sync_playwright() as playwright:
        path = browser_path(playwright.chromium.executable_path)
        if path is None:
            pytest.skip("no Chromium: `playwright install chromium`, or set OPENINFER_TEST_BROWSER to one")
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[[ThreadedServer], Page]]:
    """Opens the page; at the end there must have been no fault in it, and no request to anywhere else."""
    faults: list[str] = []
    with browser.new_context(viewport={"width": 1280, "height": 800}) as context:
        context.set_default_timeout(10_000)

        def visit_one(server: ThreadedServer, *, may_fail: str = "\0") -> Page:
            origin = urlsplit(server.url).netloc
            page = context.new_page()
            page.on("pageerror", lambda error: faults.append(str(error)))
            page.on("console", lambda line: may_fail not in line.text and faults.append(line.text))
            page.on("request", lambda request: urlsplit(request.url).netloc == origin or faults.append(request.url))
            page.goto(server.url)
            return page

        yield visit_one
    assert faults == []
