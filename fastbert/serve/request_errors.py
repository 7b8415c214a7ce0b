"""Answers other than 200: one sentence that says what is wrong, in the form that the route's clients read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from fastbert.serve import json_text
from fastbert.serve.metrics import TIMES, Metrics

# text-embeddings-inference's statuses by its kinds of error; from "json" on they are plain HTTP's.
STATUS = {
    "validation": 422,
    "empty": 400,
    "overloaded": 429,
    "backend": 424,
    "unhealthy": 503,
    "json": 400,
    "unauthorized": 401,
    "not_found": 404,
    "too_large": 413,
    "media": 415,
    "slow": 408,
    "timeout": 503,
    "stopping": 503,
    "internal": 500,
}
RETRY_AFTER_S = "1"
TOLD = "fastbert.told"  # where the scope has what the request's line in the log says of an error
MOST_CHARS = 400  # of a sentence: it may repeat what it refuses
API = ("/v1/", "/v2/")  # below them are OpenAI's, Jina's and Cohere's routes


class RequestError(Exception):
    """A request that is not answered; `kind` is a key of STATUS."""

    def __init__(self, error_type: str, message: str):
        super().__init__(message)
        self.kind = error_type


def route_path(scope: Mapping[str, Any]) -> str:
    """The path of a request below the server's root path."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


def status_at(path: str, status: int) -> int:
    """The status that a route's clients know: OpenAI's have 400 for a bad request."""
    return 400 if status == 422 and path.startswith(API) else status


def shortened(message: str) -> str:
    """Without the middle, if it is long: what was sent stands there, and what there is at the end."""
    half = MOST_CHARS // 2
    return message if len(message) <= MOST_CHARS else f"{message[: half - 3]}...{message[-half:]}"


def error_response(
    scope: Mapping[str, Any],
    error_type: str,
    message: str,
    status: int | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """OpenAI's form below /v1, elsewhere text-embeddings-inference's."""
    path, message = route_path(scope), shortened(message)
    scope.get(TOLD, {}).update(kind=error_type, error=message)
    status = status_at(path, STATUS[error_type] if status is None else status)
    if path.startswith(API):
        family = "invalid_request_error" if status < 500 and status not in (424, 429) else "server_error"
        content: dict = {"error": {"message": message, "type": family, "param": None, "code": error_type}}
    else:
        content = {"error": message, "error_type": error_type}
    sent = {**(headers or {}), **({"retry-after": RETRY_AFTER_S} if status in (429, 503) else {})}
    if status == 401:
        sent["www-authenticate"] = "Bearer"
    return Response(json_text.dumps(content), status, sent, "application/json")


def answer_errors(app: FastAPI, metrics: Metrics, there: list[str]) -> None:
    """`there`: the paths that the model has."""

    @app.exception_handler(RequestError)
    async def refuse(request: Request, error: RequestError) -> Response:
        metrics.failures.labels(error.kind).inc()
        return error_response(request.scope, error.kind, str(error))

    @app.exception_handler(Exception)
    async def fail(request: Request, error: Exception) -> Response:
        metrics.failures.labels("internal").inc()
        told = "the server failed; what it wrote to stderr says where"
        times = TIMES.get(None)  # of a POST; its answer goes by no other layer that would tell them
        headers = {} if times is None else dict([times.header()])
        return error_response(request.scope, "internal", told, headers=headers)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        asked = f"{request.method} {route_path(request.scope)}"
        message = f"{asked}: {error.detail}; of this model {', '.join(there)} take POST"
        return error_response(request.scope, "not_found", message, error.status_code, error.headers)
