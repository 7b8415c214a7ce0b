"""uvicorn's HTTP protocol with the bounds that it lacks, against clients that are slow, endless or too many."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import PlainTextResponse
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from fastbert.serve.request_errors import route_path

MAX_HEAD = 65_536  # bytes of a request beside its body: its line, its headers, the sizes of its chunks
MAX_WAITING = 16  # requests that a client sends before it has the answer to the first
UNAVAILABLE = "503 Service Unavailable"
GRACE_S = 5.0  # the routes' own answer to a slow body comes first
SPARE = 16  # connections above the limit, which may ask whether the server lives
LIVE = "/live"


def bounded(timeout_s: float, max_connections: int) -> type[HttpToolsProtocol]:
    """A protocol for uvicorn. A connection ends when a request does not arrive, or its answer is not read, in time.

    One above `max_connections` gets 503 for all but LIVE, whoever holds the others: who restarts a server that does not
    live must not do so because clients send half of a request. Of too many of these the oldest goes.
    """
    busy = f"{max_connections} connections are open: try again later"
    spare: dict[Any, None] = {}  # in the order in which they came

    class Bounded(HttpToolsProtocol):
        beside = 0  # bytes of this request that are not its body
        answering: RequestResponseCycle | None = None  # uvicorn's own `cycle` is the latest that came in
        reading: asyncio.TimerHandle | None = None
        writing: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) - len(spare) > max_connections:
                spare[self] = None
                self.app = only_live(self.app, busy)
                if len(spare) > SPARE:
                    next(iter(spare)).refuse(UNAVAILABLE, busy)
            self.await_request()

        def connection_lost(self, exc: Exception | None) -> None:
            for timer in (self.reading, self.writing):
                if timer is not None:
                    timer.cancel()
            spare.pop(self, None)
            self.drop_requests()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():  # what comes after a refusal
                return
            self.beside += len(data)
            super().data_received(data)
            if self.beside > MAX_HEAD and not self.transport.is_closing():
                self.refuse("431 Request Header Fields Too Large", f"a request has at most {MAX_HEAD} bytes of headers")

        def on_message_begin(self) -> None:
            if len(self.pipeline) >= MAX_WAITING:
                self.drop_requests()
                raise ValueError(f"more than {MAX_WAITING} requests wait")  # ends the parser: uvicorn answers 400
            super().on_message_begin()
            self.await_request()

        def on_body(self, body: bytes) -> None:
            self.beside -= len(body)
            super().on_body(body)

        def on_message_complete(self) -> None:
            self.beside = 0
            if self.reading is not None:
                self.reading.cancel()
            super().on_message_complete()

        def pause_writing(self) -> None:
            super().pause_writing()
            self.writing = self.loop.call_later(timeout_s, self.transport.abort)

        def resume_writing(self) -> None:
            if self.writing is not None:
                self.writing.cancel()
            super().resume_writing()

        def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
            self.answering = cycle
            super()._start_asgi_task(cycle, app)

        def drop_requests(self) -> None:
            """Those of a client that is to go, or has gone: without it they write to a connection that is closed."""
            self.pipeline.clear()
            if self.answering is not None and not self.answering.response_complete:
                self.answering.disconnected = True
                self.answering.message_event.set()

        def await_request(self) -> None:
            """Its last byte must come in time."""
            if self.reading is not None:
                self.reading.cancel()
            if self in spare:
                self.reading = self.loop.call_later(GRACE_S, self.refuse, UNAVAILABLE, busy)
            else:
                self.reading = self.loop.call_later(timeout_s + GRACE_S, self.transport.close)

        def refuse(self, status: str, message: str) -> None:
            spare.pop(self, None)
            self.drop_requests()
            self.transport.write(
                f"HTTP/1.1 {status}\r\ncontent-type: text/plain\r\ncontent-length: {len(message)}\r\n"
                f"connection: close\r\n\r\n{message}".encode()
            )
            self.transport.close()

    return Bounded


def only_live(app: Any, busy: str) -> Any:
    """An application that answers nothing but LIVE, and then closes the connection."""

    async def answer(scope: dict, receive: Any, send: Any) -> None:
        async def closing(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        if scope["method"] in ("GET", "HEAD") and route_path(scope) == LIVE:
            await app(scope, receive, closing)
        else:
            await PlainTextResponse(busy, 503)(scope, receive, closing)

    return answer
