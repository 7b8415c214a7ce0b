"""The ASGI layer before the routes: which requests come in, how many at a time, how large, and for how long."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any

import anyio

from fastbert.serve.metrics import TIMES, Metrics, Times
from fastbert.serve.request_errors import RequestError, error_response, route_path

# Read without a key: what watches the server has none, and a browser can send none for a page.
PUBLIC = ("/health", "/live", "/metrics", "/docs", "/openapi.json")
READING = ("GET", "HEAD", "OPTIONS")
BODY = "fastbert.body"  # where the scope has a POST's body


class AdmissionControl:
    """Hands a POST on with its whole body in the scope, and stops working for a client that goes away."""

    def __init__(
        self, app: Any, metrics: Metrics, api_key: str | None, max_requests: int, max_bytes: int, timeout_s: float
    ):
        self.app, self.metrics, self.max_requests, self.max_bytes = app, metrics, max_requests, max_bytes
        self.authorization = None if api_key is None else f"Bearer {api_key}".encode()
        self.timeout_s, self.requests = timeout_s, 0

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] != "POST":
            await self._request(scope, receive, send)
            return
        status, outcomes, times = 0, self.metrics.outcomes, Times()
        TIMES.set(times)

        async def counted(message: dict) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                name, value = times.header()
                message = {**message, "headers": [*message["headers"], (name.encode(), value.encode())]}
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                outcomes.count(status)

        try:
            await self._request(scope, receive, counted)
        except asyncio.CancelledError:
            outcomes.cut_off += 1
            raise

    async def _request(self, scope: dict, receive: Any, send: Any) -> None:
        try:
            is_public = scope["method"] in READING and route_path(scope) in PUBLIC
            if self.authorization is not None and not is_public:
                check_key(scope, self.authorization)
            if scope["method"] != "POST":
                await self.app(scope, receive, send)
                return
            if self.requests >= self.max_requests:
                raise RequestError("overloaded", f"{self.requests} requests are being worked on: try again later")
            self.requests += 1
            try:
                await self._post(scope, receive, send)
            finally:
                self.requests -= 1
        except RequestError as error:
            self.metrics.failures.labels(error.kind).inc()
            headers = {"connection": "close"} if error.kind == "slow" else {}  # or its body would go on coming
            await error_response(scope, error.kind, str(error), headers=headers)(scope, receive, send)

    async def _post(self, scope: dict, receive: Any, send: Any) -> None:
        try:
            with anyio.fail_after(self.timeout_s):
                body = await self._read(scope, receive)
        except TimeoutError:
            raise RequestError("slow", f"the body did not arrive within {self.timeout_s:g} s") from None
        if body is None:
            return
        scope[BODY] = body
        handler, answers = asyncio.current_task(), False
        gone = asyncio.ensure_future(receive())  # the message after the body: that the client has gone

        def leave(_: asyncio.Future) -> None:
            if handler is not None and not answers:
                handler.cancel()

        async def answer(message: dict) -> None:
            nonlocal answers
            answers = True
            await send(message)

        gone.add_done_callback(leave)
        try:
            await self.app(scope, receive, answer)
        except asyncio.CancelledError:
            if answers:
                raise
            if not gone.done():
                raise RequestError("stopping", "the server stops before this was computed: try again") from None
            self.metrics.failures.labels("disconnected").inc()
        finally:
            gone.remove_done_callback(leave)
            gone.cancel()

    async def _read(self, scope: dict, receive: Any) -> bytes | None:
        """The body; None if the client has gone."""
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        body = bytearray()
        while max(len(body), int(length)) <= self.max_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if not message.get("more_body") and len(body) <= self.max_bytes:
                return bytes(body)
        raise RequestError("too_large", f"the body has more than {self.max_bytes:,} bytes")


def check_key(scope: dict, expected: bytes) -> None:
    """Raises RequestError for a request without the header; the time does not tell how much of it is right."""
    credentials = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, blank, key = credentials.partition(b" ")
    # The scheme may have any case, and blanks may stand around the key (RFC 9110, 5.5 and 11.4).
    if not hmac.compare_digest(scheme.capitalize() + blank + key.strip(b" \t"), expected):
        raise RequestError("unauthorized", "the header Authorization must be: Bearer, a space and the API key")
