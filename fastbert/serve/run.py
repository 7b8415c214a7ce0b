"""Runs the application on uvicorn: a socket first, then the model, then requests until a signal."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import uvicorn

try:
    import resource
except ImportError:  # Chunks
    resource = None  # type: ignore[assignment]

from fastbert.importing import collector_spares_what_is_there
from fastbert.native.cores import cores, usable_threads
from fastbert.native.memory import bound_arenas
from fastbert.native.signals import set_handler
from fastbert.packed_weights import keep_packed_only
from fastbert.serve.app import make_app
from fastbert.serve.engine import load_engine
from fastbert.serve.limits import Limits
from fastbert.serve.logs.access_log import AccessLog, RequestLog

SPARE_FILES = 64  # of those that the process may open: libraries, threads, the listening socket
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Web:
    """How the server is seen. root_path: what a proxy takes off the paths. certfile, keyfile: of TLS, in PEM; the key
    may be in the certificate's file. cors_origins: whose web pages may use it. access_log: a line for each request.
    """

    root_path: str = ""
    certfile: str | None = None
    keyfile: str | None = None
    cors_origins: Sequence[str] = ()
    access_log: AccessLog | None = None

    def check(self) -> None:
        """Raises OSError: the files are no certificate with its key, or the key has a password."""
        if self.certfile is None:
            return
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.certfile, self.keyfile, password=lambda: "")
        except ssl.SSLError as error:
            files = " and ".join(filter(None, (self.certfile, self.keyfile)))
            raise OSError(f"{files}: no certificate with a key that has no password ({error.reason})") from None
        except OSError as error:
            files = " or ".join(filter(None, (self.certfile, self.keyfile)))
            raise OSError(error.errno, error.strerror, files) from None


def bind(host: str, port: int) -> socket.socket:
    """A socket that does not listen yet. Raises OSError, with the address, if it is not to be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, proto=socket.IPPROTO_TCP)  # said, or asyncio leaves Nagle's algorithm on
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(error.errno, error.strerror, f"{host}:{port}") from None
    return bound


def connections(requests: int) -> int:
    """How many may be open: twice the requests, if the process may open so many files. It then may."""
    if resource is None:
        return 2 * requests
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * requests + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return 2 * requests if soft == resource.RLIM_INFINITY else min(2 * requests, max(1, soft - SPARE_FILES))


class Uvicorn(uvicorn.Server):
    """Which calls `on_open()` when it listens, and leaves nothing behind after a second Ctrl-C: uvicorn leaves the
    requests, and with them the threads that compute.
    """

    def __init__(self, config: uvicorn.Config, on_open: Callable[[], None]):
        super().__init__(config)
        self.on_open = on_open

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_open()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:
            if tasks := set(self.server_state.tasks):
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
            await self.lifespan.shutdown()


@contextmanager
def signals_stop(server: uvicorn.Server) -> Iterator[None]:
    """SIGINT and SIGTERM end what it does in order, and not the process: uvicorn raises them once more at its end, for
    the handlers that were there. When it has stopped, the process ignores them: all is answered, and one more Ctrl-C
    must not make a killed process of a clean end while Python exits.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, server.handle_exit) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            set_handler(number, signal.SIG_IGN if server.started else handler)


def make_server(
    app: Any,
    limits: Limits,
    max_connections: int,
    on_open: Callable[[], None] = lambda: None,
    web: Web = Web(),
    log: Callable[[str], None] = lambda line: None,
) -> Uvicorn:
    config = uvicorn.Config(
        RequestLog(app, web.access_log, log),
        lifespan="on",
        ws="none",
        log_level="error",
        access_log=False,
        server_header=False,
        limit_concurrency=max_connections,
        timeout_graceful_shutdown=round(2 * limits.timeout_s) + 1,
        root_path=web.root_path,
        ssl_certfile=web.certfile,
        ssl_keyfile=web.keyfile,
    )
    return Uvicorn(config, on_open)


def serve(
    name: str,
    *,
    served_name: str | None = None,
    host: str,
    port: int,
    dtype: str = "auto",
    device: str | None = None,
    batch_tokens: int | None = None,
    threads: int | None = None,
    api_key: str | None = None,
    limits: Limits,
    web: Web = Web(),
    say: Callable[[str], None],
    log: Callable[[str], None] = lambda line: None,
) -> None:
    """Serve a model until SIGINT or SIGTERM; the requests that it has begun to read by then are answered first.

    threads: that compute; None: as many as torch has and the process may use. `say` tells what the server does, `log`
    what became of a request.
    Raises OSError: the address is not to be had, or there is no certificate.
    """
    web.check()
    bound = bind(host, port)
    if api_key is None and not ipaddress.ip_address(bound.getsockname()[0]).is_loopback:
        say(f"all clients that reach {host} may use this server: it asks for no API key")
    torch.set_num_threads(threads or usable_threads())
    bound_arenas()
    engine = load_engine(name, dtype, device)
    keep_packed_only(engine.model)
    engine.name = served_name or name
    budget = batch_tokens or engine.model.default_batch_tokens
    on_cpu = engine.model.device.type == "cpu"
    # A batch a core: no core waits for another at the end of each product, least of all for the one that the event
    # loop has taken. docs/serve.md has the times. On a GPU the spare thread's work would stand behind the other's.
    workers, each = (torch.get_num_threads(), 1) if on_cpu else (1, torch.get_num_threads())
    app = make_app(
        engine,
        limits,
        api_key,
        batch_tokens=budget,
        workers=workers,
        threads=each,
        spare=on_cpu,
        cors_origins=web.cors_origins,
    )
    address = bound.getsockname()
    shown = f"[{address[0]}]:{address[1]}" if ":" in host else f"{address[0]}:{address[1]}"
    what = f"{engine.model_type}, {str(engine.model.dtype).removeprefix('torch.')}, {engine.model.device}"
    shown = f"{'https' if web.certfile else 'http'}://{shown}"
    serving = f"serving {engine.name} ({what}) at {shown}, described at {shown}/openapi.json"
    if on_cpu:
        serving += f"; {workers} thread{'s' if workers > 1 else ''} compute ({cores()})"
    server = make_server(app, limits, connections(limits.max_concurrent_requests), lambda: say(serving), web, log)
    with collector_spares_what_is_there(), signals_stop(server):
        server.run(sockets=[bound])
    outcomes = app.state.outcomes
    cut_off = f", cut off {outcomes.cut_off}" if outcomes.cut_off else ""
    say(f"stopped: answered {outcomes.answered}, refused {outcomes.refused}{cut_off}")
