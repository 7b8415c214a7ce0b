"""What a server accepts, and what it says to more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fastbert.data.chunks import CHECK
from fastbert.serve.request_errors import RequestError

MAX_NUMBERS = 1 << 23  # of the vectors of an answer: 2,048 of 4,096
MAX_WEIGHTS = 1 << 20  # of sparse vectors, each an object of an index and a value: 2,048 texts with 512 words each
MAX_CHARACTERS = 1 << 24  # of the texts of chunks: one long word may stand in hundreds that overlap

Made = TypeVar("Made")


@dataclass(frozen=True)
class Limits:
    """The defaults are text-embeddings-inference's, but for what it lacks: the timeout, and the tokens of a request, of
    which there may be as many as at OpenAI. The checks raise RequestError.
    """

    max_concurrent_requests: int = 512
    max_client_batch_size: int = 32
    max_request_tokens: int = 300_000
    payload_limit: int = 2_000_000
    timeout_s: float = 60.0
    auto_truncate: bool = False

    def check_count(self, field: str, inputs: Sequence[Any], limit: int | None = None, width: int = 0) -> None:
        """Whether there are inputs, and no more than `limit`; None: as many as most routes take. width: numbers of an
        answer for each.
        """
        limit = self.max_client_batch_size if limit is None else limit
        if not inputs:
            raise RequestError("empty", f"{field} is empty")
        if len(inputs) > limit:
            raise RequestError("validation", f"{field} has {len(inputs)} texts; a request may have {limit}")
        self.check_numbers(field, len(inputs), width)

    def check_tokens(self, field: str, tokens: int) -> None:
        """`tokens`: of all texts and chunks, or of those that were counted so far."""
        limit = self.max_request_tokens
        if tokens > limit:
            raise RequestError("too_large", f"{field} has more than the {limit:,} tokens that a request may have")

    def check_numbers(self, field: str, vectors: int, width: int) -> None:
        """Whether the `vectors` of an answer, or those of it that were counted so far, are not too many."""
        if vectors * width > MAX_NUMBERS:
            told = f"{field} would have at least {vectors:,} vectors of {width:,} numbers"
            raise RequestError("too_large", f"{told}; an answer may have {MAX_NUMBERS:,} numbers in all")

    def check_weights(self, field: str, weights: int) -> None:
        """Of the sparse vectors of an answer, all together."""
        if weights > MAX_WEIGHTS:
            told = f"{field} has vectors with {weights:,} words that have a weight"
            raise RequestError("too_large", f"{told}; an answer may have {MAX_WEIGHTS:,} in all")

    def check_characters(self, field: str, characters: int) -> None:
        """Of the texts in an answer, all together."""
        if characters > MAX_CHARACTERS:
            told = f"{field} has chunks of {characters:,} characters"
            raise RequestError("too_large", f"{told}; an answer may have {MAX_CHARACTERS:,} characters of texts in all")

    def cutting(self, field: str, make: Callable[[], Made], width: int = 0) -> Callable[[], Made]:
        """`make`, which cuts texts into chunks, and now builds none if there would be too many. width: numbers of an
        answer for each chunk.
        """

        def check(chunks: int, tokens: int) -> None:
            self.check_tokens(field, tokens)
            self.check_numbers(field, chunks, width)

        def checked() -> Made:
            before = CHECK.set(check)
            try:
                return make()
            finally:
                CHECK.reset(before)

        return checked

    def late(self) -> RequestError:
        return RequestError("timeout", f"not answered within {self.timeout_s:g} s: try again later")
