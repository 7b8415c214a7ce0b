"""The routes below /v1, in the form of OpenAI's, Jina's and Cohere's clients."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from fastbert.sentences import MultiVectorEncoder
from fastbert.serve import schemas
from fastbert.serve.answers import as_json, encoded, finished, ranked, ranking
from fastbert.serve.request_errors import RequestError

if TYPE_CHECKING:
    from fastbert.serve.app import Server

API_INPUTS = 2048  # of a request, as OpenAI has it


class ApiRoutes:
    """Of a server's model."""

    def __init__(self, server: Server):
        self.server = server

    async def embeddings(self, asked: schemas.OpenAIRequest) -> Any:
        self.check_model(asked.model)
        width = self.server.width(asked.dimensions)
        self.server.limits.check_count("input", asked.input, API_INPUTS, width)
        prepared = await self.server.tokenized("input", asked.input, self.server.prompt(None), limit=API_INPUTS)
        vectors = finished(np.stack(await self.server.compute(prepared)), asked.dimensions, True)
        rows, tokens = encoded(vectors, asked.encoding_format), sum(prepared.lengths)
        return {
            "object": "list",
            "data": [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)],
            "model": self.server.engine.name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    async def rank_documents(self, asked: schemas.RankingRequest) -> Any:
        """In the form of Jina and Cohere."""
        self.check_model(asked.model)
        if isinstance(self.server.engine.model, MultiVectorEncoder):
            scores, tokens = await self.server.token_scores("documents", asked.query, asked.documents, limit=API_INPUTS)
            order = ranked(scores, None)
        else:
            pairs = [(asked.query, text) for text in asked.documents]
            prepared = await self.server.tokenized("documents", pairs, limit=API_INPUTS)
            tokens = sum(prepared.lengths)
            order = ranking(self.server.engine, np.stack(await self.server.compute(prepared)), False, None)
        results = []
        for one in order[: asked.top_n]:
            text = {"document": {"text": asked.documents[one["index"]]}} if asked.return_documents else {}
            results.append({"index": one["index"], "relevance_score": one["score"], **text})
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"id": str(uuid.uuid4()), "model": self.server.engine.name, "results": results, "usage": usage}

    async def models(self, request: Request) -> Response:
        return await as_json({"object": "list", "data": [self._as_model()]})

    async def model(self, request: Request) -> Response:
        self.check_model(request.path_params["name"])
        return await as_json(self._as_model())

    def _as_model(self) -> dict[str, Any]:
        return {"id": self.server.engine.name, "object": "model", "created": 0, "owned_by": "fastbert"}

    def check_model(self, name: str | None) -> None:
        if name not in (None, self.server.engine.name):
            raise RequestError("not_found", f"model {name!r} is not served here; {self.server.engine.name!r} is")
