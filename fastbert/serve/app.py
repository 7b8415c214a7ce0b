"""The routes: text-embeddings-inference's, and OpenAI's /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from fastbert.data.windows import Windows
from fastbert.data.windows.answers import Answers
from fastbert.data.windows.job import WindowJob
from fastbert.errors import InputError
from fastbert.sentences.documents import CHUNKS, chunks_job
from fastbert.sentences.spans.question_answerer import QuestionAnswerer
from fastbert.sentences.text_model import Aggregate, InferenceOptions
from fastbert.serve import json_text, schemas
from fastbert.serve.admission import BODY, AdmissionControl
from fastbert.serve.answers import predictions, ranking, unit_length
from fastbert.serve.batching import Batcher, ComputeError
from fastbert.serve.engine import Engine, WindowSequence
from fastbert.serve.metrics import Metrics
from fastbert.serve.request_errors import RequestError, error_response
from fastbert.version import __version__

ROUTES = {  # what "/" stands for, for each kind of model
    "embedding": "/embed",
    "reranker": "/rerank",
    "classifier": "/predict",
    "token-classifier": "/entities",
    "question-answerer": "/answers",
}
INLINE_CHARS = 2000  # tokenising more would hold up the other requests: a thread does it


@dataclass(frozen=True)
class Limits:
    """What a server accepts. The defaults are text-embeddings-inference's, but for the timeout, which it lacks."""

    max_concurrent_requests: int = 512
    max_client_batch_size: int = 32
    payload_limit: int = 2_000_000
    timeout_s: float = 60.0
    auto_truncate: bool = False


def make_app(
    engine: Engine, limits: Limits, api_key: str | None = None, *, batch_tokens: int, workers: int, threads: int
) -> FastAPI:
    """The application; its lifespan has the threads that compute."""
    server = Server(engine, limits, batch_tokens)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        server.batcher = Batcher(engine.compute, batch_tokens, workers, threads, server.metrics.on_batch)
        server.metrics.queue_size.set_function(lambda: server.batcher.waiting)
        yield
        server.batcher.close()

    app = FastAPI(title="fastbert", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.outcomes = server.metrics.outcomes
    posts: dict[str, tuple[Callable[[Request], Awaitable[Response]], type[BaseModel]]] = {
        "/embed": (server.embed, schemas.EmbedRequest),
        "/rerank": (server.rerank, schemas.RerankRequest),
        "/predict": (server.predict, schemas.PredictRequest),
        "/v1/embeddings": (server.openai_embeddings, schemas.OpenAIRequest),
        "/chunks": (server.chunks, schemas.ChunksRequest),
        "/entities": (server.entities, schemas.EntitiesRequest),
        "/answers": (server.answers, schemas.AnswersRequest),
    }
    for path, (route, schema) in posts.items():
        body = {"required": True, "content": {"application/json": {"schema": schema.model_json_schema()}}}
        app.post(path, openapi_extra={"requestBody": body})(route)
    whole = posts[ROUTES[engine.kind]][0]
    app.post("/", include_in_schema=False)(whole)  # for clients that know the server's address alone
    gets = {"/health": server.health, "/metrics": server.page, "/info": server.info, "/v1/models": server.openai_models}
    for path, answer in gets.items():
        app.get(path)(answer)

    @app.exception_handler(RequestError)
    async def refuse(request: Request, error: RequestError) -> Response:
        server.metrics.failures.labels(error.kind).inc()
        return error_response(request.url.path, error.kind, str(error))

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}; {', '.join(posts)} take POST"
        return error_response(request.url.path, "not_found", message, error.status_code)

    app.add_middleware(
        AdmissionControl,
        metrics=server.metrics,
        api_key=api_key,
        max_requests=limits.max_concurrent_requests,
        max_bytes=limits.payload_limit,
        timeout_s=limits.timeout_s,
    )
    return app


def as_json(content: Any) -> Response:
    return Response(json_text.dumps(content), media_type="application/json")


