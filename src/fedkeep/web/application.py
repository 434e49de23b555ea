"""The page's server: static files, a stream of updates and one device's store on request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Annotated

import msgspec
from fastapi import FastAPI, Query
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import ASGIApp

from fedkeep.web.assets import SCRIPTS, asset, index
from fedkeep.web.guard import PageGuard
from fedkeep.web.view import Feed

PERIOD_SECONDS = 0.5
QUIET_PERIODS = 20
"""Silent periods after which a comment keeps the connection alive."""
_TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}


async def stream(feed: Feed, closing: Callable[[], bool]) -> AsyncIterator[bytes]:
    """Server-sent events: everything at first, then whatever changed, until the server closes."""
    version, quiet = 0, 0
    yield b"retry: 1000\n\n"
    while not closing():
        update = await asyncio.to_thread(feed.since, version)
        quiet += 1
        if update is not None:
            version, quiet = update.version, 0
            yield b"data: " + msgspec.json.encode(update) + b"\n\n"
        elif quiet == QUIET_PERIODS:
            quiet = 0
            yield b": nothing new\n\n"
        await asyncio.sleep(PERIOD_SECONDS)


def build(feed: Feed, token: str | None, closing: Callable[[], bool]) -> ASGIApp:
    """The ASGI application, guarded."""
    app = FastAPI(openapi_url=None)

    @app.get("/")
    def page() -> Response:
        return Response(index(), media_type="text/html; charset=utf-8")

    @app.get("/api/stream")
    def updates() -> Response:
        return StreamingResponse(stream(feed, closing), media_type="text/event-stream")

    @app.get("/api/device")
    def device(run: Annotated[str, Query()], device: Annotated[int, Query()]) -> Response:
        found = feed.device(run, device)
        if found is None:
            return PlainTextResponse("no snapshot of this device", 404)
        return Response(msgspec.json.encode(found), media_type="application/json")

    @app.get("/{name}")
    def file(name: str) -> Response:
        if name not in (*SCRIPTS, "style.css", "icon.svg"):
            return PlainTextResponse("no such file", 404)
        return Response(asset(name), media_type=_TYPES[name.rsplit(".", 1)[1]])

    return PageGuard(app, token)
