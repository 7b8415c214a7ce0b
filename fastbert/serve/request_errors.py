"""Answers other than 200: one sentence that says what is wrong, in the form that the route's clients read."""

from __future__ import annotations

from starlette.responses import Response

from fastbert.serve import json_text

# text-embeddings-inference's statuses by its kinds of error; from "json" on they are plain HTTP's.
STATUS = {
    "validation": 422,
    "tokenizer": 422,
    "empty": 400,
    "overloaded": 429,
    "backend": 424,
    "unhealthy": 503,
    "json": 400,
    "unauthorized": 401,
    "not_found": 404,
    "too_large": 413,
    "slow": 408,
    "timeout": 503,
    "stopping": 503,
}
RETRY_AFTER_S = "1"


class RequestError(Exception):
    """A request that is not answered; `kind` is a key of STATUS."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


def error_response(path: str, kind: str, message: str, status: int | None = None) -> Response:
    """OpenAI's form below /v1, elsewhere text-embeddings-inference's."""
    status = STATUS[kind] if status is None else status
    if path.startswith("/v1/"):
        status = 400 if status == 422 else status  # OpenAI's clients know 400 as a bad request
        family = "invalid_request_error" if status < 500 and status not in (424, 429) else "server_error"
        content: dict = {"error": {"message": message, "type": family, "param": None, "code": kind}}
    else:
        content = {"error": message, "error_type": kind}
    headers = {"retry-after": RETRY_AFTER_S} if status in (429, 503) else {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(json_text.dumps(content), status, headers, "application/json")
