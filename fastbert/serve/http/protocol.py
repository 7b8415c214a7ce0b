"""uvicorn's HTTP protocol with the bounds that it lacks, against clients that are slow, endless or too many."""

from __future__ import annotations

import asyncio
import dataclasses
import selectors
import socket
import sys
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from fastbert.serve.http.access_log import RequestLog
from fastbert.serve.request_errors import error_response, route_path

MAX_HEAD = 65_536  # bytes of a request beside its body: its line, its headers, the sizes of its chunks
MAX_WAITING = 16  # requests that a client sends before it has the answer to the first
GRACE_S = 5.0  # the routes' own answer to a slow body comes first
LINGER_S = 0.2  # of a connection that is closed: TLS would wait half a minute for the client's goodbye
SPARE = 16  # connections above the limit, which may ask whether the server lives
LIVE = "/live"
_BYTES_SENT = slice(200, 208)  # of Linux's struct tcp_info
BUSY = "fastbert.busy"  # where the scope has what a connection above the limit is told


@dataclasses.dataclass
class Bounds:
    """What all connections of a server share. `log` has the lines of what is refused here."""

    timeout_s: float
    max_connections: int
    log: RequestLog
    spare: dict[Bounded, None] = dataclasses.field(default_factory=dict)  # in the order in which they came

    @property
    def busy(self) -> str:
        return f"{self.max_connections} connections are open: try again later"


def bytes_sent(opened: Any) -> int | None:
    """Of a TCP socket. None: it is full, or has gone, or the system does not count (Linux does)."""
    if not hasattr(socket, "TCP_INFO"):
        return None
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(opened, selectors.EVENT_WRITE)
            if not selector.select(0):
                return None
        counts = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_SENT.stop)
    except (OSError, ValueError):
        return None
    return int.from_bytes(counts[_BYTES_SENT], sys.byteorder) or None


class Bounded(HttpToolsProtocol):
    """Of an application that `only_live` has. A connection ends when a request does not arrive, or its answer is not
    read, in time.

    One above `max_connections` gets 503 for all but LIVE. What restarts a server that does not live must not do so
    because clients send half of a request. Of too many of these the oldest goes.
    """

    beside = 0  # bytes of this request that are not its body
    answering: RequestResponseCycle | None = None  # uvicorn's own `cycle` is the latest that came in
    reading: asyncio.TimerHandle | None = None
    writing: asyncio.TimerHandle | None = None
    lingering: asyncio.TimerHandle | None = None

    def __init__(self, bounds: Bounds, **uvicorns: Any):
        super().__init__(**uvicorns)
        self.bounds = bounds

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.socket = transport.get_extra_info("socket")  # asyncio's TLS no longer has it when it was closed twice
        spare = self.bounds.spare
        if len(self.connections) - len(spare) > self.bounds.max_connections:
            spare[self] = None
            if len(spare) > SPARE:
                next(iter(spare)).refuse("busy", self.bounds.busy)
        self.await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self.reading, self.writing, self.lingering):
            if timer is not None:
                timer.cancel()
        self.bounds.spare.pop(self, None)
        self.drop_requests()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():  # what comes after a refusal
            return
        self.beside += len(data)
        super().data_received(data)
        if self.beside > MAX_HEAD:
            self.refuse("headers", f"a request has at most {MAX_HEAD} bytes of headers")

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_WAITING:
            self.refuse("http", f"more than {MAX_WAITING} requests wait for the first one's answer")
            raise ValueError  # ends the parser
        super().on_message_begin()
        if self in self.bounds.spare:
            self.scope[BUSY] = self.bounds.busy  # type: ignore[literal-required]
        self.await_request()

    def on_body(self, body: bytes) -> None:
        self.beside -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.beside = 0
        if self.reading is not None:
            self.reading.cancel()
        super().on_message_complete()
        self.scope = None  # type: ignore[assignment]  # what comes next is not of this request

    def pause_writing(self) -> None:
        super().pause_writing()
        self.writing = self.loop.call_later(self.bounds.timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self.writing is not None:
            self.writing.cancel()
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():  # it was the last answer
            self.linger()

    def shutdown(self) -> None:
        """The server stops; it may say so several times."""
        if not self.transport.is_closing():  # of one that was closed twice abort() does nothing in asyncio's TLS
            super().shutdown()
        if self.transport.is_closing() and self.lingering is None:  # nothing of it is in flight
            self.linger()

    def linger(self, before: int | None = None) -> None:
        """Of TLS, end a connection that is closed, when its client has everything, and LINGER_S to say goodbye.

        TLS does not tell what it still has to send. But then it fills the socket, or has sent more since `before`.
        """
        if self.scheme != "https":
            return
        sent = bytes_sent(self.socket)
        if sent is not None and sent == before:
            self.transport.abort()
        else:
            self.lingering = self.loop.call_later(LINGER_S, self.linger, sent)

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
        if self in self.bounds.spare:
            self.reading = self.loop.call_later(GRACE_S, self.refuse, "busy", self.bounds.busy)
        else:
            self.reading = self.loop.call_later(self.bounds.timeout_s + GRACE_S, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        self.refuse("http", msg)

    def refuse(self, error_type: str, message: str) -> None:
        """What is known of the request is what has come of it."""
        self.bounds.spare.pop(self, None)
        self.drop_requests()
        self.loop.call_later(LINGER_S, self.transport.abort)
        if self.transport.is_closing():  # it has its answer
            return
        scope = {"client": self.client, "method": "-", "path": "-", "headers": (), **(self.scope or {})}
        answer = self.bounds.log.refused(scope, error_type, message)
        headers = [*self.server_state.default_headers, *answer.raw_headers, (b"connection", b"close")]
        head = b"".join(b"%s: %s\r\n" % header for header in headers)
        self.transport.write(STATUS_LINE[answer.status_code] + head + b"\r\n" + bytes(answer.body))
        self.transport.close()


def only_live(app: Any) -> Any:
    """An application that answers a connection above the limit nothing but LIVE, and then closes it."""

    async def answer(scope: dict, receive: Any, send: Any) -> None:
        if BUSY not in scope:
            await app(scope, receive, send)
            return

        async def closing(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        if scope["method"] in ("GET", "HEAD") and route_path(scope) == LIVE:
            await app(scope, receive, closing)
        else:
            await error_response(scope, "busy", scope[BUSY])(scope, receive, closing)

    return answer