class Server:
    """The routes of one model."""

    batcher: Batcher

    def __init__(self, engine: Engine, limits: Limits, batch_tokens: int):
        self.engine, self.limits, self.batch_tokens, self.metrics = engine, limits, batch_tokens, Metrics()

    async def embed(self, request: Request) -> Response:
        asked = self._read(request, schemas.EmbedRequest, "embedding")
        options = self._options(asked.windows, self._prompt(asked.prompt_name))
        vectors = await self._rows("inputs", asked.inputs, asked.truncate, options)
        return as_json(self._vectors(vectors, asked.dimensions, asked.normalize))

    async def chunks(self, request: Request) -> Response:
        asked = self._read(request, schemas.ChunksRequest, "embedding")
        if asked.windows is False:
            raise RequestError("validation", "windows: chunks are windows: it is true, or an object")
        options, inputs = self._options(asked.windows, self._prompt(asked.prompt_name), base=CHUNKS), asked.inputs
        made = await self._run_job("inputs", inputs, lambda model: chunks_job(model, inputs, options, asked.late))
        vectors = self._vectors(made.vectors, asked.dimensions, asked.normalize)
        found: list[list[dict[str, Any]]] = [[] for _ in inputs]
        places = (each.tolist() for each in (made.documents, made.starts, made.ends))
        for vector, i, start, end in zip(vectors, *places, strict=True):
            text = {"text": inputs[i][start:end]} if asked.return_text else {}
            found[i].append({"start": start, "end": end, **text, "embedding": vector})
        return as_json(found)

    async def entities(self, request: Request) -> Response:
        asked = self._read(request, schemas.EntitiesRequest, "token-classifier")
        inputs, windows = asked.inputs, self._options(asked.windows).windows
        made = await self._run_job("inputs", inputs, lambda model: model.entities_job(inputs, windows, asked.aggregate))
        return as_json(made)

    async def answers(self, request: Request) -> Response:
        asked = self._read(request, schemas.AnswersRequest, "question-answerer")
        windows = self._options(asked.windows).windows

        def job(model: QuestionAnswerer) -> WindowJob[Answers]:
            return model.answers_job(asked.inputs, windows, asked.aggregate, asked.no_answer)

        columns = await self._run_job("inputs", asked.inputs, job)
        return as_json([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])

    async def openai_embeddings(self, request: Request) -> Response:
        asked = self._read(request, schemas.OpenAIRequest, "embedding")
        if asked.model not in (None, self.engine.name):
            raise RequestError("not_found", f"model {asked.model!r} is not served here; {self.engine.name!r} is")
        vectors, tokens = await self._run("input", asked.input, None, self._prompt(None))
        rows: Any = self._vectors(vectors, asked.dimensions, True)
        if asked.encoding_format == "base64":
            rows = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in rows]
        return as_json(
            {
                "object": "list",
                "data": [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)],
                "model": self.engine.name,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
        )

    async def rerank(self, request: Request) -> Response:
        asked = self._read(request, schemas.RerankRequest, "reranker")
        pairs = [(asked.query, text) for text in asked.texts]
        options = self._options(asked.windows, aggregate=asked.aggregate)
        texts = asked.texts if asked.return_text else None
        if options.windows is None or options.aggregate == "vectors":  # which gives passages no scores
            logits = await self._rows("texts", pairs, asked.truncate, options)
            return as_json(ranking(self.engine, logits, asked.raw_scores, texts))
        found, passages = await self._run_job("texts", pairs, lambda model: model.passages_job(pairs, options))
        return as_json(ranking(self.engine, found.cpu().numpy(), asked.raw_scores, texts, passages))

    async def predict(self, request: Request) -> Response:
        asked = self._read(request, schemas.PredictRequest, "reranker", "classifier")
        options = self._options(asked.windows, aggregate=asked.aggregate)
        logits = await self._rows("inputs", asked.inputs, asked.truncate, options)
        found = predictions(self.engine, logits, asked.raw_scores)
        return as_json(found[0] if asked.inputs.is_one else found)

    async def health(self) -> Response:
        if not self.batcher.is_alive:
            raise RequestError("unhealthy", "a thread that computes has ended")
        return Response()

    async def page(self) -> Response:
        return Response(self.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def info(self) -> Response:
        model, labels = self.engine.model, {str(i): label for i, label in enumerate(self.engine.labels)}
        says: dict[str, Any] = {"dim": self.engine.width} if self.engine.kind == "embedding" else {}
        if labels:
            says = {"id2label": labels, "label2id": {label: int(i) for i, label in labels.items()}}
        return as_json(
            {
                "model_id": self.engine.name,
                "model_dtype": str(model.dtype).removeprefix("torch."),
                "model_type": {self.engine.kind: says},
                "max_concurrent_requests": self.limits.max_concurrent_requests,
                "max_input_length": model.max_seq_length,
                "max_batch_tokens": self.batch_tokens,
                "max_client_batch_size": self.limits.max_client_batch_size,
                "auto_truncate": self.limits.auto_truncate,
                "version": __version__,
            }
        )

    async def openai_models(self) -> Response:
        model = {"id": self.engine.name, "object": "model", "created": 0, "owned_by": "fastbert"}
        return as_json({"object": "list", "data": [model]})

    def _read(self, request: Request, kind: type[schemas.R], *engines: str) -> schemas.R:
        if self.engine.kind not in engines:
            raise RequestError(
                "backend", f"{self.engine.name} is no {' or '.join(engines)} model: it is {self.engine.kind}"
            )
        return schemas.parse(request.scope[BODY], kind)

    def _prompt(self, name: str | None) -> str:
        try:
            return self.engine.model.prompt(name)
        except InputError as error:
            raise RequestError("validation", f"prompt_name: {error}") from None

    def _options(
        self, asked: Any, prompt: str = "", aggregate: Aggregate | None = None, base: Windows | None = None
    ) -> InferenceOptions:
        """Those of a request: its windows as it says, and what it leaves out as in `base`, or as the model has it.

        Raises RequestError.
        """
        windows = self.engine.model.windows if base is None else base
        try:
            if asked is not None:
                windows = None if asked is False else replace(windows or Windows(), **({} if asked is True else asked))
            return replace(self.engine.options, prompt=prompt, windows=windows, aggregate=aggregate)
        except InputError as error:
            raise RequestError("validation", f"windows: {error}") from None

    async def _rows(
        self, field: str, inputs: list[Any], truncate: bool | None, options: InferenceOptions
    ) -> np.ndarray:
        """The vectors, or logits, of inputs, which are one sequence each, or are cut into windows: (inputs, width)."""
        if options.windows is None:
            return (await self._run(field, inputs, truncate, options.prompt))[0]
        return await self._run_job(
            field, inputs, lambda model: model.job(inputs, options).then(lambda rows: rows.cpu().numpy())
        )

    async def _run(
        self, field: str, inputs: list[Any], truncate: bool | None, prompt: str = ""
    ) -> tuple[np.ndarray, int]:
        """(rows of the inputs, their tokens). Raises RequestError for what is too many, too long or late, or fails."""
        start = time.perf_counter()
        self._check_count(field, inputs)
        chars = sum(len(text) if isinstance(text, str) else len(text[0]) + len(text[1]) for text in inputs)
        try:
            if chars + len(prompt) * len(inputs) <= INLINE_CHARS:
                sequences, lengths, cut = self.engine.tokenize(inputs, prompt)
            else:
                sequences, lengths, cut = await asyncio.to_thread(self.engine.tokenize, inputs, prompt)
        except UnicodeEncodeError as error:
            raise RequestError("tokenizer", f"{field}: not valid Unicode: {error}") from None
        if cut is not None and not (self.limits.auto_truncate if truncate is None else truncate):
            limit = self.engine.model.max_seq_length
            raise RequestError("validation", f"{field}[{cut}] has more than {limit} tokens, the model's limit; "
                          "with truncate it is cut, and with windows it is read to its end")  # fmt: skip
        return np.stack(await self._compute(sequences, lengths, len(inputs), start)), sum(lengths)

    async def _run_job(self, field: str, inputs: list[Any], make: Callable[[Any], WindowJob[Any]]) -> Any:
        """What the job that `make(model)` gives says of the inputs. Raises RequestError as `_run`."""
        start = time.perf_counter()
        self._check_count(field, inputs)
        try:
            job = await asyncio.to_thread(make, self.engine.model)
        except UnicodeEncodeError as error:
            raise RequestError("tokenizer", f"{field}: not valid Unicode: {error}") from None
        except InputError as error:
            raise RequestError("validation", f"windows: {error}") from None
        sequences = [WindowSequence(job, i) for i in range(len(job.windows))]
        rows = await self._compute(sequences, job.windows.lengths.tolist(), len(inputs), start)
        return await asyncio.to_thread(job.result, rows)

    async def _compute(self, sequences: list[Any], lengths: list[int], count: int, start: float) -> list[np.ndarray]:
        """What the model makes of the sequences of `count` inputs, a request that came at `start`."""
        tokenized = time.perf_counter()
        job = self.batcher.submit(sequences, lengths)
        timer = asyncio.get_running_loop().call_later(self.limits.timeout_s, job.future.cancel)
        try:
            rows = await job.future
        except ComputeError as error:
            raise RequestError("backend", f"the model failed: {error}") from None
        except asyncio.CancelledError:
            if timer.when() > asyncio.get_running_loop().time():
                raise  # the client has gone
            raise RequestError("timeout", f"not answered within {self.limits.timeout_s:g} s: try again later") from None
        finally:
            timer.cancel()
        self._observe(count, sum(lengths), start, tokenized, job)
        return rows

    def _check_count(self, field: str, inputs: list[Any]) -> None:
        self.metrics.requests.labels("single" if len(inputs) == 1 else "batch").inc()
        if not inputs:
            raise RequestError("empty", f"{field} is empty")
        limit = self.limits.max_client_batch_size
        if len(inputs) > limit:
            raise RequestError("validation", f"{field} has {len(inputs)} texts; a request may have {limit}")

    def _observe(self, count: int, tokens: int, start: float, tokenized: float, job: Any) -> None:
        m = self.metrics
        m.successes.labels("single" if count == 1 else "batch").inc()
        m.tokenization.observe(tokenized - start)
        m.queue.observe(job.started - job.submitted)
        m.inference.observe(job.finished - job.started)
        m.duration.observe(time.perf_counter() - start)
        m.input_length.observe(tokens)

    def _vectors(self, vectors: np.ndarray, dimensions: int | None, normalize: bool) -> np.ndarray:
        if dimensions is not None:
            if dimensions > vectors.shape[1]:
                raise RequestError(
                    "validation", f"dimensions is {dimensions}; the model's vectors have {vectors.shape[1]}"
                )
            vectors = np.ascontiguousarray(vectors[:, :dimensions])
        return unit_length(vectors) if normalize else vectors
