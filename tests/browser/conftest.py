"""A real browser before a real server."""

import os
import runpy
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fedkeep.web.server import LiveServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="session")
def fleet() -> dict[str, Any]:
    """The fake runs that the tests of the server use."""
    return runpy.run_path(str(Path(__file__).parents[1] / "web" / "fleet.py"))


@pytest.fixture(scope="session")
def browser() -> "Iterator[Browser]":
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    binary = (
        os.environ.get("FEDKEEP_CHROMIUM")
        or shutil.which("chromium")
        or shutil.which("google-chrome")
    )
    if binary is None:
        pytest.skip("no chromium binary: install one, or name it in FEDKEEP_CHROMIUM")
    with api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=binary, args=list(FLAGS))
        yield launched
        launched.close()


class Complaints(list[str]):
    """What a page wrote to its console as an error, and exceptions nobody caught."""

    def listen(self, page: "Page") -> None:
        page.on(
            "console",
            lambda message: self.append(message.text) if message.type == "error" else None,
        )
        page.on("pageerror", lambda error: self.append(str(error)))


@pytest.fixture
def complaints() -> Complaints:
    return Complaints()


@pytest.fixture
def page(browser: "Browser", complaints: Complaints) -> "Iterator[Page]":
    """A page that fails the test by any complaint it leaves in `complaints`."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    opened = context.new_page()
    opened.set_default_timeout(60_000)
    complaints.listen(opened)
    yield opened
    context.close()
    assert complaints == []


class Hall:
    """Servers that run in threads, and are stopped when the test ends."""

    def __init__(self) -> None:
        self._running: list[tuple[LiveServer, threading.Thread]] = []

    def serve(self, directory: Path, port: int = 0, token: str | None = None) -> LiveServer:
        server = LiveServer(directory, port=port, token=token)
        thread = threading.Thread(target=server.run)
        thread.start()
        self._running.append((server, thread))
        return server

    def stop(self) -> None:
        for server, _ in self._running:
            server.stop()
        for _, thread in self._running:
            thread.join(timeout=10)
            assert not thread.is_alive()
        self._running.clear()


@pytest.fixture
def hall() -> Iterator[Hall]:
    pytest.importorskip("uvicorn", reason="the live page needs the 'web' extra")
    opened = Hall()
    yield opened
    opened.stop()


@pytest.fixture
def show(hall: Hall, page: "Page") -> "Callable[[Path], Page]":
    """Opens the live page of a directory and waits for its charts."""

    def open_page(directory: Path) -> "Page":
        page.goto(hall.serve(directory).url)
        page.locator("#content").wait_for()
        return page

    return open_page
