"""What requests may hold: the fields of text-embeddings-inference's routes, and of OpenAI's, Jina's and Cohere's.

Others are refused. An optional field may be null, which is as if it were not there.
"""

from __future__ import annotations

import reprlib
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, WithJsonSchema

from fastbert.data.chunks import POOLS
from fastbert.data.chunks.answers import AnswerAggregate
from fastbert.data.chunks.words import WordAggregate
from fastbert.sentences.text_model import Aggregate
from fastbert.serve.json_text import json_type as kind_of
from fastbert.serve.request_errors import RequestError

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOL: Schema = {"type": "boolean"}


def array(items: Schema, **bounds: Any) -> Schema:
    return {"type": "array", "items": items, **bounds}


def record(optional: tuple[str, ...] = (), **properties: Schema) -> Schema:
    """An object with these properties alone, of which the `optional` may be absent."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


# Marks in angle brackets stand for what a model and a server have: openapi.py puts it there.
SOME: dict[str, Any] = {"minItems": 1, "maxItems": "<inputs>"}
ID: Schema = {"type": "integer", "minimum": 0, "maximum": "<last id>"}
TEXTS = array(TEXT, **SOME)
IDS = array(ID, minItems=1)
ONE_OR_TWO = array(TEXT, minItems=1, maxItems=2)


def is_whole(value: Any) -> bool:
    """JSON has one kind of number: 3.0 is 3."""
    return type(value) is int or (type(value) is float and value.is_integer())


class Ids(list):
    """Sequences of token ids, instead of texts."""


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError(f"it is {kind_of(value)}; it must be a text or a list of texts")
    for i, text in enumerate(value):
        if not isinstance(text, str):
            raise ValueError(f"entry {i} is {kind_of(text)}, not a text")
    return value


def _texts_or_ids(value: Any) -> list[str] | Ids:
    """A text, the token ids of one, or a list of either. 1.0 is no id, as for text-embeddings-inference and OpenAI."""
    if not isinstance(value, list) or not value or type(value[0]) not in (list, int, float):
        return _texts(value)
    is_one = not isinstance(value[0], list)
    for i, row in enumerate([value] if is_one else value):
        subject = "" if is_one else f"entry {i}"
        if not isinstance(row, list):
            raise ValueError(f"{subject} is {kind_of(row)}, and entry 0 is a list of token ids")
        for j, one in enumerate(row):
            if type(one) is not int:
                found = one if type(one) is float else kind_of(one)
                told = f"id {j} is {found}; token ids are whole numbers, without a point or an exponent"
                raise ValueError(f"{subject} {told}".lstrip())
    return Ids([value] if is_one else value)


class Inputs(list):
    """Texts and pairs of texts. `is_one`: the request had one by itself, and not a list of such."""

    is_one = False


def _inputs(value: Any) -> Inputs:
    """A text, a pair of texts, or a list of lists of one or two texts: text-embeddings-inference's three forms."""
    if isinstance(value, str):
        value, is_one = [[value]], True
    elif isinstance(value, list) and value and isinstance(value[0], str):
        value, is_one = [value], True
    else:
        is_one = False
    if not isinstance(value, list):
        raise ValueError(
            f"it is {kind_of(value)}; it must be a text, a pair of texts, or a list of lists of 1 or 2 texts"
        )
    inputs = Inputs()
    for i, entry in enumerate(value):
        if not isinstance(entry, list) or len(entry) not in (1, 2) or not all(isinstance(t, str) for t in entry):
            subject = "it" if is_one else f"entry {i}"
            raise ValueError(f"{subject} is no list of 1 or 2 texts; several texts are [[text], [text], ...]")
        inputs.append(entry[0] if len(entry) == 1 else tuple(entry))
    inputs.is_one = is_one
    return inputs


_WINDOWS: dict[str, Any] = {"length": int, "overlap": (int, float), "pool": str, "limit": int, "at": str}


def _windows(value: Any) -> dict[str, Any] | bool:
    """What is said of chunks, each of a kind that it may have; true: nothing."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, dict):
        raise ValueError(f"it is {kind_of(value)}; it must be a truth value, or an object with {', '.join(_WINDOWS)}")
    said = {name: int(entry) if is_whole(entry) else entry for name, entry in value.items() if entry is not None}
    for name, entry in said.items():
        if name not in _WINDOWS:
            raise ValueError(f"unknown {reprlib.repr(name)}; known are: {', '.join(_WINDOWS)}")
        if not isinstance(entry, _WINDOWS[name]) or isinstance(entry, bool):
            raise ValueError(f"{name} is {kind_of(entry)}")
    return said


def _objects(value: Any, *names: str) -> list[dict[str, str]]:
    """An object of texts, or a list of such, with these names alone."""
    entries = value if isinstance(value, list) else [value]
    for i, one in enumerate(entries):
        if not isinstance(one, dict) or not set(names) <= set(one):
            raise ValueError(f"entry {i} is no object with {' and '.join(names)}")
        for name, text in one.items():
            if name not in names:
                raise ValueError(f"entry {i}: unknown {reprlib.repr(name)}; known are: {', '.join(names)}")
            if not isinstance(text, str):
                raise ValueError(f"entry {i}: {name} is {kind_of(text)}, not a text")
    return entries


class Questions(list):
    """Questions and their texts. `is_one` as of Inputs."""

    is_one = False


def _questions(value: Any) -> Questions:
    """A question and its text, or a list of such objects: those of Hugging Face's pipelines."""
    questions = Questions((one["question"], one["context"]) for one in _objects(value, "question", "context"))
    questions.is_one = isinstance(value, dict)
    return questions


