"""uvicorn's HTTP protocol with the bounds that it lacks, against clients that are slow, endless or too many."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 65_536  # bytes of a request beside its body: its line, its headers, the sizes of its chunks
GRACE_S = 5.0  # the routes' own answer to a slow body comes first


def bounded(timeout_s: float, max_connections: int) -> type[HttpToolsProtocol]:
    """A protocol for uvicorn. A connection ends when a request does not arrive, or its answer is not read, in time."""

    class Bounded(HttpToolsProtocol):
        beside = 0  # bytes of this request that are not its body
        reading: asyncio.TimerHandle | None = None
        writing: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                self.refuse("503 Service Unavailable", f"{max_connections} connections are open: try again later")
            self.await_request()

        def connection_lost(self, exc: Exception | None) -> None:
            for timer in (self.reading, self.writing):
                if timer is not None:
                    timer.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():  # what comes after a refusal
                return
            self.beside += len(data)
            super().data_received(data)
            if self.beside > MAX_HEAD and not self.transport.is_closing():
                self.refuse("431 Request Header Fields Too Large", f"a request has at most {MAX_HEAD} bytes of headers")

        def on_message_begin(self) -> None:
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

        def await_request(self) -> None:
            """Its last byte must come in time."""
            if self.reading is not None:
                self.reading.cancel()
            self.reading = self.loop.call_later(timeout_s + GRACE_S, self.transport.close)

        def refuse(self, status: str, message: str) -> None:
            self.transport.write(
                f"HTTP/1.1 {status}\r\ncontent-type: text/plain\r\ncontent-length: {len(message)}\r\n"
                f"connection: close\r\n\r\n{message}".encode()
            )
            self.transport.close()

    return Bounded
