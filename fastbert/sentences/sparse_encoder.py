"""SparseEncoder: a weight for each word of the vocabulary, from a masked-LM head (SPLADE; Formal et al. 2021)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer

from fastbert import ops
from fastbert.checkpoint.weight_files import some
from fastbert.data.sentence_folder import FolderSettings, SpladePooling, read_splade
from fastbert.data.tokenized import Text
from fastbert.errors import CheckpointError, InputError
from fastbert.models.auto import AutoModelForMaskedLM
from fastbert.models.base import PreTrainedModel
from fastbert.models.masked_lm import MaskedLMHeadModel
from fastbert.packed_inputs import PackedInputs
from fastbert.sentences.batches import check_texts, encodes_sparse, longest_first
from fastbert.sentences.loading import LoadArguments, open_folder
from fastbert.sentences.pool import ProcessPool
from fastbert.sentences.similarity import HasSimilarity, Similarity
from fastbert.sentences.text_model import Devices, InferenceOptions, TextModel

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fastbert.sentences.saving import SavedModule

HEAD_TOKENS = 512  # tokens whose scores of all words are in memory at once: 62 MB for BERT's vocabulary


class SparseEncoder(TextModel, HasSimilarity):
    """Turns texts into sparse vectors of `dim` numbers, one for each word of the vocabulary."""

    model: MaskedLMHeadModel
    transformer_task, model_type = "fill-mask", "SparseEncoder"
    default_prompts = ("query", "document")

    def __init__(
        self,
        model_name_or_path: str | os.PathLike[str],
        *,
        similarity_fn_name: Similarity | str | Enum | None = None,
        max_active_dims: int | None = None,
        **options: Unpack[LoadArguments],
    ):
        """An encoder from a SPLADE folder of sentence-transformers, or from a plain masked-LM's: pooling by maximum.

        Args:
            model_name_or_path: a folder or a hub id.
            similarity_fn_name, max_active_dims: instead of what the folder says.
            options: see fastbert.sentences.loading.LoadArguments; the most used are `dtype` ("bfloat16", "int8", ...),
                `device` and `max_seq_length`.

        Raises:
            CheckpointError: a file is absent or damaged, or the checkpoint has no masked-LM head. ConfigError: fastbert
            does not have a module or a setting of the folder, the device is not there, or a value is out of range.
        """
        kinds = ("Transformer", "MLMTransformer")
        opened = open_folder(model_name_or_path, self.transformer_task, None, options, kinds)
        pooling = read_splade(opened.root)
        model = AutoModelForMaskedLM.from_pretrained(opened.folder, dtype=opened.dtype or "auto", **opened.config)
        if model.missing_keys:
            raise CheckpointError(f"{model_name_or_path} has no masked-LM head: it lacks {some(model.missing_keys)}")
        opened.quantised(model)
        settings = opened.settings
        limit = InferenceOptions(max_active_dims=max_active_dims).max_active_dims
        settings.max_active_dims = limit or settings.max_active_dims
        self._assemble(model, opened.tokenizer(), opened.length(model), settings, pooling)
        if similarity_fn_name is not None:
            self.similarity_fn_name = similarity_fn_name
        self.folder = opened.root

    def _assemble(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        max_seq_length: int,
        settings: FolderSettings | None = None,
        pooling: SpladePooling | None = None,
    ) -> None:
        super()._assemble(model, tokenizer, max_seq_length, settings)
        self.pooling = SpladePooling() if pooling is None else pooling
        self.dim = self.model.num_words()
        self.similarity_fn_name = self.settings.similarity_fn_name or "dot"
        self.max_active_dims = self.settings.max_active_dims

    def saved_modules(self) -> list[SavedModule]:
        from fastbert.sentences.saving import SavedModule

        chosen = {"pooling_strategy": self.pooling.strategy, "activation_function": self.pooling.activation}
        return [SavedModule("sparse_encoder.models.SpladePooling", chosen)]

    def saved_settings(self) -> dict[str, Any]:
        limit = {} if self.max_active_dims is None else {"max_active_dims": self.max_active_dims}
        return {"similarity_fn_name": self.similarity_fn_name, **limit}

    def get_embedding_dimension(self) -> int:
        return self.dim

    get_sentence_embedding_dimension = get_embedding_dimension  # what releases before 6 called it

    @encodes_sparse
    def encode(
        self,
        inputs: str | Iterable[Text],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        convert_to_tensor: bool = True,
        convert_to_sparse_tensor: bool = True,
        save_to_cpu: bool = False,
        device: Devices | None = None,
        max_active_dims: int | None = None,
        pool: ProcessPool | None = None,
        chunk_size: int | None = None,
        *,
        task: str | None = None,
        batch_tokens: int | None = None,
    ) -> Any:
        """The vectors of texts, in their order: a sparse COO tensor, float32, (number of texts, dim).

        Args:
            inputs: one string, which gives one vector (dim,), or many; some may be tuples of two, read as one input.
            prompt_name, prompt, batch_size, show_progress_bar, device, batch_tokens: as for SentenceEncoder.encode.
            convert_to_tensor: False gives a list of vectors.
            convert_to_sparse_tensor: False gives dense ones.
            save_to_cpu: the vectors go to the CPU, batch by batch.
            max_active_dims: only so many of the largest weights of each vector. Default: the model's own, mostly all.

        Raises:
            As SentenceEncoder.encode.
        """
        one, listed = isinstance(inputs, str), check_texts(inputs, pairs=True)
        if isinstance(device, list):
            raise InputError("a SparseEncoder runs on one device")
        options = InferenceOptions(
            prompt=self.prompt(prompt_name, prompt),
            batch_tokens=batch_tokens,
            batch_size=batch_size,
            max_active_dims=self.max_active_dims if max_active_dims is None else max_active_dims,
            on_host=save_to_cpu,
            task=task,
        )
        vectors = self.shared_rows(listed, options, show_progress_bar, device, pool, chunk_size)
        vectors = vectors if convert_to_sparse_tensor else vectors.to_dense()
        if one:
            return vectors[0]
        return vectors if convert_to_tensor else list(vectors)

    @encodes_sparse
    def encode_query(self, inputs: str | Iterable[Text], **options: Any) -> Any:
        """`encode` with the model's prompt for queries, if it has one and no other is asked for."""
        return self.encode(inputs, **self._of_task("query", options))

    @encodes_sparse
    def encode_document(self, inputs: str | Iterable[Text], **options: Any) -> Any:
        """`encode` with the model's prompt for documents, if it has one and no other is asked for."""
        return self.encode(inputs, **self._of_task("document", options))

    @staticmethod
    def sparsity(embeddings: torch.Tensor) -> dict[str, float]:
        """How many numbers of a vector are not 0, and the share of those that are: means, where there are several."""
        rows = embeddings if embeddings.dim() == 2 else embeddings[None]
        if not rows.numel():
            return {"active_dims": 0.0, "sparsity_ratio": 1.0}
        active = int((rows.coalesce().values() if rows.is_sparse else rows).count_nonzero()) / rows.shape[0]
        return {"active_dims": active, "sparsity_ratio": 1.0 - active / rows.shape[1]}

    @staticmethod
    def intersection(embeddings_1: torch.Tensor, embeddings_2: torch.Tensor) -> torch.Tensor:
        """The words that two vectors share: their products, where these are above 0, sparse (dim,) or (n, dim).

        embeddings_1 is (dim,); embeddings_2 is (dim,), or (n, dim). Raises InputError for other shapes.
        """
        shapes = tuple(embeddings_1.shape), tuple(embeddings_2.shape)
        if embeddings_1.dim() != 1 or embeddings_2.dim() not in (1, 2) or shapes[0][-1] != shapes[1][-1]:
            raise InputError(f"embeddings have the shapes {shapes[0]} and {shapes[1]}; (dim,) and (n, dim) go together")
        a, b = embeddings_1.to_dense(), embeddings_2.to_sparse().coalesce()
        values = b.values() * a[b.indices()[-1]]
        kept = values > 0
        where = b.indices()[:, kept]
        return torch.sparse_coo_tensor(where, values[kept], b.shape, is_coalesced=True, check_invariants=False)

    def decode(self, embeddings: torch.Tensor, top_k: int | None = None) -> list[Any]:
        """The (token, weight) pairs of a vector, the largest first; of several vectors a list of such lists.

        `top_k`: only so many of each. Raises InputError for less than 1.
        """
        if top_k is not None and top_k < 1:
            raise InputError(f"top_k is {top_k}; it must be at least 1")
        if embeddings.dim() == 2:
            return [self.decode(row, top_k) for row in embeddings]
        row = (embeddings if embeddings.is_sparse else embeddings.to_sparse()).coalesce()
        words, weights = row.indices()[0].tolist(), row.values().tolist()
        order = sorted(range(len(words)), key=lambda i: -weights[i])[:top_k]
        return [(self.tokenizer.id_to_token(words[i]), weights[i]) for i in order]

    def rows(
        self, inputs: list[Text], options: InferenceOptions, on_batch: Callable[[int], Any] = lambda texts: None
    ) -> torch.Tensor:
        device = torch.device("cpu") if options.on_host else self.device
        row_weights: list[torch.Tensor] = [torch.zeros(0, device=device)] * len(inputs)  # the weights that are not 0
        words: list[torch.Tensor] = [torch.zeros(0, device=device, dtype=torch.int64)] * len(inputs)
        for places, chunk in longest_first(inputs):
            tokenized = self.tokenize(chunk, options.prompt, options.task)
            for batch, vectors in self.run(tokenized, options, on_batch):
                text, word = vectors.nonzero(as_tuple=True)
                counts = text.bincount(minlength=len(batch)).tolist()
                weights, of_text = vectors[text, word].to(device), word.to(device).split(counts)
                for i, own, weight in zip(batch.tolist(), of_text, weights.split(counts), strict=True):
                    words[places[i]], row_weights[places[i]] = own, weight
        active = torch.tensor([len(own) for own in words], dtype=torch.int64, device=device)
        text = torch.arange(len(inputs), device=device).repeat_interleave(active)
        empty = torch.zeros(0, device=device)
        indices = torch.stack([text, torch.cat(words) if words else text])
        values = torch.cat(row_weights) if row_weights else empty
        shape = (len(inputs), self.dim)
        return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True, check_invariants=False)

    @torch.inference_mode()
    def compute(self, batch: PackedInputs, options: InferenceOptions) -> torch.Tensor:
        """The dense vectors, float32 (sequences, dim)."""
        batch = batch.to(self.device)
        hidden, cu_seqlens = self.model.base_model.last_hidden_state(batch), batch["batch"].cu_seqlens
        lengths, start = cu_seqlens.diff().tolist(), 0
        vectors = torch.empty(len(lengths), self.dim, device=self.device)
        for part in _runs(lengths, HEAD_TOKENS):
            end = start + sum(lengths[i] for i in part)
            offsets = cu_seqlens[part[0] : part[-1] + 2] - start
            vectors[part[0] : part[-1] + 1] = self._pooled(self.model.token_scores(hidden[start:end]), offsets)
            start = end
        if options.max_active_dims is None:
            return vectors
        kept = vectors.topk(min(options.max_active_dims, self.dim), dim=-1)
        return torch.zeros_like(vectors).scatter(-1, kept.indices, kept.values)

    def _pooled(self, scores: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """Scores of tokens (tokens, dim) -> weights (sequences, dim)."""
        # log(1 + max(x, 0)) never falls, so the largest of it is that of the largest score.
        by_max = self.pooling.strategy == "max"
        x = ops.pooling(scores, cu_seqlens, mode="max") if by_max else scores
        x = x.float().relu().log1p()
        x = x.log1p() if self.pooling.activation == "log1p_relu" else x
        if by_max:
            return x
        return ops.pooling(x, cu_seqlens, mode="mean") * (cu_seqlens[1:] - cu_seqlens[:-1])[:, None]


def _runs(lengths: list[int], most: int) -> Iterator[range]:
    """Neighbours of at most `most` tokens together, or one alone."""
    first, total = 0, 0
    for i, length in enumerate(lengths):
        if i > first and total + length > most:
            yield range(first, i)
            first, total = i, 0
        total += length
    yield range(first, len(lengths))
