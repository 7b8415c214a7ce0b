"""What type checkers see of the methods whose arguments say whether an array, a tensor or a list comes back.

The methods' own docstrings say what the arguments mean. Behind the literal True and False the last signature of each is
for flags that are known at run time only: what comes back is then known at run time, too.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol, TypedDict, overload

import numpy as np
import torch
from typing_extensions import Unpack

from fastbert.data.tokenized import Text
from fastbert.data.windows import Windows
from fastbert.sentences.encoder import OutputValue
from fastbert.sentences.pool import ProcessPool
from fastbert.sentences.reranker import Activation
from fastbert.sentences.similarity import Precision
from fastbert.sentences.text_model import Aggregate, Devices

Tensors = torch.Tensor | list[torch.Tensor]  # of one input, or of many
Rows = dict[str, Any] | list[dict[str, Any]]

class Common(TypedDict, total=False):
    """What all of the methods take, and what no type goes by."""

    device: Devices | None
    pool: ProcessPool | None
    chunk_size: int | None
    batch_tokens: int | None

class OfVectors(Common, total=False):
    precision: Precision | None
    normalize_embeddings: bool
    truncate_dim: int | None
    task: str | None
    normalize: bool | None
    windows: Windows | None

class OfSparse(Common, total=False):
    convert_to_sparse_tensor: bool
    save_to_cpu: bool
    max_active_dims: int | None
    task: str | None

class OfScores(Common, total=False):
    activation_fn: Activation | None
    apply_softmax: bool
    windows: Windows | None
    aggregate: Aggregate | None

class Encode(Protocol):
    """SentenceEncoder.encode, encode_query and encode_document."""

    @overload
    def __call__(
        self,
        inputs: str | Iterable[Text],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        *,
        output_value: Literal["sentence_embedding"] = "sentence_embedding",
        convert_to_numpy: Literal[True] = True,
        convert_to_tensor: Literal[False] = False,
        **options: Unpack[OfVectors],
    ) -> np.ndarray: ...
    @overload
    def __call__(
        self,
        inputs: str | Iterable[Text],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        *,
        output_value: Literal["sentence_embedding"] = "sentence_embedding",
        convert_to_numpy: bool = True,
        convert_to_tensor: Literal[True],
        **options: Unpack[OfVectors],
    ) -> torch.Tensor: ...
    @overload
    def __call__(
        self,
        inputs: str | Iterable[Text],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        *,
        output_value: Literal["sentence_embedding"] = "sentence_embedding",
        convert_to_numpy: Literal[False],
        convert_to_tensor: Literal[False] = False,
        **options: Unpack[OfVectors],
    ) -> Tensors: ...
    @overload
    def __call__(
        self,
        inputs: str | Iterable[Text],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        *,
        output_value: Literal["token_embeddings"],
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        **options: Unpack[OfVectors],
    ) -> Tensors: ...
    @overload
    def __call__(
        self,
        inputs: str | Iterable[Text],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        *,
        output_value: None,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        **options: Unpack[OfVectors],
    ) -> Rows: ...
    @overload
    def __call__(
        self,
        inputs: str | Iterable[Text],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        *,
        output_value: OutputValue | None = "sentence_embedding",
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        **options: Unpack[OfVectors],
    ) -> Any: ...

class EncodeSparse(Protocol):
    """SparseEncoder.encode, encode_query and encode_document."""

    @overload
    def __call__(
        self,
        inputs: str | Iterable[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        *,
        convert_to_tensor: Literal[True] = True,
        **options: Unpack[OfSparse],
    ) -> torch.Tensor: ...
    @overload
    def __call__(
        self,
        inputs: str | Iterable[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        *,
        convert_to_tensor: Literal[False],
        **options: Unpack[OfSparse],
    ) -> Tensors: ...
    @overload
    def __call__(
        self,
        inputs: str | Iterable[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        *,
        convert_to_tensor: bool,
        **options: Unpack[OfSparse],
    ) -> Any: ...

class Score(Protocol):
    """Reranker.predict."""

    @overload
    def __call__(
        self,
        inputs: Iterable[Sequence[str]] | Sequence[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        *,
        convert_to_numpy: Literal[True] = True,
        convert_to_tensor: Literal[False] = False,
        **options: Unpack[OfScores],
    ) -> np.ndarray: ...
    @overload
    def __call__(
        self,
        inputs: Iterable[Sequence[str]] | Sequence[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        *,
        convert_to_numpy: bool = True,
        convert_to_tensor: Literal[True],
        **options: Unpack[OfScores],
    ) -> torch.Tensor: ...
    @overload
    def __call__(
        self,
        inputs: Iterable[Sequence[str]] | Sequence[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        *,
        convert_to_numpy: Literal[False],
        convert_to_tensor: Literal[False] = False,
        **options: Unpack[OfScores],
    ) -> Tensors: ...
    @overload
    def __call__(
        self,
        inputs: Iterable[Sequence[str]] | Sequence[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        *,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        **options: Unpack[OfScores],
    ) -> Any: ...
