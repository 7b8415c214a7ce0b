"""The table of the routes that take POST."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastbert.serve import schemas
from fastbert.serve.routes import openapi
from fastbert.serve.routes.api import ApiRoutes
from fastbert.serve.routes.openapi import MODEL_TYPES, Route
from fastbert.serve.routes.tokens import TokenRoutes

if TYPE_CHECKING:
    from fastbert.serve.app import Server


def routes_of(server: Server, api: ApiRoutes) -> list[Route]:
    """All POST routes. Of those that a kind of model has, the first is what "/" stands for."""
    tokens = TokenRoutes(server)
    return [
        Route("/embed", ("embedding",), server.embed, schemas.EmbedRequest, openapi.VECTORS),
        Route("/rerank", ("reranker", "multi-vector"), server.rerank, schemas.RerankRequest, openapi.RANKING),
        Route("/predict", ("classifier", "reranker"), server.predict, schemas.PredictRequest, openapi.LABELS),
        Route("/embed_sparse", ("sparse",), tokens.embed_sparse, schemas.TokensRequest, openapi.SPARSE),
        Route("/entities", ("token-classifier",), server.entities, schemas.EntitiesRequest, openapi.ENTITIES),
        Route("/answers", ("question-answerer",), server.answers, schemas.AnswersRequest, openapi.ANSWERS),
        Route("/v1/embeddings", ("embedding",), api.embeddings, schemas.OpenAIRequest, openapi.OPENAI),
        Route("/v1/rerank", ("reranker", "multi-vector"), api.rank_documents, schemas.RankingRequest, openapi.RANKED),
        Route("/v2/rerank", ("reranker", "multi-vector"), api.rank_documents, schemas.RankingRequest, openapi.RANKED),
        Route("/similarity", ("embedding",), server.similarity, schemas.SimilarityRequest, openapi.NUMBERS),
        Route("/chunks", ("embedding",), server.chunks, schemas.ChunksRequest, openapi.CHUNKS),
        Route("/embed_all", ("embedding",), tokens.embed_all, schemas.TokensRequest, openapi.TOKEN_VECTORS),
        Route("/tokenize", MODEL_TYPES, tokens.tokenize, schemas.TokenizeRequest, openapi.TOKENS),
        Route("/decode", MODEL_TYPES, tokens.decode, schemas.DecodeRequest, openapi.DECODED),
    ]
