"""What a server accepts, and what it says to more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastbert.serve.request_errors import RequestError


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

    def check_count(self, field: str, inputs: Sequence[Any], limit: int | None = None) -> None:
        """Whether there are inputs, and no more than `limit`; None: as many as most routes take."""
        limit = self.max_client_batch_size if limit is None else limit
        if not inputs:
            raise RequestError("empty", f"{field} is empty")
        if len(inputs) > limit:
            raise RequestError("validation", f"{field} has {len(inputs)} texts; a request may have {limit}")

    def check_tokens(self, field: str, tokens: int) -> None:
        limit = self.max_request_tokens
        if tokens > limit:
            raise RequestError("too_large", f"{field} has {tokens:,} tokens in all; a request may have {limit:,}")

    def late(self) -> RequestError:
        return RequestError("timeout", f"not answered within {self.timeout_s:g} s: try again later")
