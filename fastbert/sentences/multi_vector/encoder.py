"""MultiVectorEncoder: a vector for each token of a text, for late interaction ("ColBERT"; Khattab & Zaharia 2020)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from enum import Enum
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer

from fastbert import ops
from fastbert.checkpoint.tokenizer_files import SETTINGS
from fastbert.data.sentence_folder import FolderSettings, is_colbert_ai
from fastbert.data.tokenized import Text, Tokenized
from fastbert.errors import ConfigError, InputError
from fastbert.models.auto import load_encoder
from fastbert.models.base import EncoderModel, PreTrainedModel
from fastbert.packed_inputs import PackedInputs
from fastbert.sentences.batches import check_listed, check_texts, longest_first, takes_sentences
from fastbert.sentences.loading import LoadArguments, open_folder
from fastbert.sentences.multi_vector.folder import (
    MultiVectorRecipe,
    Normalize,
    OlderSettings,
    QueryExpansion,
    TokenPooling,
    expansion_of,
    read_multi_vector,
)
from fastbert.sentences.multi_vector.vectors import TokenVectors, similarity, similarity_pairwise
from fastbert.sentences.pool import ProcessPool
from fastbert.sentences.similarity import HasDimensions
from fastbert.sentences.text_model import Devices, InferenceOptions, TextModel, inference_options, position_limit

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fastbert.data.chunks import Windows
    from fastbert.data.chunks.job import ChunkJob
    from fastbert.sentences.saving import SavedModule

MaxSim = Literal["maxsim", "meanmaxsim"]
_SIMILARITIES = ("maxsim", "meanmaxsim")
_LOOKED_AT, _LONGEST = 256, 1.05  # vectors of documents; a length of 1, and what int8 may add


class MultiVectorEncoder(TextModel, HasDimensions):
    """Turns texts into vectors of `dim` numbers, one for each token, and scores queries beside documents by MaxSim."""

    model: EncoderModel
    transformer_task, model_type = "feature-extraction", "MultiVectorEncoder"
    default_prompts = ("query", "document")

    def __init__(
        self,
        model_name_or_path: str | os.PathLike[str],
        *,
        similarity_fn_name: MaxSim | str | Enum | None = None,
        truncate_dim: int | None = None,
        query_expansion: QueryExpansion | Mapping[str, Any] | Literal["of the folder"] | None = "of the folder",
        query_length: int | None = None,
        document_length: int | None = None,
        **options: Unpack[LoadArguments],
    ):
        """An encoder from a folder of sentence-transformers 6, of PyLate, or of Stanford's ColBERT.

        Args:
            model_name_or_path: a folder, or a hub id.
            similarity_fn_name, truncate_dim, query_length, document_length: instead of what the folder says.
            query_expansion: the same; a mapping as sentence-transformers has it, or None for no expansion.
            options: see fastbert.sentences.loading.LoadArguments; the most used are `dtype` ("bfloat16", "int8", ...),
                `device` and `max_seq_length`.

        Raises:
            CheckpointError: a file is absent or damaged. ConfigError: fastbert does not have a module, an order of
            modules or a setting of the folder, the device is not there, or a value is out of range.
        """
        opened = open_folder(model_name_or_path, self.transformer_task, None, options, expands_queries=True)
        prompts = dict(options.get("prompts") or {})
        others = ("linear.weight",) if is_colbert_ai(opened.folder) else ()
        model = load_encoder(opened.folder, str(model_name_or_path), opened.dtype, opened.config, others)
        opened.quantised(model)
        settings = opened.settings
        recipe, older = read_multi_vector(opened.root, opened.folder, model.config.hidden_size, settings)
        settings.prompts |= prompts  # which the caller says, whatever prefixes an older folder has
        for module in recipe.modules:
            module.to(device=opened.device, dtype=torch.float32).requires_grad_(False)
        settings.truncate_dim = InferenceOptions(truncate_dim=truncate_dim).truncate_dim or settings.truncate_dim
        transformer = settings.transformer
        transformer.lengths = {**older.lengths, **transformer.lengths}
        expansion = expansion_of(opened.folder, transformer.query_expansion) or older.expansion
        if isinstance(query_expansion, QueryExpansion):
            expansion = query_expansion
        elif query_expansion != "of the folder":
            expansion = expansion_of("MultiVectorEncoder", query_expansion)
        transformer.query_expansion = None if expansion is None else asdict(expansion)
        for task, length in (("query", query_length), ("document", document_length)):
            if length is not None:
                transformer.lengths[task] = length
        tokenizer = opened.tokenizer()
        _add_prefixes(tokenizer, older)
        self._assemble(model, tokenizer, opened.length(model), settings, recipe)
        if similarity_fn_name is not None:
            self.similarity_fn_name = similarity_fn_name
        self.folder = opened.root

    def _assemble(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        max_seq_length: int,
        settings: FolderSettings | None = None,
        recipe: MultiVectorRecipe | None = None,
    ) -> None:
        settings = FolderSettings() if settings is None else settings
        self.recipe = MultiVectorRecipe() if recipe is None else recipe
        self.query_expansion = expansion = expansion_of("settings", settings.transformer.query_expansion)
        self._expansion_id, lengths = 0, settings.transformer.lengths
        if expansion is not None:
            self._expansion_id = self._check_expansion(expansion, model, tokenizer, settings)
            if expansion.strategy == "fixed":
                lengths = {**lengths, "query": expansion.length}
            elif "query" in lengths:
                lengths = {**lengths, "query": max(lengths["query"], expansion.length)}
        given, settings.transformer.lengths = settings.transformer.lengths, lengths
        super()._assemble(model, tokenizer, max_seq_length, settings)
        settings.transformer.lengths = given  # as a folder has them
        name = settings.similarity_fn_name
        self.similarity_fn_name = name if name in _SIMILARITIES else "maxsim"
        self.truncate_dim = settings.truncate_dim
        self._skipped = self._ids_of(self.recipe.skiplist_words)
        no_rows = torch.zeros(0, model.config.hidden_size, device=model.device)
        self.full_dim = self._finished(no_rows).shape[1]

    def _check_expansion(
        self, expansion: QueryExpansion, model: PreTrainedModel, tokenizer: Tokenizer, settings: FolderSettings
    ) -> int:
        """The id of the tokens that are added. Raises ConfigError."""
        limit, query_length = position_limit(model), settings.transformer.lengths.get("query")
        if expansion.length > limit:
            raise ConfigError(f"the length of query_expansion is {expansion.length}; this model allows {limit} tokens")
        if query_length is not None and query_length < expansion.length:
            raise ConfigError(
                f"query_length is {query_length}, less than the {expansion.length} tokens of query_expansion"
            )
        entries = settings.tokenizer_files.get(SETTINGS, {})
        if entries.get("padding_side") == "left":
            raise ConfigError("query_expansion needs padding_side 'right', behind a query; the tokenizer's is 'left'")
        if not expansion.attend and not self.recipe.scores_expansion:
            raise ConfigError("query_expansion with attend=False needs a MultiVectorMask, or nothing scores its tokens")
        if not expansion.attend and not model.config.family.masked_tokens_attend:
            raise ConfigError(
                f"query_expansion with attend=False: {model.config.model_type} clears what it has of masked tokens"
            )
        token = expansion.token or _special(settings, "mask_token") or "[MASK]"
        added = tokenizer.token_to_id(token)
        if added is None and expansion.token is None:  # as sentence-transformers: decoders have no mask
            token = _special(settings, "eos_token") or "</s>"
            added = tokenizer.token_to_id(token)
        if added is None:
            raise ConfigError(f"the token of query_expansion is {token!r}, which the vocabulary does not have")
        return added

    def _ids_of(self, words: Sequence[str]) -> torch.Tensor:
        """Of the words that are one token each; int64."""
        ids = [self.tokenizer.token_to_id(word) for word in words]
        return torch.tensor([i for i in ids if i is not None], dtype=torch.int64, device=self.model.device)

    def to(self, device: str | torch.device) -> MultiVectorEncoder:
        super().to(device)
        for module in self.recipe.modules:
            module.to(self.device)
        self._skipped = self._skipped.to(self.device)
        return self

    def saved_modules(self) -> list[SavedModule]:
        from fastbert.sentences.saving import saved_multi_vector

        return saved_multi_vector(self.recipe)

    def saved_settings(self) -> dict[str, Any]:
        truncation = {} if self.truncate_dim is None else {"truncate_dim": self.truncate_dim}
        return {"similarity_fn_name": self.similarity_fn_name, **truncation}

    @property
    def similarity_fn_name(self) -> str:
        """maxsim, or meanmaxsim: divided by the number of the query's tokens."""
        return self._similarity_fn_name

    @similarity_fn_name.setter
    def similarity_fn_name(self, name: MaxSim | str | Enum) -> None:
        name = name.value if isinstance(name, Enum) else name
        if name not in _SIMILARITIES:
            raise ConfigError(f"unknown similarity {name!r}; there are {', '.join(_SIMILARITIES)}")
        self._similarity_fn_name = name

    @takes_sentences
    def encode(
        self,
        inputs: str | Iterable[Text],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        output_value: Literal["token_embeddings"] = "token_embeddings",
        convert_to_numpy: bool = False,
        device: Devices | None = None,
        normalize_embeddings: bool = False,
        pool: ProcessPool | None = None,
        chunk_size: int | None = None,
        token_pooling: TokenPooling | None = None,
        task: str | None = None,
        *,
        batch_tokens: int | None = None,
        truncate_dim: int | None = None,
        precision: Literal["float32", "int8"] = "float32",
        output: Literal["list", "packed"] = "list",
        windows: Windows | None = None,
    ) -> Any:
        """The vectors of texts, in the order of the texts. The arguments mean what they mean in sentence-transformers.

        Args:
            inputs: one string, or many.
            prompt_name, prompt, batch_size, show_progress_bar, device, normalize_embeddings, truncate_dim, pool,
                chunk_size, batch_tokens: as for SentenceEncoder.encode.
            convert_to_numpy: arrays, and not tensors on the model's device.
            token_pooling: fewer vectors of each text whose task is among its own, beside what the folder has.
            task: "query" or "document": how long a text may be, whether it is expanded, and which tokens are scored.
            precision: "int8": vectors in whole numbers, with a scale each; only with output="packed".
            output: "packed": a TokenVectors, all texts' vectors one after the other.
            windows: how texts are cut that are longer than the model takes, all of whose tokens then have vectors: a
                token that two windows share has that of the one in which it is farther from the cut. None: they lose
                their ends.

        Returns:
            A list of float32 (tokens, dim), or one for one string; or a TokenVectors.

        Raises:
            TypeError: a text is no string; the message has its index. InputError: a text is not valid Unicode, or an
            option is out of bounds.
        """
        if output_value != "token_embeddings":
            raise InputError(f"unknown output_value {output_value!r}; there is token_embeddings")
        if output not in ("list", "packed") or precision not in ("float32", "int8"):
            raise InputError(f"output {output!r}, precision {precision!r}: there are list, packed; float32, int8")
        if precision == "int8" and output == "list":
            raise InputError("precision='int8' has a scale for each vector: it goes with output='packed'")
        if output == "packed" and convert_to_numpy:
            raise InputError("convert_to_numpy and output='packed' exclude each other")
        windows = self.windows if windows is None else windows
        one, listed = isinstance(inputs, str), check_texts(inputs, pairs=True, windows=windows)
        if windows is not None and task == "query":
            raise InputError("windows are for documents, and task is 'query'")
        options = inference_options(
            prompt=self.prompt(prompt_name, prompt),
            batch_tokens=batch_tokens,
            batch_size=batch_size,
            normalize=normalize_embeddings or None,
            truncate_dim=truncate_dim,
            on_host=convert_to_numpy,
            task=task,
            windows=windows,
            token_pooling=token_pooling,
        )
        found: TokenVectors = self.shared_rows(listed, options, show_progress_bar, device, pool, chunk_size)
        if output == "packed":
            return found.in_int8() if precision == "int8" else found
        rows: list[Any] = [row.numpy() for row in found] if convert_to_numpy else list(found)
        return rows[0] if one else rows

    @takes_sentences
    def encode_query(self, inputs: str | Iterable[Text], **options: Any) -> Any:
        """`encode` of queries: with the model's prompt for them unless another is asked for, expanded where the model
        does that.
        """
        return self.encode(inputs, **self._of_task("query", options))

    @takes_sentences
    def encode_document(self, inputs: str | Iterable[Text], **options: Any) -> Any:
        """`encode` of documents: with the model's prompt for them unless another is asked for."""
        return self.encode(inputs, **self._of_task("document", options))

    def similarity(self, embeddings1: Any, embeddings2: Any) -> torch.Tensor:
        """float32 (queries, documents), on the documents' device, by `similarity_fn_name`: see
        fastbert.sentences.multi_vector.vectors.similarity. Raises InputError for documents' vectors that do not have
        length 1 where the model's do.
        """
        documents = self._checked(embeddings2)
        return similarity(embeddings1, documents, self.similarity_fn_name == "meanmaxsim")

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> torch.Tensor:
        """float32 (pairs,): of each query and the document in its place. Raises InputError, as `similarity`."""
        documents = self._checked(embeddings2)
        return similarity_pairwise(embeddings1, documents, self.similarity_fn_name == "meanmaxsim")

    def _checked(self, embeddings: Any) -> TokenVectors:
        """Vectors of documents, some of which are looked at: all of a corpus would be read twice."""
        found, modules = TokenVectors.of(embeddings), self.recipe.modules
        count = found.vectors.shape[0]
        if count and modules and isinstance(modules[-1], Normalize):
            at = torch.arange(0, count, -(-count // _LOOKED_AT), device=found.vectors.device)
            rows = found.vectors[at].float()
            lengths = (rows if found.scales is None else rows * found.scales[at, None]).norm(dim=-1)
            longer = (lengths > _LONGEST).nonzero()  # shorter ones lost dimensions, or are means
            if len(longer):
                row = int(longer[0])
                told = f"the vector of documents' token {int(at[row])} has length {float(lengths[row]):.3g}"
                raise InputError(f"{told}; this model's have length 1: fastbert.ops.normalize makes it so")
        return found

    def rank(
        self,
        query: str,
        documents: Sequence[str] | TokenVectors,
        top_k: int | None = None,
        return_documents: bool = False,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """The documents by their score beside the query, the best first: `corpus_id`, `score` and, if asked, `text`.

        documents: texts, encoded by `encode_document` with `options`; or what that gave with output="packed". Raises
        InputError, and as `encode`.
        """
        if top_k is not None and top_k < 1:
            raise InputError(f"top_k is {top_k}; it must be at least 1")
        if isinstance(documents, TokenVectors):
            if return_documents or options:
                raise InputError("documents are vectors: there are no texts to return, and none to encode")
            stored = documents
        else:
            check_listed("documents", documents, "a list of texts")
            documents = list(documents)
            stored = self.encode_document(documents, output="packed", **options)
        scores = self.similarity(self.encode_query(query), stored)[0].tolist()
        ranked = sorted(range(len(scores)), key=lambda i: -scores[i])[:top_k]  # stable: equal ones keep their order
        return [
            {"corpus_id": i, "score": scores[i], **({"text": documents[i]} if return_documents else {})} for i in ranked
        ]

    def matches(self, query: str, document: str) -> list[dict[str, Any]]:
        """Which token of a document each word of a query has found, by the largest product, the best first: `query`,
        `document` (the tokens), `score`, and `start` and `end` in the document. Special tokens, prompts and tokens that
        queries are expanded by are left out. Raises InputError where documents' vectors are those of clusters.
        """
        if self.recipe.token_pooling is not None and "document" in self.recipe.token_pooling.tasks:
            raise InputError(
                "HierarchicalTokenPooling leaves vectors of several tokens: none of them has matched alone"
            )
        words, tokens = self._words(query, "query"), self._words(document, "document")
        products = self.encode_query(query) @ self.encode_document(document).T
        scores, places = products.max(-1) if products.numel() else (products.new_zeros(0), products.new_zeros(0))
        found = [
            {"query": word[0], "document": tokens[j][0], "score": score, "start": tokens[j][1], "end": tokens[j][2]}
            for word, score, j in zip(words, scores.tolist(), places.tolist(), strict=False)
            if word[2] > word[1] and tokens[j][2] > tokens[j][1]
        ]
        return sorted(found, key=lambda match: -match["score"])

    def _words(self, text: str, task: str) -> list[tuple[str, int, int]]:
        """Of each vector of a text its token, and where it is in the text; an empty range for others than its own."""
        prompt = self.prompt(self._of_task(task, {})["prompt_name"])
        ids = torch.from_numpy(self.tokenize([text], prompt, task).ids)
        encoding = self.tokenizer_of(task).encode(prompt + text)
        scored = self._scored(ids.to(self.device), task)
        kept = range(len(ids)) if scored is None else scored.nonzero().flatten().tolist()
        words, before = list[tuple[str, int, int]](), len(prompt)
        for i in kept:
            start, end = encoding.offsets[i] if i < len(encoding) else (0, 0)
            is_own = i < len(encoding) and start >= before and not encoding.special_tokens_mask[i]
            span = (start - before, end - before) if is_own else (0, 0)
            words.append((encoding.tokens[i] if i < len(encoding) else "", *span))
        return words

    # ----------------------------------------------------------------------------------------------------------------
    # From texts to vectors

    def tokenize(self, inputs: Sequence[Text], prompt: str = "", task: str | None = None) -> Tokenized:
        """The tokens of texts, `prompt` before each, cut to their task's length; queries expanded."""
        tokenized, expansion = super().tokenize(inputs, prompt, task), self.query_expansion
        if task != "query" or expansion is None:
            return tokenized
        missing = (expansion.length - tokenized.lengths).clip(min=0)
        if not missing.any():
            return tokenized
        at = np.repeat(tokenized.offsets[1:], missing)  # behind each text's last token
        types = None if tokenized.types is None else np.insert(tokenized.types, at, 0)
        alone = np.insert(np.zeros(len(tokenized.ids), np.uint8), at, 0 if expansion.attend else 1)
        offsets = np.fromiter(accumulate(tokenized.lengths + missing, initial=0), np.int64, len(tokenized) + 1)
        ids = np.insert(tokenized.ids, at, self._expansion_id)
        return replace(tokenized, ids=ids, types=types, offsets=offsets, query_only=alone)

    def rows(
        self, inputs: list[Text], options: InferenceOptions, on_batch: Callable[[int], Any] = lambda texts: None
    ) -> TokenVectors:
        device = torch.device("cpu") if options.on_host else self.device
        of_texts: list[torch.Tensor] = [torch.zeros(0, self.dim, device=device)] * len(inputs)
        for places, chunk in longest_first(inputs):
            if options.windows is not None:
                job = self.job(chunk, options)
                found = job.run(self.device, options.batch_tokens, options.batch_size, on_tokens=on_batch).to(device)
                for i, rows in zip(places, found, strict=True):
                    of_texts[i] = rows
                continue
            tokenized = self.tokenize(chunk, options.prompt, options.task)
            for batch, found in self.run(tokenized, options, on_batch):
                for i, rows in zip(batch.tolist(), found.to(device), strict=True):
                    of_texts[places[i]] = rows
        return TokenVectors.of(of_texts) if inputs else self.no_rows(options).to(device)

    def joined_rows(self, parts: list[Any]) -> TokenVectors:
        return TokenVectors.joined(parts)

    def no_rows(self, options: InferenceOptions) -> TokenVectors:
        width = self.dim if options.truncate_dim is None else min(options.truncate_dim, self.full_dim)
        offsets = torch.zeros(1, dtype=torch.int32, device=self.device)
        return TokenVectors(torch.zeros(0, width, device=self.device), offsets)

    def compute(self, batch: PackedInputs, options: InferenceOptions) -> TokenVectors:
        """The vectors of a batch's tokens that are scored."""
        hidden, _ = self.model.infer(batch)
        with torch.inference_mode():
            ids, offsets = batch["input_ids"].to(hidden.device), batch["batch"].cu_seqlens.to(hidden.device)
            scored = self._scored(ids, options.task)
            if scored is not None:
                before = torch.nn.functional.pad(scored.cumsum(0), (1, 0))
                hidden, offsets = hidden[scored], before[offsets.long()].int()
            return self._pooled(TokenVectors(self._finished(hidden), offsets), options)

    def _scored(self, ids: torch.Tensor, task: str | None) -> torch.Tensor | None:
        """Which tokens are, by their ids (total_tokens,); None: all."""
        recipe, scored = self.recipe, None
        if len(self._skipped) and (task or "document") in recipe.skiplist_tasks:
            scored = ~torch.isin(ids, self._skipped)
        if recipe.keep_only_token_ids is not None and task != "query":
            kept = torch.isin(ids, torch.tensor(recipe.keep_only_token_ids, device=ids.device))
            scored = kept if scored is None else scored & kept
        return scored

    def _finished(self, hidden: torch.Tensor) -> torch.Tensor:
        """(tokens, hidden_size) -> float32 (tokens, full_dim), by the folder's modules."""
        rows = hidden.float()
        for module in self.recipe.modules:
            rows = module(rows)
        return rows

    def _pooled(self, found: TokenVectors, options: InferenceOptions) -> TokenVectors:
        """What stands behind the modules: fewer vectors, fewer dimensions, and their length."""
        found = _cluster(found, self.recipe.token_pooling, options.task)
        width = self.truncate_dim if options.truncate_dim is None else options.truncate_dim
        rows = found.vectors if width is None else found.vectors[:, :width]
        rows = ops.normalize(rows) if options.normalize else rows
        return _cluster(replace(found, vectors=rows.contiguous()), options.token_pooling, options.task)

    def job(self, inputs: list[Any], options: InferenceOptions) -> ChunkJob[TokenVectors]:
        """The vectors of texts, of all their windows."""
        from fastbert.data.chunks import OVERLAP
        from fastbert.data.chunks.job import ChunkJob, chosen, on_host, tokens_at
        from fastbert.sentences.documents import cutter_of

        assert options.windows is not None
        if options.windows.pool is not None:
            raise InputError(
                f"pool of windows is {options.windows.pool!r}, and tokens have a vector each: leave it out"
            )
        chunks = cutter_of(self, options.windows, options.task).cut(inputs, prompt=options.prompt)
        counts = chunks.parts != OVERLAP
        scored = self._scored(torch.from_numpy(chunks.ids).to(self.device), options.task)
        counts &= True if scored is None else scored.cpu().numpy()
        sizes = np.bincount(chunks.of_token[counts], minlength=len(chunks))

        def reduce(hidden: torch.Tensor, places: np.ndarray) -> list[np.ndarray]:
            rows = on_host(self._finished(chosen(hidden, counts[tokens_at(chunks, places)])))
            return np.split(rows, np.cumsum(sizes[places])[:-1])

        def finish(rows: Any) -> TokenVectors:
            of_texts = np.bincount(chunks.source, weights=sizes, minlength=len(inputs)).astype(np.int64)
            offsets = torch.from_numpy(np.append(0, np.cumsum(of_texts)).astype(np.int32))
            joined = torch.from_numpy(np.concatenate(rows)) if len(rows) else torch.zeros(0, self.full_dim)
            return self._pooled(TokenVectors(joined, offsets).to(self.device), options)

        return ChunkJob(chunks, self.model.last_hidden_state, reduce, finish)


def _special(settings: FolderSettings, name: str) -> str | None:
    """A token that tokenizer_config.json, or special_tokens_map.json, names."""
    for entries in settings.tokenizer_files.values():
        token = entries.get(name)
        if token is not None:
            return token["content"] if isinstance(token, dict) else token
    return None


def _add_prefixes(tokenizer: Tokenizer, older: OlderSettings) -> None:
    """Tokens that older folders put in front of texts are read as one each, where the vocabulary has them."""
    known = tokenizer.get_vocab(with_added_tokens=True)
    for prefix in older.prefixes.values():
        for token in (prefix, *prefix.split()[:1]):
            if token.strip() and token in known:
                if tokenizer.encode(token, add_special_tokens=False).tokens != [token]:
                    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
                break


def _cluster(found: TokenVectors, pooling: TokenPooling | None, task: str | None) -> TokenVectors:
    """See TokenPooling: texts one by one, on the host."""
    if pooling is None or (task or "document") not in pooling.tasks:
        return found
    rows = found
    if pooling.factor > 1:
        rows = TokenVectors.of([_clustered(one, pooling) for one in found])
        if not len(rows.vectors):
            return found
    vectors = ops.normalize(rows.vectors) if pooling.normalizes else rows.vectors
    return TokenVectors(vectors, rows.cu_seqlens)


def _clustered(rows: torch.Tensor, pooling: TokenPooling) -> torch.Tensor:
    """(tokens, dim) -> (fewer, dim): Ward's method on the distances 1 - cosine (Ward 1963)."""
    try:
        from scipy.cluster.hierarchy import fcluster, linkage
        from scipy.spatial.distance import squareform
    except ImportError:
        raise ConfigError("HierarchicalTokenPooling needs SciPy: pip install scipy") from None
    kept, merged = rows[: pooling.protected], rows[pooling.protected :].cpu()
    count = max(int(len(merged) // pooling.factor), 1)
    if count >= len(merged):
        return rows
    distances = (1 - merged @ merged.T).clamp_(0, 2).numpy()
    labels = fcluster(linkage(squareform(distances, checks=False), method="ward"), t=count, criterion="maxclust")
    found, cluster = torch.unique(torch.from_numpy(labels.astype(np.int64)), return_inverse=True)
    sums = torch.zeros(len(found), merged.shape[1]).index_add_(0, cluster, merged)
    return torch.cat([kept, (sums / cluster.bincount()[:, None]).to(rows.device)])
