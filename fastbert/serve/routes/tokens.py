"""text-embeddings-inference's routes that tell of tokens: /tokenize, /decode, /embed_all and /embed_sparse."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import Tokenizer

from fastbert.data.chunks.job import ChunkJob, on_host
from fastbert.data.long_texts.pieces import uncut
from fastbert.data.tokenized import Tokenized
from fastbert.serve import schemas
from fastbert.serve.engine import ChunkSequence
from fastbert.serve.routes.token_ids import check_ids, tokens_of

if TYPE_CHECKING:
    from fastbert.serve.app import Server


def states_job(model: Any, sequences: list[dict[str, np.ndarray]]) -> ChunkJob[Any]:
    """What gives the last hidden state of each token: float32 (tokens, hidden_size) of each sequence."""
    ids = [one["input_ids"] for one in sequences]
    types = [one["token_type_ids"] for one in sequences] if "token_type_ids" in sequences[0] else None
    offsets = np.cumsum([0, *map(len, ids)])
    tokenized: Any = Tokenized(
        np.concatenate(ids), None if types is None else np.concatenate(types), offsets, np.arange(len(ids))
    )

    def reduce(packed: torch.Tensor, places: np.ndarray) -> list[np.ndarray]:
        return np.split(on_host(packed), np.cumsum(tokenized.lengths[places])[:-1])

    return ChunkJob(tokenized, model.model.last_hidden_state, reduce, list)


def weights_of(rows: list[np.ndarray], check: Callable[[int], None]) -> list[list[dict[str, Any]]]:
    """Of each vector (vocabulary,) the words that are not 0. `check(words of all)` raises where there are too many."""
    words = [np.flatnonzero(row) for row in rows]
    check(sum(map(len, words)))
    return [
        [{"index": i, "value": value} for i, value in zip(places.tolist(), row[places], strict=True)]
        for row, places in zip(rows, words, strict=True)
    ]


class TokenRoutes:
    """Of a server's model."""

    def __init__(self, server: Server):
        self.server = server

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Which cuts what is more than a request may have."""
        bounded = uncut(self.server.engine.model.tokenizer)
        bounded.enable_truncation(self.server.limits.max_request_tokens)
        return bounded

    async def tokenize(self, asked: schemas.TokenizeRequest) -> Any:
        began, server = time.perf_counter(), self.server
        prompt = server.prompt(asked.prompt_name)
        server.limits.check_count("inputs", asked.inputs)
        texts = [prompt + text for text in asked.inputs]
        check = partial(server.limits.check_tokens, "inputs")
        make = partial(tokens_of, self.tokenizer, texts, asked.add_special_tokens, check)
        return await server.run_tokenizer(texts, began, make)

    async def decode(self, asked: schemas.DecodeRequest) -> Any:
        began, server, ids = time.perf_counter(), self.server, asked.ids
        server.limits.check_count("ids", ids)
        server.limits.check_tokens("ids", sum(map(len, ids)))
        check_ids("ids", ids, server.words)
        tokenizer = server.engine.model.tokenizer
        make = partial(tokenizer.decode_batch, ids, skip_special_tokens=asked.skip_special_tokens)
        return await server.run_tokenizer(ids, began, make)

    async def embed_all(self, asked: schemas.TokensRequest) -> Any:
        """A vector for each token of each input."""
        server = self.server
        prepared = await server.tokenized("inputs", asked.inputs, server.prompt(asked.prompt_name), asked)
        server.limits.check_numbers("inputs", sum(prepared.lengths), server.engine.model.model.config.hidden_size)
        job = states_job(server.engine.model, prepared.sequences)
        return await server.compute(
            replace(prepared, sequences=[ChunkSequence(job, i) for i in range(len(prepared.lengths))])
        )

    async def embed_sparse(self, asked: schemas.TokensRequest) -> Any:
        """Of each input the words of the vocabulary that have a weight."""
        server = self.server
        prepared = await server.tokenized("inputs", asked.inputs, server.prompt(asked.prompt_name), asked)
        rows = await server.compute(prepared)
        return await asyncio.to_thread(weights_of, rows, partial(server.limits.check_weights, "inputs"))
