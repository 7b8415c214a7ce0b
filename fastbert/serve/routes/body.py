"""What stands in a request's body: JSON, in UTF-8 and as it is, from a client that says so."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from fastbert.serve import json_text
from fastbert.serve.admission import BODY
from fastbert.serve.request_errors import RequestError

JSON = "application/json"
_NOT_UTF8 = (b"\x1f\x8b", b"\xff\xfe", b"\xfe\xff")  # gzip's first bytes, UTF-16's


def read_json(scope: MutableMapping[str, Any]) -> dict[str, Any]:
    """The object in the body of an ASGI request. Raises RequestError, also for one that no client of an API sends.

    A web page may have its reader's browser send a form, or plain text, to any address without asking there first.
    JSON it may not. Browsers say which page they send for; a client that is none may leave out the content type.
    """
    headers = dict(scope["headers"])  # the last of each name
    coding = headers.get(b"content-encoding", b"identity").decode("latin-1").strip()
    if coding.lower() != "identity":
        raise RequestError("media", f"content-encoding is {coding!r}; a body is taken as it is, not compressed")
    content_type = headers.get(b"content-type", b"").decode("latin-1")
    media_type, _, parameters = content_type.partition(";")
    if media_type.strip().lower() != JSON and (content_type or b"origin" in headers):
        raise RequestError("media", f"content-type is {content_type!r}; it must be {JSON}")
    charset = parameters.lower().partition("charset=")[2].strip(' "')
    body: bytes = scope[BODY]
    if charset not in ("", "utf-8", "utf8") or body[:2] in _NOT_UTF8 or b"\0" in body[:2]:
        raise RequestError("media", "the body is not in UTF-8, as JSON is: it is compressed, or has another charset")
    try:
        content = json_text.loads(body)
    except ValueError as error:
        raise RequestError("json", f"the body is not JSON: {_told(body, error)}") from None
    if not isinstance(content, dict):
        raise RequestError("validation", f"the body is {json_text.json_type(content)}; it must be an object")
    return content


def _told(body: bytes, error: ValueError) -> str:
    try:
        body.decode()
    except UnicodeDecodeError as broken:
        return f"byte {broken.start} is no UTF-8"
    return str(error)
