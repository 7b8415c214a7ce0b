"""What requests may hold: the fields of text-embeddings-inference's routes and of OpenAI's. Others are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from fastbert.data.windows.answers import AnswerAggregate
from fastbert.data.windows.words import WordAggregate
from fastbert.sentences.text_model import Aggregate
from fastbert.serve import json_text
from fastbert.serve.request_errors import RequestError

TEXT: dict[str, Any] = {"type": "string"}
TEXTS: dict[str, Any] = {"type": "array", "items": TEXT}
PAIR: dict[str, Any] = {"type": "array", "items": TEXT, "minItems": 2, "maxItems": 2}


def _kind(value: Any) -> str:
    kinds = {str: "text", bool: "truth value", int: "number", float: "number", list: "list", dict: "object"}
    return f"a {kinds[type(value)]}" if value is not None else "null"


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError(f"it is {_kind(value)}; it must be a text or a list of texts")
    for i, text in enumerate(value):
        if not isinstance(text, str):
            ids = ": token ids are not taken, send texts" if isinstance(text, int | list) else ""
            raise ValueError(f"entry {i} is {_kind(text)}, not a text{ids}")
    return value


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
            f"it is {_kind(value)}; it must be a text, a pair of texts, or a list of lists of 1 or 2 texts"
        )
    inputs = Inputs()
    for i, entry in enumerate(value):
        if not isinstance(entry, list) or len(entry) not in (1, 2) or not all(isinstance(t, str) for t in entry):
            place = "it" if is_one else f"entry {i}"
            raise ValueError(f"{place} is no list of 1 or 2 texts; several texts are [[text], [text], ...]")
        inputs.append(entry[0] if len(entry) == 1 else tuple(entry))
    inputs.is_one = is_one
    return inputs


Texts = Annotated[list[str], BeforeValidator(_texts), WithJsonSchema({"anyOf": [TEXT, TEXTS]})]
TextsOrPairs = Annotated[
    Any, BeforeValidator(_inputs), WithJsonSchema({"anyOf": [TEXT, PAIR, {"type": "array", "items": TEXTS}]})
]


_WINDOWS: dict[str, Any] = {"length": int, "overlap": (int, float), "pool": str, "limit": int, "at": str}


def _windows(value: Any) -> dict[str, Any] | bool | None:
    """What is said of windows, each of a kind that it may have; true: nothing."""
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, dict):
        raise ValueError(f"it is {_kind(value)}; it must be a truth value, or an object with {', '.join(_WINDOWS)}")
    for name, entry in value.items():
        if name not in _WINDOWS:
            raise ValueError(f"unknown {name!r}; known are: {', '.join(_WINDOWS)}")
        if not isinstance(entry, _WINDOWS[name]) or isinstance(entry, bool):
            raise ValueError(f"{name} is {_kind(entry)}")
    return value


def _questions(value: Any) -> list[tuple[str, str]]:
    """A question and its text, or a list of such objects: those of Hugging Face's pipelines."""
    found = []
    for i, one in enumerate(value if isinstance(value, list) else [value]):
        if not isinstance(one, dict) or set(one) != {"question", "context"}:
            raise ValueError(f"entry {i} is no object with question and context")
        for name, text in one.items():
            if not isinstance(text, str):
                raise ValueError(f"entry {i}: {name} is {_kind(text)}, not a text")
        found.append((one["question"], one["context"]))
    return found


NUMBER, WHOLE = {"type": "number"}, {"type": "integer"}
WINDOWS = {"length": WHOLE, "overlap": NUMBER, "pool": TEXT, "limit": WHOLE, "at": TEXT}
QUESTION = {"type": "object", "properties": {"question": TEXT, "context": TEXT}, "required": ["question", "context"]}
WindowsOf = Annotated[
    Any,
    BeforeValidator(_windows),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "object", "properties": WINDOWS}]}),
]
Questions = Annotated[
    Any, BeforeValidator(_questions), WithJsonSchema({"anyOf": [QUESTION, {"type": "array", "items": QUESTION}]})
]


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Truncating(Request):
    truncate: bool | None = None
    truncation_direction: Literal["Right", "right"] = "Right"


class EmbedRequest(Truncating):
    inputs: Texts
    normalize: bool = True
    prompt_name: str | None = None
    dimensions: int | None = Field(None, ge=1)
    windows: WindowsOf = None  # this and what follows: fastbert's own


class ChunksRequest(Request):
    inputs: Texts
    windows: WindowsOf = None
    late: bool = False
    return_text: bool = False
    normalize: bool = True
    prompt_name: str | None = None
    dimensions: int | None = Field(None, ge=1)


class RerankRequest(Truncating):
    query: str
    texts: list[str]
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
    inputs: Questions
    windows: WindowsOf = None
    aggregate: AnswerAggregate = "logits"
    no_answer: bool | None = None


class OpenAIRequest(Request):
    input: Texts
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    user: str | None = None  # whom the client works for: of no use here


R = TypeVar("R", bound=Request)


def parse(body: bytes, kind: type[R]) -> R:
    """The request in a body. Raises RequestError with the first thing that is wrong."""
    try:
        content = json_text.loads(body)
    except ValueError as error:
        raise RequestError("json", f"the body is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise RequestError("validation", f"the body is {_kind(content)}; it must be an object")
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            message = f"unknown field {place!r}; known are: {', '.join(kind.model_fields)}"
        else:
            message = f"{place}: {first['msg'].removeprefix('Value error, ')}"
        raise RequestError("validation", message) from None
