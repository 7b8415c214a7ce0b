"""uvicorn's server with a door of its own, so that clients that came before a signal are served and not thrown out.

uvicorn stops by closing the socket it listens at, and each connection of which it has read no request. The kernel then
resets the connections that wait there, though their requests may have been sent whole.
"""

from __future__ import annotations

import asyncio
import errno
import selectors
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import uvicorn

from fastbert.native.signals import set_handler

ROUND_S = 0.01  # between two looks at what is still to be read
HANDSHAKE_S = 10.0  # of TLS
PAUSE_S = 1.0  # before more are let in, where the process may open no more files
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class HttpServer(uvicorn.Server):
    """Listens at the one socket that `run(sockets=[...])` gets. `on_open()` is called when a signal finds the way to
    `shutdown`: from then on no request is lost. Of more than `max_entering` connections in a handshake of TLS the
    oldest goes: clients that only connect must keep no others out.

    When it has stopped, the process ignores SIGINT and SIGTERM: all is answered, and one more Ctrl-C must not make a
    killed process of a clean end while Python exits. What comes before it has started is raised, as uvicorn does.
    """

    def __init__(self, config: uvicorn.Config, on_open: Callable[[], None], max_entering: int):
        super().__init__(config)
        self.on_open, self.max_entering = on_open, max_entering
        # Connections on their way from the door to a protocol, in the order in which they came.
        self.entering: dict[asyncio.Task, socket.socket] = {}
        self.received: list[int] = []  # signals

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                set_handler(number, signal.SIG_IGN if self.started else handler)
        if self.received and not self.started:
            signal.raise_signal(self.received[0])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.received.append(sig)
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        (self.door,) = sockets
        await super().startup(sockets=[])

    async def main_loop(self) -> None:
        self.door.setblocking(False)
        self.door.listen(self.config.backlog)
        self._open()
        self.on_open()
        await super().main_loop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take in the clients at the door and close it, read what has been sent, and only then stop as uvicorn does."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self.door)
        self._let_in()
        self.door.close()
        if self.entering:
            await asyncio.wait(self.entering)
        assert self.config.timeout_graceful_shutdown is not None
        last = loop.time() + self.config.timeout_graceful_shutdown
        while (unread := self._unread()) and loop.time() < last and not self.force_exit:
            for connection in self.server_state.connections - unread:
                connection.shutdown()  # it ends with its next answer, so who goes on asking does not hold up the end
            await asyncio.sleep(ROUND_S)
        await super().shutdown(sockets=[])
        if self.force_exit and (tasks := set(self.server_state.tasks)):  # uvicorn leaves them, and those who compute
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if self.force_exit:
            await self.lifespan.shutdown()

    def _open(self) -> None:
        if not self.should_exit:
            asyncio.get_running_loop().add_reader(self.door, self._let_in)

    def _let_in(self) -> None:
        """All clients that wait at the door, or one for each that has to go."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                opened, _ = self.door.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:  # it has gone before it came in
                continue
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                loop.remove_reader(self.door)
                loop.call_later(PAUSE_S, self._open)
                return
            opened.setblocking(False)
            task = loop.create_task(self._connect(opened))
            self.entering[task] = opened
            task.add_done_callback(lambda task: self.entering.pop(task, None))
            if self.config.ssl and len(self.entering) > self.max_entering:
                oldest = self.entering.pop(next(iter(self.entering)))
                with suppress(OSError):  # the client has gone
                    oldest.shutdown(socket.SHUT_RDWR)  # which ends its task
                return  # and its file is free before the next one comes

    async def _connect(self, opened: socket.socket) -> None:
        def protocol() -> asyncio.Protocol:
            config: Any = self.config
            return config.http_protocol_class(
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )

        try:
            tls: dict[str, Any] = (
                {"ssl": self.config.ssl, "ssl_handshake_timeout": HANDSHAKE_S} if self.config.ssl else {}
            )
            await asyncio.get_running_loop().connect_accepted_socket(protocol, opened, **tls)
        except OSError:  # it has gone
            opened.close()

    def _unread(self) -> set[Any]:
        """The connections that have sent something which is not read yet."""
        with selectors.DefaultSelector() as selector:
            for connection in self.server_state.connections:
                if not connection.transport.is_closing():
                    selector.register(connection.transport.get_extra_info("socket"), selectors.EVENT_READ, connection)
            return {key.data for key, _ in selector.select(0)}
