"""Calls an ASGI application without a network: its lifespan, then requests side by side."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    def __init__(self, app: Any):
        self.app = app

    async def send(
        self,
        path: str,
        content: Any = None,
        *,
        method: str = "POST",
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        gone: asyncio.Event | None = None,
        stalls: bool = False,
    ) -> Answer:
        """One request; `content` is sent as JSON. `gone` set: the client has left. `stalls`: its body never ends."""
        body = json.dumps(content).encode() if body is None else body
        given = {"content-length": str(len(body)), "content-type": "application/json", **(headers or {})}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "server": ("test", 80),
            "client": ("test", 1),
        }
        parts = [{"type": "http.request", "body": body, "more_body": stalls}]
        sent: list[dict] = []

        async def receive() -> dict:
            if parts:
                return parts.pop()
            await (gone or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: dict) -> None:
            sent.append(message)

        await self.app(scope, receive, send)
        if not sent:
            return Answer(0, {}, b"")
        names = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return Answer(sent[0]["status"], names, b"".join(message.get("body", b"") for message in sent[1:]))


def run(app: Any, program: Callable[[Client], Awaitable[Any]]) -> Any:
    """What `program(client)` returns, with the application started before and stopped after it."""

    async def main() -> Any:
        events: asyncio.Queue = asyncio.Queue()
        said: asyncio.Queue = asyncio.Queue()
        life = asyncio.ensure_future(app({"type": "lifespan", "asgi": {"version": "3.0"}}, events.get, said.put))
        await events.put({"type": "lifespan.startup"})
        assert (await said.get())["type"] == "lifespan.startup.complete"
        try:
            return await program(Client(app))
        finally:
            await events.put({"type": "lifespan.shutdown"})
            await life

    return asyncio.run(main())


async def lifespan(receive: Any, send: Any) -> None:
    """What an application answers that has nothing to begin or to end."""
    for step in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{step}.complete"})