def _sentences(value: Any) -> list[str]:
    """The sentence that others are compared with, and then these."""
    if not isinstance(value, dict) or set(value) != {"source_sentence", "sentences"}:
        raise ValueError("it is no object with source_sentence and sentences, and nothing else")
    if not isinstance(value["source_sentence"], str):
        raise ValueError(f"source_sentence is {kind_of(value['source_sentence'])}, not a text")
    if not isinstance(value["sentences"], list):
        raise ValueError(f"sentences is {kind_of(value['sentences'])}, not a list of texts")
    return [value["source_sentence"], *_texts(value["sentences"])]


def _documents(value: Any) -> list[str]:
    """Texts, or objects with a `text`: Jina's and Cohere's form."""
    if not isinstance(value, list):
        raise ValueError(f"it is {kind_of(value)}; it must be a list of texts")
    texts = []
    for i, one in enumerate(value):
        text = one.get("text") if isinstance(one, dict) and set(one) == {"text"} else one
        if not isinstance(text, str):
            raise ValueError(f"entry {i} is {kind_of(one)}; it must be a text, or an object with a text and no more")
        texts.append(text)
    return texts


def _nullable(schema: Schema) -> Schema:
    return either(schema, {"type": "null"})


QUESTION = record(question=TEXT, context=TEXT)
WINDOWS = record(
    tuple(_WINDOWS),
    length=_nullable({"type": "integer", "minimum": 1}),
    overlap=_nullable({"type": "number", "minimum": 0}),
    pool=_nullable({"enum": list(POOLS)}),
    limit=_nullable({"type": "integer", "minimum": 1}),
    at=_nullable({"enum": ["tokens", "sentences"]}),
)
Texts = Annotated[list[str], BeforeValidator(_texts), WithJsonSchema(either(TEXT, TEXTS))]
TextsOrIds = Annotated[
    Any, BeforeValidator(_texts_or_ids), WithJsonSchema(either(TEXT, TEXTS, IDS, array(array(ID), **SOME)))
]
TextsOrPairs = Annotated[
    Any,
    BeforeValidator(_inputs),
    WithJsonSchema(either(TEXT, ONE_OR_TWO, array(ONE_OR_TWO, **SOME))),
]
WindowsOf = Annotated[Any, BeforeValidator(_windows), WithJsonSchema(either(BOOL, WINDOWS))]
QuestionsOf = Annotated[Any, BeforeValidator(_questions), WithJsonSchema(either(QUESTION, array(QUESTION, **SOME)))]
Sentences = Annotated[
    list[str], BeforeValidator(_sentences), WithJsonSchema(record(source_sentence=TEXT, sentences=TEXTS))
]
Documents = Annotated[
    list[str], BeforeValidator(_documents), WithJsonSchema(array(either(TEXT, record(text=TEXT)), **SOME))
]
Dimensions = Annotated[int | None, Field(ge=1, json_schema_extra={"maximum": "<width>"})]
PromptName = Annotated[str | None, Field(json_schema_extra={"enum": "<prompts>"})]
ModelName = Annotated[str | None, Field(json_schema_extra={"enum": "<names>"})]
Side = Literal["Left", "left", "Right", "right"]


