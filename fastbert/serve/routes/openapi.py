"""What /openapi.json says: the routes of one model, what they take, and all that they answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, NamedTuple

from fastbert.serve.engine import Engine
from fastbert.serve.request_errors import API, STATUS, status_at
from fastbert.serve.schemas import BOOL, NUMBER, TEXT, WHOLE, Request, Schema, array, either, json_schema, record
from fastbert.version import __version__

MODEL_TYPES = ("embedding", "multi-vector", "sparse", "reranker", "classifier", "token-classifier", "question-answerer")
NULL: Schema = {"type": "null"}
REAL = either(NUMBER, NULL)  # null: not finite
VECTOR = array(REAL)
CODED = either(VECTOR, TEXT)  # text: base64
NUMBERS = VECTOR
VECTORS, TOKEN_VECTORS = array(CODED), array(array(VECTOR))
SPARSE = array(array(record(index=WHOLE, value=NUMBER)))
OFFSETS: dict[str, Any] = {"start": WHOLE, "end": WHOLE}
RANKING = array(record(("text", "start", "end"), index=WHOLE, text=TEXT, score=REAL, **OFFSETS))
LABEL = record(label=TEXT, score=REAL)
LABELS = either(array(LABEL), array(array(LABEL)))
SPAN: dict[str, Any] = {"score": REAL, **OFFSETS}
ENTITY = either(record(label=TEXT, text=TEXT, **SPAN), record(entity_group=TEXT, word=TEXT, **SPAN))
ENTITIES = either(array(array(ENTITY)), array(ENTITY))
ANSWER = record(answer=TEXT, **SPAN)
ANSWERS = either(ANSWER, array(ANSWER))
CHUNKS = array(array(record(("text",), text=TEXT, embedding=VECTOR, **OFFSETS)))
USAGE = record(prompt_tokens=WHOLE, total_tokens=WHOLE)
OPENAI = record(
    object={"const": "list"},
    data=array(record(object={"const": "embedding"}, index=WHOLE, embedding=CODED)),
    model=TEXT,
    usage=USAGE,
)
RANKED = record(
    id=TEXT,
    model=TEXT,
    results=array(record(("document",), index=WHOLE, relevance_score=REAL, document=record(text=TEXT))),
    usage=USAGE,
)
TOKENS = array(array(record(id=WHOLE, text=TEXT, special=BOOL, start=either(WHOLE, NULL), stop=either(WHOLE, NULL))))
DECODED = array(TEXT)
MODEL = record(id=TEXT, object={"const": "model"}, created=WHOLE, owned_by=TEXT)
INFO: Schema = {"type": "object", "required": ["model_id", "model_type", "max_input_length", "version"]}
_ID = str.maketrans("/", "_", "{}")
OF_A_POST = ("json", "slow", "too_large", "media", "validation", "backend", "overloaded", "timeout")  # kinds of errors


class Route(NamedTuple):
    """One that takes POST: what kinds of models have it, what is asked for, and the schema of what it answers."""

    path: str
    model_types: tuple[str, ...]
    handle: Callable[[Any], Awaitable[Any]]
    request: type[Request]
    answer: Schema


def document(engine: Engine, limits: Any, routes: list[Route], has_key: bool, api_inputs: int) -> Schema:
    """OpenAPI 3.1 of a model's routes. `api_inputs`: how many inputs those below /v1 take."""
    paths: dict[str, Any] = {}
    for route in routes:
        is_api = route.path.startswith(API)
        inputs = api_inputs if is_api else limits.max_client_batch_size
        error_types = (*OF_A_POST, *(["not_found"] if is_api else []), *(["unauthorized"] if has_key else []))
        asked = _filled(json_schema(route.request), _bounds(engine, inputs))
        paths[route.path] = {
            "post": {
                "operationId": route.path.translate(_ID).strip("_"),
                "requestBody": {"required": True, "content": {"application/json": {"schema": asked}}},
                "responses": {**_said(route.answer), **_errors(route.path, error_types)},
            }
        }
    key = ("unauthorized",) if has_key else ()
    gets: dict[str, dict] = {
        **{
            path: {"200": {"description": "it works"}, **_errors(path, ("unhealthy",))} for path in ("/health", "/live")
        },
        "/metrics": _said(TEXT, "text/plain"),
        "/info": {**_said(INFO), **_errors("/info", key)},
        "/v1/models": {**_said(record(object={"const": "list"}, data=array(MODEL))), **_errors("/v1/models", key)},
        "/v1/models/{name}": {**_said(MODEL), **_errors("/v1/models/", ("not_found", *key))},
    }
    for path, responses in gets.items():
        paths[path] = {"get": {"operationId": path.translate(_ID).strip("_"), "responses": responses}}
    paths["/v1/models/{name}"]["get"]["parameters"] = [
        {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "enum": [engine.name]}}
    ]
    spec: Schema = {"openapi": "3.1.0", "info": {"title": "fastbert", "version": __version__}, "paths": paths}
    if has_key:
        spec["components"] = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        spec["security"] = [{"key": []}]
        for path in ("/health", "/live", "/metrics"):
            paths[path]["get"]["security"] = []
    return spec


def _bounds(engine: Engine, inputs: int) -> dict[str, Any]:
    """What stands for the marks in schemas.py."""
    return {
        "<inputs>": inputs,
        "<last id>": engine.model.model.base_model.table_sizes().words - 1,
        "<width>": engine.width,
        "<prompts>": [None, *engine.model.prompts],
        "<names>": [None, engine.name],
    }


def _filled(schema: Any, bounds: dict[str, Any]) -> Any:
    if isinstance(schema, dict):
        return {name: _filled(value, bounds) for name, value in schema.items()}
    if isinstance(schema, list):
        return [_filled(value, bounds) for value in schema]
    return bounds.get(schema, schema) if isinstance(schema, str) else schema


def _said(schema: Schema, media: str = "application/json") -> dict[str, Any]:
    return {"200": {"description": "the answer", "content": {media: {"schema": schema}}}}


def _errors(path: str, error_types: tuple[str, ...]) -> dict[str, Any]:
    schema = record(error=TEXT, error_type=TEXT)
    if path.startswith(API):
        one = record(message=TEXT, type=TEXT, param=either(TEXT, NULL), code=TEXT)
        schema = record(error=one)
    statuses = sorted({status_at(path, STATUS[error_type]) for error_type in error_types})
    return {
        str(status): {
            "description": HTTPStatus(status).phrase,
            "content": {"application/json": {"schema": schema}},
        }
        for status in statuses
    }
