"""The routes: text-embeddings-inference's, and those of OpenAI's, Jina's, Cohere's and Hugging Face's clients."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from fastbert.data.chunks import Windows
from fastbert.data.chunks.answers import Answers
from fastbert.data.chunks.job import ChunkJob
from fastbert.errors import InputError
from fastbert.native.memory import give_back
from fastbert.sentences import MultiVectorEncoder
from fastbert.sentences.documents import CHUNKS, chunks_job
from fastbert.sentences.spans.question_answerer import QuestionAnswerer
from fastbert.sentences.text_model import Aggregate, InferenceOptions
from fastbert.serve import schemas
from fastbert.serve.admission import AdmissionControl
from fastbert.serve.answers import as_json, by_pipeline, encoded, finished, predictions, ranked, ranking, unit_length
from fastbert.serve.batching import Batcher, ComputeError
from fastbert.serve.engine import ChunkSequence, Engine
from fastbert.serve.limits import Limits
from fastbert.serve.metrics import TIMES, Metrics
from fastbert.serve.request_errors import RequestError, answer_errors
from fastbert.serve.routes import openapi
from fastbert.serve.routes.api import API_INPUTS, ApiRoutes
from fastbert.serve.routes.body import read_json
from fastbert.serve.routes.openapi import Route
from fastbert.serve.routes.table import routes_of
from fastbert.serve.routes.token_ids import check_ids, cutting_at, sequences_of_ids, side_of
from fastbert.serve.tokenizing import Tokenizing
from fastbert.version import __version__

Made = TypeVar("Made")
GIVE_BACK_S = 10.0  # in a minute 13 MB of what eight clients' texts had used came together


async def give_back_now_and_then() -> None:
    """Free memory to the system, forever."""
    while True:
        await asyncio.sleep(GIVE_BACK_S)
        await asyncio.to_thread(give_back)


def make_app(
    engine: Engine,
    limits: Limits,
    api_key: str | None = None,
    *,
    batch_tokens: int,
    workers: int,
    threads: int,
    spare: bool = False,
    cors_origins: Sequence[str] = (),
) -> FastAPI:
    """The application; its lifespan has the threads that compute, a Batcher's. cors_origins: whose web pages may use
    it.
    """
    server = Server(engine, limits, batch_tokens)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        on_batch = server.metrics.on_batch
        server.batcher = Batcher(engine.compute, batch_tokens, workers, threads, on_batch, spare=spare)
        server.metrics.queue_size.set_function(lambda: server.batcher.waiting)
        giving_back = asyncio.create_task(give_back_now_and_then())
        yield
        giving_back.cancel()
        server.batcher.close()

    app = FastAPI(title="fastbert", version=__version__, lifespan=lifespan, redoc_url=None)
    app.state.outcomes = server.metrics.outcomes
    routes = routes_of(server, api := ApiRoutes(server))
    own_routes = [route for route in routes if engine.model_type in route.model_types]
    for route in routes:
        app.add_route(route.path, server.answering(route), methods=["POST"])
    app.add_route("/", server.answering_at_root(own_routes), methods=["POST"])
    gets: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/health": server.health,
        "/live": server.health,
        "/metrics": server.page,
        "/info": server.info,
        "/v1/models": api.models,
        "/v1/models/{name:path}": api.model,
    }
    for path, answer in gets.items():
        app.add_route(path, answer, methods=["GET"])  # and HEAD
    document = openapi.document(engine, limits, own_routes, has_key=api_key is not None, api_inputs=API_INPUTS)
    app.openapi = lambda: document  # type: ignore[method-assign]
    answer_errors(app, server.metrics, [route.path for route in own_routes])
    app.add_middleware(
        AdmissionControl,
        metrics=server.metrics,
        api_key=api_key,
        max_requests=limits.max_concurrent_requests,
        max_bytes=limits.payload_limit,
        timeout_s=limits.timeout_s,
    )
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    return app


@dataclass(frozen=True)
class Prepared:
    """Inputs of a request that are ready to be computed. field: where they stood. began: when it came, of
    time.perf_counter.
    """

    field: str
    sequences: list[Any]
    lengths: list[int]
    count: int
    began: float


class Server:
    """The routes of one model."""

    batcher: Batcher

    def __init__(self, engine: Engine, limits: Limits, batch_tokens: int):
        self.engine, self.limits, self.batch_tokens, self.metrics = engine, limits, batch_tokens, Metrics()
        self.tokenizing = Tokenizing()
        self.words = engine.model.model.base_model.table_sizes().words
        self._cutting = {side_of(engine.model.tokenizer): engine}  # by the side at which they cut

    def answering(self, route: Route) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            self._check_model_type(route.model_types)
            return await self._answer(route, read_json(request.scope))

        return answer

    def answering_at_root(self, routes: list[Route]) -> Callable[[Request], Awaitable[Response]]:
        """For clients that know the server's address alone: what the model is for. Hugging Face's sends sentences that
        are to be compared there, too.
        """
        similarity = next((route for route in routes if route.path == "/similarity"), routes[0])

        async def answer(request: Request) -> Response:
            content = read_json(request.scope)
            return await self._answer(similarity if isinstance(content.get("inputs"), dict) else routes[0], content)

        return answer

    async def _answer(self, route: Route, content: dict[str, Any]) -> Response:
        return await as_json(await route.handle(schemas.parse(content, route.request)))

    async def embed(self, asked: schemas.EmbedRequest) -> Any:
        width = self.width(asked.dimensions)
        self.limits.check_count("inputs", asked.inputs, width=width)
        options = self._options(asked.windows, self.prompt(asked.prompt_name))
        if options.windows is not None and isinstance(asked.inputs, schemas.Ids):
            raise RequestError("validation", "windows: chunks are of texts, and inputs are token ids: leave it out")
        rows = await self._rows("inputs", asked.inputs, asked, options)
        return encoded(finished(rows, asked.dimensions, asked.normalize), asked.encoding_format)

    async def similarity(self, asked: schemas.SimilarityRequest) -> Any:
        """The cosine of the first text's vector with those of the others."""
        options = self._options(None, self.prompt(asked.prompt_name))
        vectors = unit_length(
            await self._rows("inputs.sentences", asked.inputs, asked, options, "inputs.source_sentence")
        )
        return vectors[1:] @ vectors[0]

    async def chunks(self, asked: schemas.ChunksRequest) -> Any:
        if asked.windows is False:
            raise RequestError("validation", "windows: it is false; for chunks it must be true, an object or absent")
        inputs, width = asked.inputs, self.width(asked.dimensions)
        options = self._options(asked.windows, self.prompt(asked.prompt_name), base=CHUNKS)
        chunked = await self._run_job(
            "inputs", inputs, lambda model: chunks_job(model, inputs, options, asked.late), width
        )
        if asked.return_text:
            self.limits.check_characters("inputs", int((chunked.ends - chunked.starts).sum()))
        vectors = finished(chunked.vectors, asked.dimensions, asked.normalize)
        per_input: list[list[dict[str, Any]]] = [[] for _ in inputs]
        places = (each.tolist() for each in (chunked.documents, chunked.starts, chunked.ends))
        for vector, i, start, end in zip(vectors, *places, strict=True):
            text = {"text": inputs[i][start:end]} if asked.return_text else {}
            per_input[i].append({"start": start, "end": end, **text, "embedding": vector})
        return per_input

    async def entities(self, asked: schemas.EntitiesRequest) -> Any:
        inputs, windows = asked.inputs, self._options(asked.windows).windows
        per_input = await self._run_job(
            "inputs", inputs, lambda model: model.entities_job(inputs, windows, asked.aggregate)
        )
        if not asked.by_pipeline:
            return per_input
        renamed = [by_pipeline(one) for one in per_input]
        return renamed[0] if len(renamed) == 1 else renamed

    async def answers(self, asked: schemas.AnswersRequest) -> Any:
        windows = self._options(asked.windows).windows

        def job(model: QuestionAnswerer) -> ChunkJob[Answers]:
            return model.answers_job(asked.inputs, windows, asked.aggregate, asked.no_answer)

        columns = await self._run_job("inputs", asked.inputs, job)
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        return rows[0] if asked.by_pipeline and asked.inputs.is_one else rows

    async def rerank(self, asked: schemas.RerankRequest) -> Any:
        if isinstance(self.engine.model, MultiVectorEncoder):
            if asked.windows or asked.aggregate is not None:
                raise RequestError("validation", "windows and aggregate are for cross-encoders; this model is none")
            scores, _ = await self.token_scores("texts", asked.query, asked.texts, asked)
            return ranked(scores, asked.texts if asked.return_text else None)
        pairs = [(asked.query, text) for text in asked.texts]
        options = self._options(asked.windows, aggregate=asked.aggregate)
        texts = asked.texts if asked.return_text else None
        if options.windows is None or options.aggregate == "vectors":  # which gives passages no scores
            logits = await self._rows("texts", pairs, asked, options)
            return ranking(self.engine, logits, asked.raw_scores, texts)
        text_logits, passages = await self._run_job("texts", pairs, lambda model: model.passages_job(pairs, options))
        return ranking(self.engine, text_logits.cpu().numpy(), asked.raw_scores, texts, passages)

    async def predict(self, asked: schemas.PredictRequest) -> Any:
        options = self._options(asked.windows, aggregate=asked.aggregate)
        logits = await self._rows("inputs", asked.inputs, asked, options)
        label_scores = predictions(self.engine, logits, asked.raw_scores)
        return label_scores[0] if asked.inputs.is_one and not asked.by_pipeline else label_scores

    async def health(self, request: Request) -> Response:
        if not self.batcher.is_alive:
            raise RequestError("unhealthy", "a thread that computes has ended")
        return Response()

    async def page(self, request: Request) -> Response:
        return Response(self.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def info(self, request: Request) -> Response:
        model, labels = self.engine.model, {str(i): label for i, label in enumerate(self.engine.labels)}
        has_width = self.engine.model_type in ("embedding", "sparse", "multi-vector")
        says: dict[str, Any] = {"dim": self.engine.width} if has_width else {}
        if labels:
            says = {"id2label": labels, "label2id": {label: int(i) for i, label in labels.items()}}
        return await as_json(
            {
                "model_id": self.engine.name,
                "model_dtype": str(model.dtype).removeprefix("torch."),
                "model_type": {self.engine.model_type: says},
                "max_concurrent_requests": self.limits.max_concurrent_requests,
                "max_input_length": model.max_seq_length,
                "max_batch_tokens": self.batch_tokens,
                "max_client_batch_size": self.limits.max_client_batch_size,
                "auto_truncate": self.limits.auto_truncate,
                "version": __version__,
            }
        )

    def _check_model_type(self, model_types: tuple[str, ...]) -> None:
        if self.engine.model_type not in model_types:
            raise RequestError(
                "backend", f"{self.engine.name} is no {' or '.join(model_types)} model: it is {self.engine.model_type}"
            )

    def prompt(self, name: str | None) -> str:
        try:
            return self.engine.model.prompt(name)
        except InputError as error:
            raise RequestError("validation", f"prompt_name: {error}") from None

    def _options(
        self, asked: Any, prompt: str = "", aggregate: Aggregate | None = None, base: Windows | None = None
    ) -> InferenceOptions:
        """Those of a request: its chunks as it says, and what it leaves out as in `base`, or as the model has it.

        Raises RequestError.
        """
        windows = self.engine.model.windows if base is None else base
        try:
            if asked is False:
                windows = None
            elif asked is not None:
                windows = replace(Windows() if windows is None else windows, **({} if asked is True else asked))
            return replace(self.engine.options, prompt=prompt, windows=windows, aggregate=aggregate)
        except InputError as error:
            raise RequestError("validation", f"windows: {error}") from None

    async def _rows(
        self,
        field: str,
        inputs: list[Any],
        asked: schemas.Truncating,
        options: InferenceOptions,
        first: str | None = None,
    ) -> np.ndarray:
        """The vectors, or logits, of inputs, which are one sequence each, or are cut into windows: (inputs, width)."""
        if options.windows is None:
            prepared = await self.tokenized(
                field, inputs, options.prompt, asked, first=first, has_windows=first is None
            )
            return np.stack(await self.compute(prepared))
        return await self._run_job(
            field, inputs, lambda model: model.job(inputs, options).then(lambda rows: rows.cpu().numpy())
        )

    async def token_scores(
        self,
        field: str,
        query: str,
        texts: list[str],
        asked: schemas.Truncating | None = None,
        limit: int | None = None,
    ) -> tuple[np.ndarray, int]:
        """MaxSim of a query with each text, float32, and how many tokens they have. Raises RequestError."""
        prepared = await self.tokenized(field, [query, *texts], "", asked, limit=limit, first="query", ranks=True)
        rows = await self.compute(prepared)
        assert isinstance(self.engine.model, MultiVectorEncoder)
        scores = await asyncio.to_thread(self.engine.model.similarity, rows[:1], rows[1:])
        return scores[0].numpy(), sum(prepared.lengths)

    async def tokenized(
        self,
        field: str,
        inputs: list[Any],
        prompt: str = "",
        asked: schemas.Truncating | None = None,
        *,
        limit: int | None = None,
        first: str | None = None,
        has_windows: bool = False,
        ranks: bool = False,
    ) -> Prepared:
        """Inputs of a request, which may say whether and where they are cut, checked and tokenised.

        first: another field, which the first of the inputs is. has_windows: the route can read longer texts. ranks:
        they are a multi-vector model's, a query and documents. Raises RequestError for what is too many or too long.
        """
        began = time.perf_counter()
        self._come(inputs)
        self.limits.check_count(field, inputs if first is None else inputs[1:], limit)
        truncate = None if asked is None else asked.truncate
        cuts = self.limits.auto_truncate if truncate is None else truncate
        engine = await self._cutting_at(asked.truncation_direction) if cuts and asked is not None else self.engine
        if isinstance(inputs, schemas.Ids):
            self.limits.check_tokens(field, sum(map(len, inputs)))
            check_ids(field, inputs, self.words)
            make = partial(sequences_of_ids, engine.model, inputs, prompt)
        else:
            make = partial(engine.tokenize_ranked, inputs, cuts)
            make = make if ranks else partial(engine.tokenize, inputs, prompt, cuts)
        sequences, lengths, cut = await self.run_tokenizer(inputs, began, make)
        if cut is not None and not cuts:
            name = f"{field}[{cut}]" if first is None else f"{field}[{cut - 1}]" if cut else first
            most = engine.limit_of("document" if cut else "query") if ranks else engine.model.max_seq_length
            told = f"{name} has more than {most} tokens, the model's limit"
            if asked is not None:
                told += "; with truncate it is cut" + ", and with windows it is read to its end" * has_windows
            raise RequestError("validation", told)
        return Prepared(field, sequences, lengths, len(inputs), began)

    async def run_tokenizer(self, inputs: list[Any], began: float, make: Callable[[], Made]) -> Made:
        """What `make()`, which tokenises them, gives of the inputs of a request that came at `began`."""
        try:
            result, seconds = await self.tokenizing.run(make, inputs, self.limits.timeout_s)
        except TimeoutError:
            raise self.limits.late() from None
        times = TIMES.get()
        times.tokenizing, times.waiting = seconds, time.perf_counter() - began - seconds
        self.metrics.tokenization.observe(seconds)
        return result

    async def _cutting_at(self, side: str | None) -> Engine:
        """The model that cuts texts there. Made when it is first asked for: it is one more tokenizer."""
        if side is None:
            return self.engine
        side = side.lower()
        if side not in self._cutting:
            self._cutting[side] = await asyncio.to_thread(cutting_at, self.engine, side)
        return self._cutting[side]

    async def _run_job(
        self, field: str, inputs: list[Any], make: Callable[[Any], ChunkJob[Any]], width: int = 0
    ) -> Any:
        """What the job that `make(model)` gives says of the inputs, `width` numbers of each chunk. Raises RequestError
        as `compute`, and for too many numbers.
        """
        start = time.perf_counter()
        self._come(inputs)
        self.limits.check_count(field, inputs)
        cut = self.limits.cutting(field, partial(make, self.engine.model), width)
        try:
            job = await self.run_tokenizer(inputs, start, cut)
        except InputError as error:
            raise RequestError("validation", f"windows: {error}") from None
        sequences = [ChunkSequence(job, i) for i in range(len(job.chunks))]
        rows = await self.compute(Prepared(field, sequences, job.chunks.lengths.tolist(), len(inputs), start))
        return await asyncio.to_thread(job.result, rows)

    async def compute(self, prepared: Prepared) -> list[np.ndarray]:
        """What the model makes of each sequence. Raises RequestError for what is too much or late, or fails."""
        self.limits.check_tokens(prepared.field, tokens := sum(prepared.lengths))
        job = self.batcher.submit(prepared.sequences, prepared.lengths)
        rest = prepared.began + self.limits.timeout_s - time.perf_counter()
        timer = asyncio.get_running_loop().call_later(rest, job.future.cancel)
        try:
            rows = await job.future
        except ComputeError as error:
            raise RequestError("backend", f"the model failed: {error}") from None
        except asyncio.CancelledError:
            if timer.when() > asyncio.get_running_loop().time():
                raise  # the client has gone
            raise self.limits.late() from None
        finally:
            timer.cancel()
        times = TIMES.get()
        times.waiting += job.started - job.submitted
        times.computing = job.finished - job.started
        self.metrics.on_request(prepared.count, tokens, time.perf_counter() - prepared.began, times)
        return rows

    def _come(self, inputs: list[Any]) -> None:
        self.metrics.requests.labels("single" if len(inputs) == 1 else "batch").inc()

    def width(self, dimensions: int | None) -> int:
        """Of vectors of which so many `dimensions` are asked for. Raises RequestError: they have fewer."""
        width = self.engine.width
        if dimensions is not None and dimensions > width:
            raise RequestError("validation", f"dimensions is {dimensions}; the model's vectors have {width}")
        return width if dimensions is None else dimensions