class Request(BaseModel):
    """`takes_parameters`: all fields beside `inputs` may stand in an object `parameters`, as Hugging Face's clients put
    them; `by_pipeline` is then set: the answer has the form of its pipelines.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    takes_parameters: ClassVar[bool] = True
    _by_pipeline: bool = PrivateAttr(False)

    @property
    def by_pipeline(self) -> bool:
        return self._by_pipeline


class Truncating(Request):
    truncate: bool | None = None
    truncation_direction: Side | None = None  # None: the model's own


class EmbedRequest(Truncating):
    inputs: TextsOrIds
    normalize: bool = True
    prompt_name: PromptName = None
    dimensions: Dimensions = None
    encoding_format: Literal["float", "base64"] = "float"
    windows: WindowsOf = None  # fastbert's own


class TokensRequest(Truncating):
    """Of /embed_all and /embed_sparse."""

    inputs: TextsOrIds
    prompt_name: PromptName = None


class SimilarityRequest(Truncating):
    inputs: Sentences
    prompt_name: PromptName = None


class ChunksRequest(Request):
    inputs: Texts
    windows: WindowsOf = None
    late: bool = False
    return_text: bool = False
    normalize: bool = True
    prompt_name: PromptName = None
    dimensions: Dimensions = None


class RerankRequest(Truncating):
    takes_parameters = False
    query: str
    texts: list[str] = Field(json_schema_extra=SOME)
    raw_scores: bool = False
    return_text: bool = False
    windows: WindowsOf = None
    aggregate: Aggregate | None = None


class PredictRequest(Truncating):
    inputs: TextsOrPairs
    raw_scores: bool = False
    windows: WindowsOf = None
    aggregate: Aggregate | None = None


class EntitiesRequest(Request):
    inputs: Texts
    windows: WindowsOf = None
    aggregate: WordAggregate = "core"


class AnswersRequest(Request):
    inputs: QuestionsOf
    windows: WindowsOf = None
    aggregate: AnswerAggregate = "logits"
    no_answer: bool | None = None


class TokenizeRequest(Request):
    inputs: Texts
    add_special_tokens: bool = True
    prompt_name: PromptName = None


def _ids(value: Any) -> Ids:
    ids = _texts_or_ids(value)
    if not isinstance(ids, Ids):
        raise ValueError("it must be a list of token ids, or a list of such lists")
    return ids


class DecodeRequest(Request):
    takes_parameters = False
    ids: Annotated[Any, BeforeValidator(_ids), WithJsonSchema(either(IDS, array(array(ID), **SOME)))]
    skip_special_tokens: bool = True


class OpenAIRequest(Request):
    takes_parameters = False
    input: TextsOrIds
    model: ModelName = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Dimensions = None
    user: str | None = None  # whom the client works for: of no use here


class RankingRequest(Request):
    """Jina's and Cohere's."""

    takes_parameters = False
    query: str
    documents: Documents
    model: ModelName = None
    top_n: int | None = Field(None, ge=1)
    return_documents: bool = False


R = TypeVar("R", bound=Request)


def parse(content: dict[str, Any], request_type: type[R]) -> R:
    """The request in a body's object. Raises RequestError with the first thing that is wrong."""
    if not request_type.takes_parameters or content.get("parameters") is None:
        return _parse(
            {k: v for k, v in content.items() if k != "parameters"} if request_type.takes_parameters else content,
            request_type,
        )
    content, parameters = dict(content), content["parameters"]
    del content["parameters"]
    if not isinstance(parameters, dict):
        raise RequestError("validation", f"parameters: it is {kind_of(parameters)}; it must be an object")
    for name in content.keys() & request_type.model_fields.keys():
        if content[name] is not None and not request_type.model_fields[name].is_required():
            raise RequestError("validation", f"{name} stands beside parameters; it must be there, or all of them here")
    for name in parameters:
        if name in request_type.model_fields and request_type.model_fields[name].is_required():
            raise RequestError("validation", f"{name} is in parameters; it must stand beside them")
    request = _parse({**content, **parameters}, request_type)  # what is null beside them is not said
    request._by_pipeline = True
    return request


def _parse(content: dict[str, Any], request_type: type[R]) -> R:
    fields, said = request_type.model_fields, {}
    for name, value in content.items():
        if name not in fields:
            message = f"unknown field {reprlib.repr(name)}; known are: {', '.join(fields)}"
            raise RequestError("validation", message)
        if value is not None or fields[name].is_required():
            said[name] = int(value) if is_whole(value) else value
    try:
        return request_type.model_validate(said)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path, own = ".".join(str(part) for part in first["loc"]), first["msg"].removeprefix("Value error, ")
        value = "" if first["type"] in ("value_error", "missing") else f"; it is {reprlib.repr(first['input'])}"
        raise RequestError("validation", f"{path}: {own}{value}") from None


def json_schema(request_type: type[Request]) -> Schema:
    """Of a request's body."""
    body = request_type.model_json_schema()
    optional = {}
    for name, schema in body["properties"].items():
        if name not in body["required"]:
            has_null = {"type": "null"} in schema.get("anyOf", ())
            optional[name] = schema if has_null else _nullable(schema)
    body["properties"] |= optional
    if not request_type.takes_parameters:
        return body
    beside, within = dict(body), dict(body)
    beside["properties"] = body["properties"] | {"parameters": {"type": "null"}}
    needed = {name: body["properties"][name] for name in body["required"]}
    nulls: Schema = {name: {"type": "null"} for name in optional}
    within["properties"] = needed | nulls | {"parameters": record(tuple(optional), **optional)}
    within["required"] = [*body["required"], "parameters"]
    return either(beside, within)
