"""SentenceEncoder turns each text into a vector (Reimers & Gurevych 2019). It reads sentence-transformers folders.

Texts are tokenised without padding, sorted by length, and cut into batches of a number of tokens. The encoder gets them
packed, so a batch of mixed lengths takes the time of its real tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from fastbert import ops
from fastbert.checkpoint.dtypes import parse_dtype
from fastbert.checkpoint.pretrained import resolve
from fastbert.data.sentence_folder import (
    Normalize,
    Recipe,
    Settings,
    read_recipe,
    read_settings,
    transformer_folder,
    transformer_settings,
)
from fastbert.data.tokenization import load_tokenizer
from fastbert.models.auto import load_encoder
from fastbert.models.base import EncoderModel, must_be_called
from fastbert.models.quantized import is_quantized, linears_of, make_int8
from fastbert.packing import InputError
from fastbert.sentences.batches import CHUNK_TEXTS, check_texts, in_chunks, packed, progress_bar, token_batches
from fastbert.sentences.text_model import TextModel, pick_device, position_limit


class SentenceEncoder(TextModel):
    """Turns texts into vectors of `dim` numbers; cuts texts to `max_seq_length` tokens. `from_pretrained` makes one."""

    model: EncoderModel

    default_prompts = ("query", "document")

    def __init__(
        self,
        model: EncoderModel,
        tokenizer: Tokenizer,
        recipe: Recipe,
        max_seq_length: int,
        settings: Settings | None = None,
    ):
        super().__init__(model, tokenizer, max_seq_length, settings)
        self.recipe = recipe
        pooled = torch.zeros(1, model.config.hidden_size * len(recipe.pooling), device=model.device)
        self.dim = self._finish(pooled, None).shape[1]

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike,
        *,
        dtype: torch.dtype | str | None = "auto",
        device: torch.device | str | None = None,
        max_seq_length: int | None = None,
    ) -> SentenceEncoder:
        """An encoder from a sentence-transformers folder, or from a plain encoder's: mean pooling, not normalised.

        Args:
            name_or_path: a folder, a hub id, or a name in fastbert.checkpoint.pretrained.PACKAGED_MODELS.
            dtype: a torch dtype or its name. "auto" keeps the checkpoint's own; "int8" quantises it.
            device: where to run. The default is CUDA if there is a GPU, else the CPU.
            max_seq_length: longer texts are cut to so many tokens, [CLS] and [SEP] included. Default: the folder's.

        Raises:
            CheckpointError: a file is absent or damaged. ConfigError: fastbert does not have a module or a pooling mode
            of the folder, the device is not there, or the length is out of range.
        """
        int8 = dtype in ("int8", torch.int8)
        root, device, torch_dtype = resolve(name_or_path), pick_device(device), None if int8 else parse_dtype(dtype)
        folder = transformer_folder(root)
        model = load_encoder(folder, str(name_or_path), torch_dtype).to(device)
        if int8 and not is_quantized(model):
            make_int8(model, linears_of(model), {})
        settings = transformer_settings(folder)
        tokenizer = load_tokenizer(folder, lowercase=bool(settings.get("do_lower_case")))
        recipe = read_recipe(root, model.config.hidden_size)
        for module in recipe.modules:
            module.to(device=device, dtype=torch.float32).requires_grad_(False)
        limit = position_limit(model)
        length = max_seq_length if max_seq_length is not None else min(settings.get("max_seq_length") or limit, limit)
        return cls(model, tokenizer, recipe, length, read_settings(root))

    def encode(
        self,
        texts: str | Iterable[str],
        *,
        batch_tokens: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        show_progress: bool | None = None,
        output: str = "numpy",
    ) -> np.ndarray | torch.Tensor:
        """The vectors of texts, in the order of the texts.

        Args:
            texts: one string, or many.
            batch_tokens: how many tokens the encoder gets at a time; a longer text is a batch of its own. The default
                is the number with which the device is fastest.
            normalize: True gives vectors of length 1, False leaves them as they are pooled. None does what the model's
                folder says.
            prompt_name: which of the model's prompts is put before every text. None: the model's default, mostly none.
            show_progress: None shows a bar on a terminal if the work takes longer than 2 s.
            output: "numpy", or "torch" for a tensor on the model's device.

        Returns:
            float32, (dim,) for one string and (number of texts, dim) for a list, which may be empty.

        Raises:
            TypeError: a text is no string; the message has its index. InputError: a text is not valid Unicode, or an
            option is out of bounds.
        """
        if output not in ("numpy", "torch"):
            raise InputError(f"unknown output {output!r}; valid names: numpy, torch")
        one, prompt = isinstance(texts, str), self.prompt(prompt_name)
        listed = check_texts(texts)
        # Longest first: a batch too large for the memory fails at once, and the estimate of the time left errs to the
        # long side. Characters stand for tokens here; within a chunk the tokens are counted.
        order = sorted(range(len(listed)), key=lambda i: -len(listed[i]))
        device = self.device if output == "torch" else torch.device("cpu")
        vectors = torch.empty(len(listed), self.dim, device=device)
        places = torch.tensor(order, dtype=torch.int64, device=device)
        done = 0
        with progress_bar(len(listed), show_progress) as bar:
            for chunk in in_chunks((listed[i] for i in order), CHUNK_TEXTS):
                ids = self.tokenize(chunk, prompt)
                rows = self.encode_ids(ids, batch_tokens=batch_tokens, normalize=normalize, on_batch=bar.update)
                vectors[places[done : done + len(chunk)]] = rows.to(device)
                done += len(chunk)
        result = vectors[0] if one else vectors
        return result.numpy() if output == "numpy" else result

    def encode_stream(
        self,
        texts: Iterable[str],
        *,
        batch_tokens: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        chunk_texts: int = CHUNK_TEXTS,
    ) -> Iterator[tuple[np.ndarray, int]]:
        """Yields, for one chunk of texts after the other, its vectors (float32, (texts, dim)) and its number of tokens.

        A chunk has `chunk_texts` texts, or fewer if they are long. Only one chunk is in memory at a time. Its vectors
        depend on this chunk alone, so a stream that starts again at the beginning of a chunk gives the same bits.
        """
        prompt = self.prompt(prompt_name)
        for chunk in in_chunks(texts, chunk_texts):
            ids = self.tokenize(check_texts(chunk), prompt)
            rows = self.encode_ids(ids, batch_tokens=batch_tokens, normalize=normalize)
            yield rows.cpu().numpy(), sum(map(len, ids))

    def prompt(self, name: str | None = None, text: str | None = None) -> str:
        prompt = super().prompt(name, text)
        if prompt and not self.recipe.prompt_is_pooled:
            raise InputError(f"prompt {prompt!r}: this model leaves it out of the pooling; fastbert cannot")
        return prompt

    def tokenize(self, texts: list[str], prompt: str = "") -> list[list[int]]:
        """The token ids of each text, with special tokens, cut to max_seq_length."""
        if prompt:
            texts = [prompt + text for text in texts]
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts)]

    @torch.inference_mode()
    def encode_ids(
        self,
        ids: list[list[int]],
        *,
        batch_tokens: int | None = None,
        normalize: bool | None = None,
        on_batch: Callable[[int], Any] = lambda texts: None,
    ) -> torch.Tensor:
        """The vectors of sequences of token ids, in their order: float32 (sequences, dim) on the model's device.

        `on_batch(sequences)` is called after each batch. Raises InputError for a budget below 1.
        """
        budget = self.batch_tokens(batch_tokens)
        vectors = torch.empty(len(ids), self.dim, device=self.device)
        for batch in token_batches([len(sequence) for sequence in ids], budget):
            rows = self._encode_batch([ids[i] for i in batch], normalize)
            vectors[torch.tensor(batch, device=self.device)] = rows
            on_batch(len(batch))
        return vectors

    def _encode_batch(self, ids: list[list[int]], normalize: bool | None) -> torch.Tensor:
        input_ids, cu_seqlens, longest = packed(ids, self.device)
        if must_be_called(self.model):
            hidden = self.model(input_ids, cu_seqlens=cu_seqlens, max_seqlen=longest).last_hidden_state
        else:
            hidden = self.model.encode_packed(input_ids, cu_seqlens, longest)
        pooled = torch.cat([_pool(hidden, cu_seqlens, mode) for mode in self.recipe.pooling], dim=-1)
        return self._finish(pooled, normalize)

    @torch.inference_mode()
    def _finish(self, pooled: torch.Tensor, normalize: bool | None) -> torch.Tensor:
        modules, pooled = self.recipe.modules, pooled.float()
        if normalize is False and modules and isinstance(modules[-1], Normalize):
            modules = modules[:-1]
        for module in modules:
            pooled = module(pooled)
        return F.normalize(pooled, dim=-1) if normalize else pooled


def _pool(hidden: torch.Tensor, cu_seqlens: torch.Tensor, mode: str) -> torch.Tensor:
    if mode != "mean_sqrt_len_tokens":
        return ops.pooling(hidden, cu_seqlens, mode=mode)
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1])[:, None]
    return ops.pooling(hidden, cu_seqlens, mode="mean") * lengths.sqrt()
