"""One line a request, and its id: the layer around all others. Always a line for an error."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any, Literal
from urllib.parse import quote

from fastbert.serve.request_errors import TOLD, shortened

ID = b"x-request-id"
_VALID_ID = re.compile(rb"[\w.:-]{1,128}")  # of a proxy, or of a client: nothing that could be another line

AccessLog = Literal["text", "json"]


def id_of(scope: Mapping[str, Any]) -> str:
    """The request's own, or a new one."""
    own_id = next((value for name, value in scope["headers"] if name == ID), b"")
    return own_id.decode() if _VALID_ID.fullmatch(own_id) else uuid.uuid4().hex


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def lost(log_format: AccessLog | None, count: int) -> str:
    """The line that stands for `count` others that were not read in time."""
    return json.dumps({"time": now(), "lost": count}) if log_format == "json" else f"{now()} lost {count}"


class RequestLog:
    """Writes a line for each request if `log_format` is given, else for those with a status of 400 or more.

    The client gets the line's id in the header x-request-id, which may be its own. `write(line)` must not raise.
    """

    def __init__(self, app: Any, log_format: AccessLog | None, write: Callable[[str], None]):
        self.app, self.log_format, self.write = app, log_format, write

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        own = id_of(scope)
        began, status, sent = time.perf_counter(), 0, 0
        told: dict[str, str] = {}
        scope[TOLD] = told

        async def noted(message: dict) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (ID, own.encode())]}
            sent += len(message.get("body", b""))
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            if self.log_format is not None or status >= 400:
                seconds = time.perf_counter() - began
                self.write(self._line(scope, own, status, sent, seconds, told))

    def _line(self, scope: dict, own: str, status: int, sent: int, seconds: float, told: dict[str, str]) -> str:
        """status 0: the client had gone before it was answered."""
        fields = {
            "time": now(),
            "id": own,
            "client": scope["client"][0] if scope.get("client") else "",
            "method": scope["method"],
            "path": shortened(quote(scope["path"])),
            "status": status,
            "bytes": sent,
            "seconds": round(seconds, 6),
            **told,
        }
        if self.log_format == "json":
            return json.dumps(fields)
        return " ".join(json.dumps(value) if name == "error" else str(value) for name, value in fields.items())
