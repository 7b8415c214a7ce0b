"""SentenceEncoder turns each text into a vector (Reimers & Gurevych 2019). It reads sentence-transformers folders.

Texts are tokenised without padding, sorted by length, and cut into batches of a number of tokens. The encoder gets them
packed, so a batch of mixed lengths takes the time of its real tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from tokenizers import Tokenizer

from fastbert import ops
from fastbert.data.sentence_folder import FolderSettings, Normalize, Recipe, read_recipe
from fastbert.data.tokenized import CHUNK_TEXTS, Text
from fastbert.errors import InputError
from fastbert.layers.leaves import is_plain
from fastbert.models.auto import load_encoder
from fastbert.models.base import EncoderModel, PreTrainedModel
from fastbert.packed_inputs import PackedInputs
from fastbert.sentences.batches import bar_of, check_listed, check_texts, encodes, in_chunks, progress_bar
from fastbert.sentences.loading import LoadArguments, open_folder
from fastbert.sentences.pool import ProcessPool
from fastbert.sentences.pooling import pool as pool_tokens
from fastbert.sentences.similarity import PRECISIONS, HasDimensions, HasSimilarity, Precision, Similarity, in_precision
from fastbert.sentences.text_model import Devices, InferenceOptions, TextModel, inference_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fastbert.data.chunks import Windows
    from fastbert.data.chunks.job import ChunkJob
    from fastbert.sentences.documents import Chunks
    from fastbert.sentences.saving import SavedModule

ORGANISATION = "sentence-transformers"  # of names on the hub that have none

OutputValue = Literal["sentence_embedding", "token_embeddings"]


class SentenceEncoder(TextModel, HasSimilarity, HasDimensions):
    """Turns texts into vectors of `dim` numbers; cuts texts to `max_seq_length` tokens."""

    model: EncoderModel
    transformer_task, model_type = "feature-extraction", "SentenceTransformer"
    default_prompts = ("query", "document")

    def __init__(
        self,
        model_name_or_path: str | os.PathLike[str],
        *,
        similarity_fn_name: Similarity | str | Enum | None = None,
        truncate_dim: int | None = None,
        **options: Unpack[LoadArguments],
    ):
        """An encoder from a sentence-transformers folder, or from a plain encoder's: mean pooling, not normalised.

        Args:
            model_name_or_path: a folder, a hub id, or a name in fastbert.hub.PACKAGED_MODELS.
            similarity_fn_name, truncate_dim: instead of what the folder says.
            options: see fastbert.sentences.loading.LoadArguments; the most used are `dtype` ("bfloat16", "int8", ...),
                `device` and `max_seq_length`.

        Raises:
            CheckpointError: a file is absent or damaged. ConfigError: fastbert does not have a module, a pooling mode
            or a setting of the folder, the device is not there, or a value is out of range.
        """
        opened = open_folder(model_name_or_path, self.transformer_task, ORGANISATION, options)
        model = load_encoder(opened.folder, str(model_name_or_path), opened.dtype, opened.config)
        opened.quantised(model)
        recipe = read_recipe(opened.root, model.config.hidden_size)
        for module in recipe.modules:
            module.to(device=opened.device, dtype=torch.float32).requires_grad_(False)
        settings = opened.settings
        settings.truncate_dim = InferenceOptions(truncate_dim=truncate_dim).truncate_dim or settings.truncate_dim
        self._assemble(model, opened.tokenizer(), opened.length(model), settings, recipe)
        if similarity_fn_name is not None:
            self.similarity_fn_name = similarity_fn_name
        self.folder = opened.root

    def _assemble(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        max_seq_length: int,
        settings: FolderSettings | None = None,
        recipe: Recipe | None = None,
    ) -> None:
        super()._assemble(model, tokenizer, max_seq_length, settings)
        self.recipe = Recipe() if recipe is None else recipe
        self.truncate_dim = self.settings.truncate_dim
        self.similarity_fn_name = self.settings.similarity_fn_name or "cosine"
        pooled = torch.zeros(1, self.pooled_width, device=model.device)
        self.full_dim = self.finish(pooled, InferenceOptions()).shape[1]  # before truncate_dim

    def to(self, device: str | torch.device) -> SentenceEncoder:
        super().to(device)
        for module in self.recipe.modules:
            module.to(self.device)
        return self

    def saved_modules(self) -> list[SavedModule]:
        from fastbert.sentences.saving import saved_recipe

        return saved_recipe(self.recipe, self.model.config.hidden_size)

    def saved_settings(self) -> dict[str, Any]:
        truncation = {} if self.truncate_dim is None else {"truncate_dim": self.truncate_dim}
        return {"similarity_fn_name": self.similarity_fn_name, **truncation}

    def as_sentence_transformer(self) -> Any:
        """A sentence_transformers.SentenceTransformer with the same weights, for tools that take no other class.

        What it encodes goes through this encoder, with the same bits. Its trainer trains this encoder's weights, unless
        they are int8. Raises ConfigError where sentence-transformers is not installed.
        """
        from fastbert.sentences.sentence_transformers import as_sentence_transformer

        return as_sentence_transformer(self)

    @encodes
    def encode(
        self,
        inputs: str | Iterable[Text],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        output_value: OutputValue | None = "sentence_embedding",
        precision: Precision | None = "float32",
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: Devices | None = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        pool: ProcessPool | None = None,
        chunk_size: int | None = None,
        *,
        task: str | None = None,
        batch_tokens: int | None = None,
        normalize: bool | None = None,
        windows: Windows | None = None,
    ) -> Any:
        """The vectors of texts, in the order of the texts. The arguments mean what they mean in sentence-transformers.

        Args:
            inputs: one string, or many; some may be tuples of two, which the encoder reads as one, side by side.
            prompt_name, prompt: what is put before every text: a prompt of the model's, or a text. Default: the model's
                default prompt, mostly none.
            batch_size: how many texts the encoder gets at a time, at most. None: as many as `batch_tokens` allows.
            show_progress_bar: None shows a bar on a terminal if the work takes longer than 2 s.
            output_value: "token_embeddings" gives a tensor (tokens, hidden_size) for each text; None a dict for each:
                input_ids, attention_mask, token_embeddings, sentence_embedding. Neither has padding.
            precision: "int8" and "uint8" go by the range of each dimension among these texts, "binary" and "ubinary" by
                the signs, eight dimensions a byte.
            convert_to_numpy, convert_to_tensor: an array; or a tensor on the model's device; or, with neither, a list
                of tensors.
            device: moves the model there first. A list of devices: a pool of processes, for this call.
            normalize_embeddings: vectors of length 1, after all else.
            truncate_dim: only so many numbers of each vector, the first ones. Default: the model's own, mostly all.
            pool, chunk_size: what start_multi_process_pool gave, and how many texts one of its processes gets at once.
            task: "query" or "document": cuts texts to the length that the folder has for it, if it has one.
            batch_tokens: how many tokens the encoder gets at a time; a longer text is a batch of its own. The default
                is the number with which the device is fastest.
            normalize: False leaves out the model's own Normalize at the end.
            windows: how texts are cut that are longer than the model takes, all of whose tokens then count. None:
                `self.windows`; without these, too, they lose their ends. A text that fits has one vector either way.

        Returns:
            float32, (dim,) for one string and (number of texts, dim) for a list, which may be empty.

        Raises:
            TypeError: a text is no string; the message has its index. InputError: a text is not valid Unicode, or an
            option is out of bounds.
        """
        if output_value not in ("sentence_embedding", "token_embeddings", None):
            raise InputError(
                f"unknown output_value {output_value!r}; there are sentence_embedding, token_embeddings and None"
            )
        precision = "float32" if precision is None else precision
        if precision not in PRECISIONS:
            raise InputError(f"unknown precision {precision!r}; there are {', '.join(PRECISIONS)}")
        if normalize_embeddings and normalize is False:
            raise InputError("normalize_embeddings=True and normalize=False exclude each other")
        windows = self.windows if windows is None else windows
        one, listed = isinstance(inputs, str), check_texts(inputs, pairs=True, windows=windows)
        as_vectors = output_value == "sentence_embedding"
        options = inference_options(
            prompt=self.prompt(prompt_name, prompt),
            batch_tokens=batch_tokens,
            batch_size=batch_size,
            normalize=normalize_embeddings or normalize,
            truncate_dim=truncate_dim,
            on_host=convert_to_numpy and not convert_to_tensor,
            task=task,
            windows=windows,
        )
        if not as_vectors:
            if pool is not None or isinstance(device, list) or precision != "float32" or options.windows is not None:
                raise InputError(
                    f"output_value {output_value!r} excludes a pool, several devices, a precision and windows"
                )
            from fastbert.sentences.documents import token_rows  # here and below: few calls need it

            with progress_bar(len(listed), show_progress_bar) as bar:
                rows = token_rows(self.to(self.device if device is None else device), listed, options, bar.update)
            outputs = [row["token_embeddings"] for row in rows] if output_value else rows
            return outputs[0] if one else outputs
        vectors = self.shared_rows(listed, options, show_progress_bar, device, pool, chunk_size)
        if precision != "float32":
            vectors = torch.from_numpy(in_precision(vectors.cpu().numpy(), precision))
        if convert_to_tensor:
            return (vectors[0] if one else vectors).to(self.device)
        if convert_to_numpy:
            rows_on_host = vectors.numpy()  # as `on_host` has it
            return rows_on_host[0] if one else rows_on_host
        return vectors[0] if one else list(vectors)

    @encodes
    def encode_query(self, inputs: str | Iterable[Text], **options: Any) -> Any:
        """`encode` with the model's prompt for queries, if it has one and no other is asked for."""
        return self.encode(inputs, **self._of_task("query", options))

    @encodes
    def encode_document(self, inputs: str | Iterable[Text], **options: Any) -> Any:
        """`encode` with the model's prompt for documents, if it has one and no other is asked for."""
        return self.encode(inputs, **self._of_task("document", options))

    def encode_chunks(
        self,
        inputs: str | Iterable[str],
        windows: Windows | None = None,
        *,
        late: bool = False,
        show_progress_bar: bool | None = None,
        **options: Any,
    ) -> Chunks:
        """The vectors of parts of texts, each with its text and its characters there, for retrieval of passages.

        Args:
            inputs: one string, or many.
            windows: which parts, without a `pool`. None: as many whole sentences as the model takes, without overlap.
            late: a chunk is the mean of its tokens as the whole text makes them ("late chunking", Guenther et al.
                2024), in windows of the model's length if it is longer: for models that take texts longer than chunks.
            show_progress_bar: as of `encode`. options: prompt_name, prompt, task, batch_tokens, normalize and
                truncate_dim, as of `encode`. A prompt is before every chunk; with `late` before every window.

        Raises:
            TypeError, InputError: as `encode`; `late` with a model that does not pool by the mean.
        """
        from fastbert.sentences.documents import Chunks

        texts = check_texts(inputs)
        with progress_bar(None, show_progress_bar, **bar_of(True)) as bar:
            parts = list(self.encode_chunks_stream(texts, windows, late=late, on_tokens=bar.update, **options))
        nothing = self.no_rows(InferenceOptions(truncate_dim=options.get("truncate_dim")))
        return Chunks.joined([Chunks.none(nothing), *parts])

    def encode_chunks_stream(
        self,
        texts: Iterable[str],
        windows: Windows | None = None,
        *,
        late: bool = False,
        on_tokens: Callable[[int], Any] = lambda tokens: None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        task: str | None = None,
        batch_tokens: int | None = None,
        normalize: bool | None = None,
        truncate_dim: int | None = None,
    ) -> Iterator[Chunks]:
        """Yields the chunks of texts, as of `encode_chunks`, at most 1,024 at a time, as soon as they are there; late
        ones of a text all at once. `documents` counts all texts. `on_tokens(tokens)` is called after each batch.
        """
        from fastbert.sentences.documents import CHUNKS, chunk_stream

        options = InferenceOptions(
            self.prompt(prompt_name, prompt),
            batch_tokens,
            normalize=normalize,
            truncate_dim=truncate_dim,
            task=task,
            windows=CHUNKS if windows is None else windows,
        )
        yield from chunk_stream(self, texts, options, late, on_tokens)

    def encode_stream(
        self,
        texts: Iterable[Text],
        *,
        batch_tokens: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        truncate_dim: int | None = None,
        windows: Windows | None = None,
        chunk_texts: int = CHUNK_TEXTS,
        on_batch: Callable[[int], Any] = lambda texts: None,
        on_cut: Callable[[int], Any] = lambda texts: None,
    ) -> Iterator[tuple[np.ndarray, int]]:
        """Yields, for one chunk of texts after the other, its vectors (float32, (texts, dim)) and its number of tokens.

        A chunk has `chunk_texts` texts, or fewer if they are long; one begins at each `chunk_texts`-th text. Only one
        chunk is in memory at a time. Its vectors depend on this chunk alone, so a stream that starts again at the
        `chunk_texts`-th text, or at a multiple of that, gives the same bits.
        `on_batch(texts)` is called after each batch, with its tokens where texts are cut into `windows`;
        `on_cut(texts)` for each chunk, with how many of its texts were longer than `max_seq_length`: they lost ends.
        Pairs, and errors, are as of `encode`: those of a text when its chunk is reached.
        """
        options = InferenceOptions(
            self.prompt(prompt_name, prompt),
            batch_tokens,
            normalize=normalize,
            truncate_dim=truncate_dim,
            windows=self.windows if windows is None else windows,
        )
        check_listed("texts", texts, "a list of strings, or what gives them one by one")
        for chunk in in_chunks(texts, chunk_texts, aligned=True):
            listed = check_texts(chunk, pairs=True, windows=options.windows)
            if options.windows is not None:
                job = self.job(listed, options)
                vectors = job.run(self.device, batch_tokens, on_tokens=on_batch)
                yield vectors.cpu().numpy(), len(job.chunks.ids)
                continue
            tokenized = self.tokenize(listed, options.prompt)
            on_cut(len(tokenized.cut))
            yield self.rows_of(tokenized, options, on_batch).cpu().numpy(), len(tokenized.ids)

    def job(self, inputs: list[str], options: InferenceOptions) -> ChunkJob[torch.Tensor]:
        from fastbert.sentences.documents import vectors_job

        return vectors_job(self, inputs, options)

    def no_rows(self, options: InferenceOptions) -> torch.Tensor:
        width = self.dim if options.truncate_dim is None else min(options.truncate_dim, self.full_dim)
        return torch.empty(0, width, device=self.device)

    def compute(self, batch: PackedInputs, options: InferenceOptions) -> torch.Tensor:
        """The vectors, float32 (sequences, width)."""
        modes, modules = self.recipe.pooling, self.recipe.modules
        pooling, normalizes = "none", False  # what may be part of the model's one op
        if len(modes) == 1 and modes[0] in ("mean", "cls") and not self._leaves_out(options):
            pooling = modes[0]  # what most folders have behind it is, too
            normalizes = len(modules) == 1 and is_plain(modules[0], Normalize) and self._changes_nothing(options)
        output, is_one_op = self.model.infer(batch, pooling, normalizes)
        if is_one_op and normalizes:
            return output
        with torch.inference_mode():
            if not is_one_op or pooling == "none":
                output = self.pooled(output, batch["batch"].cu_seqlens.to(output.device), options)
            return self.finish(output, options)

    def _changes_nothing(self, options: InferenceOptions) -> bool:
        """Whether options leave vectors as the folder's modules make them."""
        return options.normalize is None and options.truncate_dim is None and self.truncate_dim is None

    def _leaves_out(self, options: InferenceOptions) -> bool:
        """Whether tokens of the prompt are left out of the pooling."""
        return bool(options.prompt) and not self.recipe.prompt_is_pooled

    def pool(self, hidden: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """The vectors of packed hidden states (total_tokens, hidden_size), float32 (texts, dim). Gradients go through.

        cu_seqlens: int32 (texts + 1,), where the texts begin.
        """
        return self.finish(self.pooled(hidden, cu_seqlens, InferenceOptions()), InferenceOptions())

    @property
    def pooled_width(self) -> int:
        """How many numbers the model's pooling makes of a text, before the folder's modules."""
        return self.model.config.hidden_size * len(self.recipe.pooling)

    def pooled(self, hidden: torch.Tensor, cu_seqlens: torch.Tensor, options: InferenceOptions) -> torch.Tensor:
        """(total_tokens, hidden_size) -> (texts, pooled_width), by the model's pooling alone."""
        left_out = self._prompt_tokens(options.prompt) if self._leaves_out(options) else 0
        return pool_tokens(hidden, cu_seqlens, self.recipe.pooling, left_out)

    def _prompt_tokens(self, prompt: str) -> int:
        """How many tokens a prompt has at the beginning of a text: without a special one at its own end."""
        encoding = self.tokenizer.encode(prompt)
        return len(encoding.ids) - encoding.special_tokens_mask[-1]

    def finish(self, pooled: torch.Tensor, options: InferenceOptions) -> torch.Tensor:
        """What stands behind the pooling: the folder's modules, the number of dimensions, the length."""
        modules, pooled = self.recipe.modules, pooled.float()
        if options.normalize is False and modules and isinstance(modules[-1], Normalize):
            modules = modules[:-1]
        for module in modules:
            pooled = module(pooled)
        width = self.truncate_dim if options.truncate_dim is None else options.truncate_dim
        pooled = pooled if width is None else pooled[:, :width]
        return ops.normalize(pooled) if options.normalize else pooled
