"""What type checkers see of the methods whose arguments say whether an array, a tensor or a list comes back.

The methods' own docstrings say what the arguments mean; all but the first are checked where they are named. The last
signature of each is for flags that are known at run time only: what comes back is then known at run time, too.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol, TypedDict, overload

import numpy as np
import torch
from typing_extensions import Unpack

from fastbert.data.chunks import Windows
from fastbert.data.tokenized import Text
from fastbert.sentences.encoder import OutputValue
from fastbert.sentences.pool import ProcessPool
from fastbert.sentences.reranker import Activation
from fastbert.sentences.similarity import Precision
from fastbert.sentences.text_model import Aggregate, Devices

Texts = str | Iterable[Text]
Pairs = Iterable[Sequence[str]] | Sequence[str]
Tensors = torch.Tensor | list[torch.Tensor]  # of one input, or of many
Rows = dict[str, Any] | list[dict[str, Any]]

class Common(TypedDict, total=False):
    """What all of the methods take, and what no type goes by."""

    prompt_name: str | None
    prompt: str | None
    batch_size: int | None
    show_progress_bar: bool | None
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

class OfTensors(OfVectors, total=False):
    convert_to_numpy: bool

class OfTokens(OfTensors, total=False):
    convert_to_tensor: bool

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

class OfScoreTensors(OfScores, total=False):
    convert_to_numpy: bool

class Encode(Protocol):
    """SentenceEncoder.encode, encode_query and encode_document."""

    @overload
    def __call__(
        self,
        inputs: Texts,
        *arguments: Any,
        output_value: Literal["sentence_embedding"] = "sentence_embedding",
        convert_to_numpy: Literal[True] = True,
        convert_to_tensor: Literal[False] = False,
        **options: Unpack[OfVectors],
    ) -> np.ndarray: ...
    @overload
    def __call__(
        self,
        inputs: Texts,
        *arguments: Any,
        output_value: Literal["sentence_embedding"] = "sentence_embedding",
        convert_to_tensor: Literal[True],
        **options: Unpack[OfTensors],
    ) -> torch.Tensor: ...
    @overload
    def __call__(
        self,
        inputs: Texts,
        *arguments: Any,
        output_value: Literal["sentence_embedding"] = "sentence_embedding",
        convert_to_numpy: Literal[False],
        convert_to_tensor: Literal[False] = False,
        **options: Unpack[OfVectors],
    ) -> Tensors: ...
    @overload
    def __call__(
        self, inputs: Texts, *arguments: Any, output_value: Literal["token_embeddings"], **options: Unpack[OfTokens]
    ) -> Tensors: ...
    @overload
    def __call__(self, inputs: Texts, *arguments: Any, output_value: None, **options: Unpack[OfTokens]) -> Rows: ...
    @overload
    def __call__(
        self, inputs: Texts, *arguments: Any, output_value: OutputValue | None = ..., **options: Unpack[OfTokens]
    ) -> Any: ...

class EncodeSparse(Protocol):
    """SparseEncoder.encode, encode_query and encode_document."""

    @overload
    def __call__(
        self, inputs: Texts, *arguments: Any, convert_to_tensor: Literal[True] = True, **options: Unpack[OfSparse]
    ) -> torch.Tensor: ...
    @overload
    def __call__(
        self, inputs: Texts, *arguments: Any, convert_to_tensor: Literal[False], **options: Unpack[OfSparse]
    ) -> Tensors: ...
    @overload
    def __call__(self, inputs: Texts, *arguments: Any, convert_to_tensor: bool, **options: Unpack[OfSparse]) -> Any: ...

class Score(Protocol):
    """Reranker.predict."""

    @overload
    def __call__(
        self,
        inputs: Pairs,
        *arguments: Any,
        convert_to_numpy: Literal[True] = True,
        convert_to_tensor: Literal[False] = False,
        **options: Unpack[OfScores],
    ) -> np.ndarray: ...
    @overload
    def __call__(
        self, inputs: Pairs, *arguments: Any, convert_to_tensor: Literal[True], **options: Unpack[OfScoreTensors]
    ) -> torch.Tensor: ...
    @overload
    def __call__(
        self,
        inputs: Pairs,
        *arguments: Any,
        convert_to_numpy: Literal[False],
        convert_to_tensor: Literal[False] = False,
        **options: Unpack[OfScores],
    ) -> Tensors: ...
    @overload
    def __call__(
        self, inputs: Pairs, *arguments: Any, convert_to_tensor: bool = ..., **options: Unpack[OfScoreTensors]
    ) -> Any: ...
