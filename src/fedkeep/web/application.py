"""The page's server: static files, a stream of updates, device snapshots, and access control."""

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from hashlib import blake2b

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse

from fedkeep.protocol.addresses import is_loopback
from fedkeep.web.feed import Feed
from fedkeep.web.report import SCRIPTS, asset, index

PERIOD_SECONDS = 0.5
QUIET_PERIODS = 20
"""Silent periods after which a comment keeps the connection alive."""
_TYPES = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
COOKIE = "fedkeep-watch"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


async def stream(feed: Feed, closing: Callable[[], bool]) -> AsyncIterator[bytes]:
    """Yield server-sent events: everything at first, then changes, until the server closes."""
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


def build(feed: Feed, token: str | None, closing: Callable[[], bool]) -> FastAPI:
    """Build the ASGI application; every request passes `refused` first."""
    app = FastAPI(openapi_url=None)

    @app.middleware("http")
    async def checked(
        request: Request, answer: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        response = refused(request, token) or await answer(request)
        response.headers.update(HEADERS)
        return response

    @app.get("/")
    def page() -> Response:
        return Response(index(), media_type="text/html; charset=utf-8")

    @app.get("/api/stream")
    def updates() -> Response:
        return StreamingResponse(stream(feed, closing), media_type="text/event-stream")

    @app.get("/api/device")
    def device(run: str, device: int) -> Response:
        found = feed.device(run, device)
        if found is None:
            return PlainTextResponse("no snapshot of this device", 404)
        return Response(msgspec.json.encode(found), media_type="application/json")

    @app.get("/{name}")
    def file(name: str) -> Response:
        if name not in (*SCRIPTS, "style.css", "icon.svg"):
            return PlainTextResponse("no such file", 404)
        return Response(asset(name), media_type=_TYPES[name.rsplit(".", 1)[1]])

    return app


def refused(request: Request, token: str | None) -> Response | None:
    """Return the answer to a request that is not allowed, or a redirect after a login; else None.

    Without a token the page is for this machine only: a request for another host is a DNS
    rebinding attack. A request with the token in its address is redirected to one without. The
    cookie does not hold the token itself: browsers send it to every port of a host.
    """
    if request.method != "GET":
        return PlainTextResponse("read-only", 405, {"Allow": "GET"})
    if token is None:
        known = is_loopback(request.url.hostname or "")
        return None if known else PlainTextResponse("ask for 127.0.0.1 or localhost", 403)
    derived = blake2b(token.encode(), digest_size=24, person=b"fedkeep-watch").hexdigest()
    if _same(request.query_params.get("token", ""), token):
        welcome = RedirectResponse(request.url.path, 303)
        welcome.set_cookie(COOKIE, derived, httponly=True, samesite="strict")
        return welcome
    bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
    if _same(bearer, token) or _same(request.cookies.get(COOKIE, ""), derived):
        return None
    return PlainTextResponse(
        "open this address with ?token=... once", 401, {"WWW-Authenticate": "Bearer"}
    )


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())
