"""SparseEncoder: a weight for each word of the vocabulary, from a masked-LM head (SPLADE; Formal et al. 2021)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from tokenizers import Tokenizer

from fastbert import ops
from fastbert.checkpoint.dtypes import parse_dtype
from fastbert.checkpoint.pretrained import CheckpointError, resolve
from fastbert.checkpoint.weight_files import some
from fastbert.data.sentence_folder import (
    Settings,
    SpladePooling,
    read_settings,
    read_splade,
    transformer_folder,
    transformer_settings,
)
from fastbert.data.tokenization import load_tokenizer
from fastbert.models.auto import AutoModelForMaskedLM
from fastbert.models.base import must_be_called
from fastbert.models.masked_lm import MaskedLMHeadModel
from fastbert.models.quantized import is_quantized, linears_of, make_int8
from fastbert.packing import InputError
from fastbert.sentences.batches import check_texts, longest_first, packed, token_batches
from fastbert.sentences.similarity import similarity, similarity_pairwise
from fastbert.sentences.text_model import Devices, RunOptions, TextModel, pick_device, position_limit

HEAD_TOKENS = 512  # tokens whose scores of all words are in memory at once: 62 MB for BERT's vocabulary


class SparseEncoder(TextModel):
    """Turns texts into sparse vectors of `dim` numbers, one for each word of the vocabulary."""

    model: MaskedLMHeadModel
    default_prompts = ("query", "document")

    def __init__(
        self,
        model: MaskedLMHeadModel,
        tokenizer: Tokenizer,
        max_seq_length: int,
        settings: Settings | None = None,
        pooling: SpladePooling | None = None,
    ):
        super().__init__(model, tokenizer, max_seq_length, settings)
        self.pooling = SpladePooling() if pooling is None else pooling
        self.dim = model.num_words()
        settings = Settings() if settings is None else settings
        self.similarity_fn_name = settings.similarity_fn_name or "dot"
        self.max_active_dims = settings.max_active_dims

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike,
        *,
        dtype: torch.dtype | str | None = "auto",
        device: torch.device | str | None = None,
        max_seq_length: int | None = None,
    ) -> SparseEncoder:
        """An encoder from a SPLADE folder of sentence-transformers, or from a plain masked-LM's: pooling by maximum.

        The arguments are those of SentenceEncoder.

        Raises:
            CheckpointError: a file is absent or damaged, or the checkpoint has no masked-LM head. ConfigError: fastbert
            does not have a module of the folder, the device is not there, or the length is out of range.
        """
        int8 = dtype in ("int8", torch.int8)
        root, device, torch_dtype = resolve(name_or_path), pick_device(device), None if int8 else parse_dtype(dtype)
        folder = transformer_folder(root, ("Transformer", "MLMTransformer"))
        pooling = read_splade(root)
        model = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch_dtype or "auto")
        if model.missing_keys:
            raise CheckpointError(f"{name_or_path} has no masked-LM head: it lacks {some(model.missing_keys)}")
        model.requires_grad_(False).to(device)
        if int8 and not is_quantized(model):
            make_int8(model, linears_of(model), {})
        settings, limit = transformer_settings(folder, "fill-mask"), position_limit(model)
        tokenizer = load_tokenizer(folder, lowercase=bool(settings.get("do_lower_case")))
        length = max_seq_length if max_seq_length is not None else min(settings.get("max_seq_length") or limit, limit)
        return cls(model, tokenizer, length, read_settings(root, folder), pooling)

    def get_embedding_dimension(self) -> int:
        return self.dim

    get_sentence_embedding_dimension = get_embedding_dimension  # what releases before 6 called it

    def encode(
        self,
        inputs: str | Iterable[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        convert_to_tensor: bool = True,
        convert_to_sparse_tensor: bool = True,
        save_to_cpu: bool = False,
        device: Devices | None = None,
        max_active_dims: int | None = None,
        *,
        batch_tokens: int | None = None,
    ) -> Any:
        """The vectors of texts, in their order: a sparse COO tensor, float32, (number of texts, dim).

        Args:
            inputs: one string, which gives one vector (dim,), or many.
            prompt_name, prompt, batch_size, show_progress_bar, device, batch_tokens: as for SentenceEncoder.encode.
            convert_to_tensor: False gives a list of vectors.
            convert_to_sparse_tensor: False gives dense ones.
            save_to_cpu: the vectors go to the CPU, batch by batch.
            max_active_dims: only so many of the largest weights of each vector. Default: the model's own, mostly all.

        Raises:
            As SentenceEncoder.encode.
        """
        one, listed = isinstance(inputs, str), check_texts(inputs)
        if isinstance(device, list):
            raise InputError("a SparseEncoder runs on one device")
        options = RunOptions(
            prompt=self.prompt(prompt_name, prompt),
            batch_tokens=batch_tokens,
            batch_size=batch_size,
            max_active_dims=self.max_active_dims if max_active_dims is None else max_active_dims,
            on_host=save_to_cpu,
        )
        vectors = self.shared_rows(listed, options, show_progress_bar, device, None, None)
        vectors = vectors if convert_to_sparse_tensor else vectors.to_dense()
        if one:
            return vectors[0]
        return vectors if convert_to_tensor else list(vectors)

    def encode_query(self, inputs: str | Iterable[str], **options: Any) -> Any:
        """`encode` with the model's prompt for queries, if it has one and no other is asked for."""
        return self.encode(inputs, **self._with_prompt(("query",), options))

    def encode_document(self, inputs: str | Iterable[str], **options: Any) -> Any:
        """`encode` with the model's prompt for documents, if it has one and no other is asked for."""
        return self.encode(inputs, **self._with_prompt(("document", "passage", "corpus"), options))

    def similarity(self, embeddings1: torch.Tensor, embeddings2: torch.Tensor) -> torch.Tensor:
        """(n, m): how similar each of n vectors, sparse or dense, is to each of m, by `similarity_fn_name`."""
        return similarity(embeddings1, embeddings2, self.similarity_fn_name)

    def similarity_pairwise(self, embeddings1: torch.Tensor, embeddings2: torch.Tensor) -> torch.Tensor:
        """(n,): how similar each of n vectors is to the one in its place among n others, by `similarity_fn_name`."""
        return similarity_pairwise(embeddings1, embeddings2, self.similarity_fn_name)

    def decode(self, embeddings: torch.Tensor, top_k: int | None = None) -> Any:
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
        self, inputs: list[str], options: RunOptions, on_batch: Callable[[int], Any] = lambda texts: None
    ) -> torch.Tensor:
        device = torch.device("cpu") if options.on_host else self.device
        found: list[torch.Tensor] = [torch.zeros(0, device=device)] * len(inputs)  # the weights that are not 0
        words: list[torch.Tensor] = [torch.zeros(0, device=device, dtype=torch.int64)] * len(inputs)
        for places, chunk in longest_first(inputs):
            for batch, vectors in self._dense(self.tokenize(chunk, options.prompt), options):
                text, word = vectors.nonzero(as_tuple=True)
                counts = text.bincount(minlength=len(batch)).tolist()
                weights = vectors[text, word].to(device)
                for i, own, weight in zip(batch, word.to(device).split(counts), weights.split(counts), strict=True):
                    words[places[i]], found[places[i]] = own, weight
                on_batch(len(batch))
        active = torch.tensor([len(own) for own in words], dtype=torch.int64, device=device)
        text = torch.arange(len(inputs), device=device).repeat_interleave(active)
        empty = torch.zeros(0, device=device)
        indices = torch.stack([text, torch.cat(words) if words else text])
        values = torch.cat(found) if found else empty
        shape = (len(inputs), self.dim)
        return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True, check_invariants=False)

    def tokenize(self, texts: list[str], prompt: str = "") -> list[list[int]]:
        """The token ids of each text, with special tokens, cut to max_seq_length."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast([prompt + text for text in texts])]

    @torch.inference_mode()
    def _dense(self, ids: list[list[int]], options: RunOptions) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Batches of sequences, each with its dense vectors, float32 (sequences, dim)."""
        base, budget = self.model.base_model, options.batch_tokens or self.default_batch_tokens
        for batch in token_batches([len(sequence) for sequence in ids], budget, options.batch_size):
            input_ids, cu_seqlens, longest = packed([ids[i] for i in batch], self.device)
            if must_be_called(base):
                hidden = base(input_ids, cu_seqlens=cu_seqlens, max_seqlen=longest).last_hidden_state
            else:
                hidden = base.encode_packed(input_ids, cu_seqlens, longest)
            lengths = [len(ids[i]) for i in batch]
            start = 0
            vectors = torch.empty(len(batch), self.dim, device=self.device)
            for part in _runs(lengths, HEAD_TOKENS):
                end = start + sum(lengths[i] for i in part)
                offsets = cu_seqlens[part[0] : part[-1] + 2] - start
                vectors[part[0] : part[-1] + 1] = self._pooled(self.model.token_scores(hidden[start:end]), offsets)
                start = end
            if options.max_active_dims is not None:
                kept = vectors.topk(min(options.max_active_dims, self.dim), dim=-1)
                vectors = torch.zeros_like(vectors).scatter(-1, kept.indices, kept.values)
            yield batch, vectors

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
