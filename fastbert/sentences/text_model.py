"""What a SentenceEncoder, a Reranker and a SparseEncoder share: a model, its tokenizer, their lengths and devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np
import torch
from tokenizers import Tokenizer

from fastbert.data.budget import batch_tokens_of
from fastbert.data.sentence_folder import FolderSettings
from fastbert.data.tokenized import Text, Tokenized, run_batches, tokenize, tokenize_one
from fastbert.errors import ConfigError, InputError
from fastbert.models.base import HasModel, PreTrainedModel
from fastbert.packed_inputs import PackedInputs
from fastbert.sentences.batches import bar_of, in_places, longest_first, progress_bar
from fastbert.sentences.pool import ProcessPool

if TYPE_CHECKING:
    from typing_extensions import Self

    from fastbert.data.chunks import Windows
    from fastbert.data.chunks.job import ChunkJob
    from fastbert.data.usage import Usage
    from fastbert.sentences.multi_vector.folder import TokenPooling
    from fastbert.sentences.saving import SavedModule

Aggregate = Literal["probabilities", "logits", "vectors"]  # what of the chunks of a text is combined
PROMPTS_OF_TASK = {"query": ("query",), "document": ("document", "passage", "corpus")}

Devices = str | torch.device | list[str | torch.device]


@dataclass(frozen=True)
class InferenceOptions:
    """What a call asks for, checked. `batch_tokens` and `batch_size` bound a batch."""

    prompt: str = ""
    batch_tokens: int | None = None
    batch_size: int | None = None
    normalize: bool | None = None  # this and the next: a SentenceEncoder's
    truncate_dim: int | None = None
    max_active_dims: int | None = None  # a SparseEncoder's
    on_host: bool = False  # the rows go to the CPU, batch by batch
    task: str | None = None  # "query" or "document": their texts may have a length of their own
    windows: Windows | None = None  # how longer texts are cut; None: they lose their ends
    aggregate: Aggregate | None = None  # a scorer's, of chunks; None: its default
    token_pooling: TokenPooling | None = None  # a MultiVectorEncoder's

    def __post_init__(self) -> None:
        if self.aggregate not in (None, *get_args(Aggregate)):
            raise InputError(f"unknown aggregate {self.aggregate!r}; there are {', '.join(get_args(Aggregate))}")
        if self.aggregate is not None and self.windows is None:
            raise InputError(f"aggregate={self.aggregate!r} is for windows, and there are none: give windows, too")
        if self.task not in (None, "query", "document"):
            raise InputError(f"unknown task {self.task!r}; there are query and document")
        for name in ("batch_tokens", "batch_size", "truncate_dim", "max_active_dims"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}; it must be at least 1")


# The checked options of the calls before: most calls have the same.
inference_options = lru_cache(maxsize=64, typed=True)(InferenceOptions)


class TextModel(HasModel):
    """A model in eval mode, and a tokenizer that cuts texts to `max_seq_length` tokens."""

    transformer_task: ClassVar[str]  # what the first module of its folder computes
    model_type: ClassVar[str] = ""  # the class of sentence-transformers that reads its folder; empty: there is none
    usage: Usage | None = None  # how its folder's fine-tuning says that it is used; None: nothing is said
    is_pair: ClassVar[bool] = False  # two texts are one input
    has_types: bool = False  # the model is told which token is of which text
    windows: Windows | None = None  # how calls that say nothing of it cut longer texts; None: these lose their ends
    default_prompts: ClassVar[tuple[str, ...]] = ()  # that every model has: empty ones, unless its folder says more

    def _assemble(
        self, model: PreTrainedModel, tokenizer: Tokenizer, max_seq_length: int, settings: FolderSettings | None = None
    ) -> None:
        """What `__init__` does once the parts are there."""
        settings = FolderSettings() if settings is None else settings
        tokenizer.no_padding()
        self.model, self.tokenizer, self.settings = model.eval(), tokenizer, settings
        self.max_seq_length = max_seq_length
        self.prompts = dict.fromkeys(self.default_prompts, "") | settings.prompts
        self.default_prompt_name = settings.default_prompt_name
        if self.default_prompt_name is not None and self.default_prompt_name not in self.prompts:
            has = ", ".join(self.prompts) or "no prompts"
            raise ConfigError(f"default_prompt_name is {self.default_prompt_name!r}; this model has: {has}")
        self._assigned: dict[str, Any] = {}  # of the tokenizer's attributes
        self._tokenizers = {
            task: Tokenizer.from_str(tokenizer.to_str()) for task in settings.transformer.lengths
        }  # each with a length of its own
        for task, length in settings.transformer.lengths.items():
            self._cut(self._tokenizers[task], length, f"{task}_length")

    @classmethod
    def of_parts(cls, *parts: Any, **options: Any) -> Self:
        """One of a model, a tokenizer, a length and so on, which were loaded before."""
        instance = cls.__new__(cls)
        instance._assemble(*parts, **options)
        return instance

    @classmethod
    def from_pretrained(cls, name_or_path: str | os.PathLike[str], **options: Any) -> Self:
        """The same as the constructor."""
        return cls(name_or_path, **options)  # type: ignore[call-arg]

    def save_pretrained(
        self,
        path: str | os.PathLike[str],
        model_name: str | None = None,
        create_model_card: bool = False,
        train_datasets: list[str] | None = None,
        safe_serialization: bool = True,
    ) -> None:
        """Writes a folder, which `from_pretrained` and sentence-transformers read, with all that loading has set.

        That of a quantised model is for `from_pretrained` alone. `windows` that were assigned are of no folder.

        Args:
            path: the folder.
            model_name, create_model_card: True writes a README.md with this name, where there is none yet.
            train_datasets: nothing, as in sentence-transformers.
            safe_serialization: must be True.

        Raises:
            ConfigError: something cannot be said in a folder, such as an activation of your own; nothing is written
            then. And the errors of a model's save_pretrained.
        """
        from fastbert.sentences.saving import save_text_model  # here and in the classes: few need it

        save_text_model(self, path, model_name, create_model_card, safe_serialization)

    save = save_pretrained

    def saved_modules(self) -> list[SavedModule]:
        """What follows the Transformer in its folder."""
        return []

    def saved_settings(self) -> dict[str, Any]:
        """Its own entries of config_sentence_transformers.json. Raises ConfigError."""
        return {}

    def saved_usage(self) -> Usage | None:
        return self.usage

    def __repr__(self) -> str:
        config, where = self.model.config, f"{str(self.model.dtype).removeprefix('torch.')} on {self.device}"
        size = f"{config.num_hidden_layers} layers of {config.hidden_size}"
        return f"{type(self).__name__}({config.model_type}, {size}, max_seq_length={self.max_seq_length}, {where})"

    @property
    def max_seq_length(self) -> int:
        """Longer texts are cut to so many tokens, special ones included."""
        self.tokenizer_of(None)  # takes what was set on the tokenizer
        return self._max_seq_length

    @max_seq_length.setter
    def max_seq_length(self, length: int) -> None:
        self._cut(self.tokenizer, length, "max_seq_length")
        self._max_seq_length = length

    def _cut(self, tokenizer: Tokenizer, length: int, name: str) -> None:
        limit, added = position_limit(self.model), tokenizer.num_special_tokens_to_add(self.is_pair)
        if not isinstance(length, Integral) or not added < length <= limit:
            raise ConfigError(f"{name} is {length!r}; this model allows {added + 1} to {limit} tokens")
        tokenizer.enable_truncation(length, direction=(tokenizer.truncation or {}).get("direction", "right"))

    def _assign(self, assigned: dict[str, Any]) -> None:
        """Takes what was set on the tokenizer by the names that transformers' tokenizers have for it.

        Raises InputError for another name, and ConfigError for a length that the model does not allow.
        """
        if others := assigned.keys() - {"truncation_side", "model_max_length"}:
            raise InputError(
                f"tokenizer.{min(others)} was set, which has no effect: a tokenizers.Tokenizer has methods"
                " (enable_truncation, ...), and of the names of transformers' it may have truncation_side and"
                " model_max_length"
            )
        if (length := assigned.get("model_max_length")) is not None:
            self.max_seq_length = length
        if (side := assigned.get("truncation_side")) is not None:
            for each in (self.tokenizer, *self._tokenizers.values()):
                each.enable_truncation((each.truncation or {}).get("max_length", self._max_seq_length), direction=side)
        self._assigned = dict(assigned)

    def tokenizer_of(self, task: str | None) -> Tokenizer:
        """The one that cuts the texts of a task, "query" or "document", to the length that the folder has for it."""
        if (assigned := self.tokenizer.__dict__) != self._assigned:
            self._assign(assigned)
        return self._tokenizers.get(task, self.tokenizer) if task is not None else self.tokenizer

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def default_batch_tokens(self) -> int:
        return batch_tokens_of(self.device)

    def tokenize(self, inputs: Sequence[Text], prompt: str = "", task: str | None = None) -> Tokenized:
        """The tokens of texts, or of pairs, `prompt` before each: cut to max_seq_length, or to the task's own length.

        Of a pair the longer text is cut.
        """
        if prompt:
            inputs = [prompted(prompt, one) for one in inputs]
        return tokenize(self.tokenizer_of(task), inputs, with_types=self._with_types(inputs))

    def _with_types(self, inputs: Sequence[Text]) -> bool:
        """Whether the model is told the types of these inputs' tokens. Those of texts are all 0, as without them."""
        if self.has_types or not any(isinstance(one, tuple) for one in inputs):
            return self.has_types
        return self.settings.transformer.gives_types and self.model.base_model.table_sizes().has_types

    def compute(self, batch: PackedInputs, options: InferenceOptions) -> Any:
        """The rows of one batch, which may be on the CPU still, (sequences, width), on the model's device."""
        raise NotImplementedError

    def run(
        self, tokenized: Tokenized, options: InferenceOptions, on_batch: Callable[[int], Any] = lambda sequences: None
    ) -> Iterator[tuple[np.ndarray, Any]]:
        """(the places of a batch's sequences, their rows) of tokenised texts, until all are done."""
        compute = partial(self.compute, options=options)
        return run_batches(compute, tokenized, self.device, options.batch_tokens, options.batch_size, on_batch=on_batch)

    def rows_of(
        self,
        tokenized: Tokenized,
        options: InferenceOptions | None = None,
        on_batch: Callable[[int], Any] = lambda sequences: None,
    ) -> torch.Tensor:
        """The rows of tokenised texts, in their order: (sequences, width) on the model's device, at least float32.

        `on_batch(sequences)` is called after each batch.
        """
        options = InferenceOptions() if options is None else options
        rows = in_places(len(tokenized), self.run(tokenized, options, on_batch))
        return self.no_rows(options) if rows is None else rows

    def joined_rows(self, parts: list[Any]) -> Any:
        """The rows of one or more pools' parts, in their order."""
        rows = torch.cat(parts)
        return rows.coalesce() if rows.is_sparse else rows

    def no_rows(self, options: InferenceOptions) -> Any:
        """The rows of no input, (0, width) on the model's device."""
        raise NotImplementedError

    def prompt(self, name: str | None = None, text: str | None = None) -> str:
        """The prompt: `text`, or the one called `name`, or the default. Raises InputError if a name is unknown."""
        if text is not None and name is not None:
            raise InputError(f"prompt {text!r} and prompt_name {name!r} exclude each other")
        name = self.default_prompt_name if name is None else name
        if text is None and name is not None and name not in self.prompts:
            raise InputError(f"unknown prompt {name!r}; this model has: {', '.join(self.prompts) or 'no prompts'}")
        return text if text is not None else self.prompts[name] if name is not None else ""

    def _of_task(self, task: str, options: dict[str, Any]) -> dict[str, Any]:
        """The options of a call, with the task's prompt that the model has, unless one is given."""
        options = {"task": task, **options}
        if options.get("prompt") is None and options.get("prompt_name") is None:
            options["prompt_name"] = next((name for name in PROMPTS_OF_TASK[task] if name in self.prompts), None)
        return options

    def to(self, device: str | torch.device) -> Self:
        """Moves the model, and returns itself."""
        self.model.to(pick_device(device))
        return self

    def get_max_seq_length(self) -> int:
        return self.max_seq_length

    def start_multi_process_pool(self, target_devices: list[str] | None = None) -> ProcessPool:
        """Processes with a copy of the model each, for the `pool` of later calls. The default: every GPU, or 4 on the
        CPU, as sentence-transformers. Where processes are spawned, a script needs `if __name__ == "__main__":`.
        """
        if target_devices is None:
            target_devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"] * 4
        return ProcessPool(self, [pick_device(device) for device in target_devices])

    @staticmethod
    def stop_multi_process_pool(pool: ProcessPool) -> None:
        pool.close()

    def rows(
        self, inputs: list[Any], options: InferenceOptions, on_batch: Callable[[int], Any] = lambda n: None
    ) -> Any:
        """The rows of checked inputs, in their order, on the model's device, or on the CPU (`options.on_host`)."""
        if len(inputs) == 1 and options.windows is None:
            return self._row_of_one(inputs[0], options, on_batch)
        parts = (
            (np.array(places), self.rows_of_inputs(chunk, options, on_batch)) for places, chunk in longest_first(inputs)
        )
        result = in_places(len(inputs), parts, "cpu" if options.on_host else None)
        return self.no_rows(options).to("cpu" if options.on_host else self.device) if result is None else result

    def _row_of_one(self, one: Any, options: InferenceOptions, on_batch: Callable[[int], Any]) -> torch.Tensor:
        """`rows` of one input: nothing is sorted, cut into batches or put in its place, which takes longer than some
        models.
        """
        tokenizer = self.tokenizer_of(options.task)
        batch = tokenize_one(tokenizer, prompted(options.prompt, one), with_types=self._with_types([one]))
        row = self.compute(batch, options)
        on_batch(1)
        return row.cpu() if options.on_host else row.clone()  # which is no tensor of inference mode any more

    def rows_of_inputs(
        self, inputs: list[Any], options: InferenceOptions, on_batch: Callable[[int], Any] = lambda n: None
    ) -> torch.Tensor:
        """The rows of inputs that are tokenised at once, in their order, on the model's device.

        `on_batch` counts inputs, or tokens where they are cut into windows.
        """
        if options.windows is not None:
            job = self.job(inputs, options)
            return job.run(self.device, options.batch_tokens, options.batch_size, on_tokens=on_batch)
        return self.rows_of(self.tokenize(inputs, options.prompt, options.task), options, on_batch)

    def job(self, inputs: list[Any], options: InferenceOptions) -> ChunkJob[Any]:
        """What gives the rows of inputs, on the model's device, of all their chunks, `options.windows`."""
        raise NotImplementedError

    def shared_rows(
        self,
        inputs: list[Any],
        options: InferenceOptions,
        show: bool | None,
        device: Devices | None,
        pool: ProcessPool | None,
        chunk_size: int | None,
        **bar_options: Any,
    ) -> Any:
        """`rows` with a bar (of tokens where texts are cut into chunks), by this process on its device, or by those of
        a pool, or of a list of devices.
        """
        if chunk_size is not None and pool is None and not isinstance(device, list):
            raise InputError("chunk_size is for a pool, or a list of devices")
        if len(inputs) == 1 and options.windows is None and pool is None and device is None and not show:
            return self.rows(inputs, options)  # done before a bar could show
        counts_tokens = options.windows is not None and pool is None and not isinstance(device, list)
        if counts_tokens:
            bar_options |= bar_of(options.windows)
        with progress_bar(None if counts_tokens else len(inputs), show, **bar_options) as bar:
            if pool is None and not isinstance(device, list):
                if device is not None:
                    self.to(device)
                return self.rows(inputs, options, bar.update)
            if isinstance(device, list) and pool is not None:
                raise InputError("pool and a list of devices exclude each other")
            if not inputs:
                return self.rows(inputs, options)
            used = pool if pool is not None else self.start_multi_process_pool(device)  # type: ignore[arg-type]
            try:
                parts = []
                for count, rows in used.rows(inputs, options, chunk_size):
                    parts.append(rows)
                    bar.update(count)
                return self.joined_rows(parts)
            finally:
                if pool is None:
                    used.close()


def prompted(prompt: str, one: Text) -> Text:
    """A text, or a pair, with the prompt before it."""
    if not prompt:
        return one
    return prompt + one if isinstance(one, str) else (prompt + one[0], one[1])


def position_limit(model: PreTrainedModel) -> int:
    """The longest sequence, in tokens, that the position table has room for; without one, what the config names."""
    limit = model.base_model.table_sizes().longest(model.config)
    return model.config.max_position_embeddings if limit is None else limit


def pick_device(device: torch.device | str | None) -> torch.device:
    """`device`, or CUDA where there is a GPU, else the CPU. Raises ConfigError for one that is not there."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {device!r}: {str(error).splitlines()[0]}") from None
    gpu = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if gpu is not None else 0
    if picked.type != "cpu" and (gpu is None or picked.type != gpu.type or (picked.index or 0) >= count):
        there = "the CPU only" if gpu is None else f"the CPU and {count} of {gpu.type}"
        raise ConfigError(f"device {device!r} is not there: torch {torch.__version__} sees {there}")
    return picked
