"""The server of the live view: read-only, for one user, who has its token."""

from __future__ import annotations

import hmac
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from samestep.cli.ui.pages import Pages
from samestep.cli.ui.view import View, live_link, live_page, static_page
from samestep.report.chart import Panel, embedded_json

_HOSTS = ["127.0.0.1", "localhost", "[::1]"]
"""A page of another site can send a browser here under its own name, and not under these."""
_SECONDS_BETWEEN = 1.5
_SECONDS_TO_NOTICE = 0.25
"""Until a page that is followed notices that the server ends."""
_SHARE_OF_TIME = 10
"""Looking takes at most one part in so many of a core."""
_HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}


class LiveServer:
    """Answers requests with pages, for those who have the token."""

    def __init__(self, pages: Pages, token: str) -> None:
        self._pages, self._token = pages, token
        self._server: uvicorn.Server | None = None

    def serve(self, listening: socket.socket) -> None:
        """Answer requests until this process is interrupted."""
        config = uvicorn.Config(self.app(), log_level="warning", access_log=False, timeout_graceful_shutdown=3)
        self._server = uvicorn.Server(config)
        self._server.run(sockets=[listening])

    def _is_ending(self) -> bool:
        return self._server is not None and self._server.should_exit

    def app(self) -> Starlette:
        """Return the application that a server runs."""
        pages = ("/", "/sweeps", "/proofs", "/run", "/compare", "/sweep")
        routes = [Route(path, self._guarded(self._page)) for path in pages]
        routes += [Route("/events", self._guarded(self._events)), Route("/share", self._guarded(self._share))]
        return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=_HOSTS)])

    def _guarded(self, answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Return the answer for those only who have the token: in the address at first, then in a cookie."""

        async def guarded(request: Request) -> Response:
            shown = request.query_params.get("token", "")
            if shown and self._is_token(shown):
                rest = request.url.remove_query_params("token")
                response: Response = RedirectResponse(f"{rest.path}?{rest.query}".rstrip("?"))
                response.set_cookie(self._name(request), self._token, httponly=True, samesite="lax")
            elif not self._is_token(request.cookies.get(self._name(request), "")):
                words = "This page needs the whole address that `samestep ui` has printed, with its token.\n"
                response = PlainTextResponse(words, status_code=403)
            else:
                response = await answer(request)
            response.headers.update(_HEADERS)
            return response

        return guarded

    def _name(self, request: Request) -> str:
        """Return the cookie's name; a browser shares its cookies between all ports of a host."""
        return f"samestep-ui-{request.url.port}"

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self._token.encode())

    async def _page(self, request: Request) -> Response:
        view = await run_in_threadpool(self._pages.at, f"{request.url.path}?{request.url.query}")
        if view is None:
            return PlainTextResponse("There is no such run or sweep here any more.\n", status_code=404)
        return _html(await run_in_threadpool(live_page, view))

    async def _share(self, request: Request) -> Response:
        view = await run_in_threadpool(self._pages.at, request.query_params.get("page", ""))
        if view is None:
            return PlainTextResponse("There is no such page.\n", status_code=404)
        return _html(await run_in_threadpool(static_page, [view]))

    async def _events(self, request: Request) -> Response:
        view = await run_in_threadpool(self._pages.at, request.query_params.get("page", ""))
        if view is None:
            return Response(status_code=204)  # a browser does not ask again
        return StreamingResponse(self._changes(view), media_type="text/event-stream")

    async def _changes(self, view: View) -> AsyncIterator[str]:
        """Yield what changes on a page, as server-sent events, until its reader or the server leaves."""
        before: dict[str, str] = {}
        while not self._is_ending():
            began = time.monotonic()
            parts, panels = await run_in_threadpool(_look, view)
            changed = {name: text for name, text in parts.items() if before.get(name) != text}
            event: dict[str, object] = {"parts": changed} if changed else {}
            if panels is not None:
                event["panels"] = [asdict(panel) for panel in panels]
            before = parts
            # An empty comment notices a reader who has left.
            yield f"data: {embedded_json(event)}\n\n" if event else ":\n\n"
            until = began + max(_SECONDS_BETWEEN, _SHARE_OF_TIME * (time.monotonic() - began))
            while time.monotonic() < until and not self._is_ending():
                await anyio.sleep(_SECONDS_TO_NOTICE)


def _html(text: str) -> HTMLResponse:
    """Return a page; names that are not UTF-8 are shown with question marks."""
    return HTMLResponse(text.encode("utf-8", "replace"))


def _look(view: View) -> tuple[dict[str, str], Sequence[Panel] | None]:
    return view.parts(live_link), view.panels()
