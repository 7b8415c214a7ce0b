"""The base model of every family: pack, embed, run the layers on packed tokens, unpack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from fastbert import ops
from fastbert.checkpoint.unfilled import may_be_unfilled
from fastbert.config import EncoderConfig
from fastbert.errors import ConfigError, InputError
from fastbert.execution import at_once, run
from fastbert.execution.calls import Calls
from fastbert.execution.request import (
    NOTHING_ELSE,
    EncoderInputs,
    EncoderOutput,
    PackedIds,
    Wanted,
    first_tokens,
    padding_in,
    run_pooler,
)
from fastbert.execution.tree import OwnTree
from fastbert.families.schema import Family
from fastbert.layers.convolution import place_convolution
from fastbert.layers.embeddings import ScaledEmbedding
from fastbert.layers.encoder import EncoderLayer
from fastbert.layers.leaves import get_leaf, has_hooks, is_plain, parent_of, set_module, within
from fastbert.layers.norms import make_norm
from fastbert.layers.relative import place_relative, relative_shapes
from fastbert.layers.rotary import place_rotary
from fastbert.layers.sharded import is_sharded, without_views
from fastbert.models.hf.access import ModelAccess
from fastbert.models.hf.recording import record, records_hf
from fastbert.models.inputs import TableSizes, prepare_inputs, refuse_others, table_sizes, taken
from fastbert.models.outputs import ModelOutput
from fastbert.models.parts import encoder_parts, place_parts
from fastbert.models.quantized import entry_of, place_int8
from fastbert.models.tree import RunsBaseModel, first_parameter, groups_unsupported, layers_of
from fastbert.packed_inputs import ModelInputs, PackedInputs
from fastbert.packing import PackedBatch


class PreTrainedModel(ModelAccess):
    """What base models and models with heads share. `config` is an EncoderConfig, or transformers' config object."""

    family: ClassVar[Family]

    def __init__(self, config: EncoderConfig):
        nn.Module.__init__(self)  # not what transformers' class, which may stand between the two, does with its config
        if not isinstance(config, EncoderConfig):
            config = EncoderConfig.from_dict(config.to_dict())
        if config.model_type != self.family.model_type:
            raise ConfigError(
                f"{type(self).__name__} takes model_type {self.family.model_type!r}, not {config.model_type!r}"
            )
        ops.warn_of_missing_kernels()
        self.set_theirs()
        self.config = config.in_use()
        self.gradient_checkpointing = bool(self.config.extra.get("gradient_checkpointing"))  # as in transformers

    @property
    def base_model(self) -> EncoderModel:
        raise NotImplementedError

    @property
    def running_config(self) -> EncoderConfig:
        """`config` with the number of layers that are there now: `model.encoder.layer = model.encoder.layer[:4]`."""
        if (unsupported := groups_unsupported(self.base_model, self.config)) is not None:
            raise ConfigError(unsupported)
        layers = layers_of(self.base_model, self.config)
        if layers is None or layers == self.config.num_hidden_layers:
            return self.config
        return self.config.replace(num_hidden_layers=layers)

    @property
    def live_config(self) -> EncoderConfig:
        """`running_config` with the rows of the tables that are there now, which forward calls look up themselves."""
        config, tables = self.running_config, self.base_model.table_sizes()
        positions = tables.rotary_positions if tables.positions is None else tables.positions
        rows = {"vocab_size": tables.words}
        if positions is not None:
            rows["max_position_embeddings"] = positions
        if config.embeddings.token_type is not None:
            rows["type_vocab_size"] = tables.token_types
        if config.embeddings.task_type is not None:
            rows["task_type_vocab_size"] = tables.task_types
        changed = {name: count for name, count in rows.items() if getattr(config, name) != count}
        return config.replace(**changed) if changed else config

    def table_shapes(self, config: EncoderConfig) -> dict[str, tuple[int, ...]]:
        names, width = config.embeddings, config.embedding_width
        rows = {names.word: config.vocab_size}
        if names.position is not None:
            rows[names.position] = config.max_position_embeddings
        if names.token_type is not None:
            rows[names.token_type] = config.type_vocab_size
        if names.task_type is not None:
            rows[names.task_type] = config.task_type_vocab_size
        shapes = {path: (count, width) for path, count in rows.items()}
        for rotary in config.rotaries:
            if rotary.table is not None:
                shapes[rotary.table] = (config.max_position_embeddings, rotary.dim)
        attention = self.family.layer_spec(config, 0).attention
        shapes |= relative_shapes(attention, config.hidden_size)
        shapes |= {path: (out, columns) for path, (columns, out) in self.family.unused_linears(config).items()}
        prefix = "" if self.base_model is self else f"{self.family.prefix}."
        return {f"{prefix}{path}.weight": shape for path, shape in shapes.items()}

    def frequency_keys(self) -> list[str]:
        prefix = "" if self.base_model is self else f"{self.family.prefix}."
        return [f"{prefix}{rotary.frequencies}" for rotary in self.config.rotaries if rotary.frequencies is not None]

    @property
    def device(self) -> torch.device:
        return first_parameter(self).device

    @property
    def dtype(self) -> torch.dtype:
        return first_parameter(self).dtype

    def quantization_entry(self) -> dict[str, Any] | None:
        return entry_of(self.base_model, self.running_config)

    def place_int8(self) -> bool:
        return place_int8(self.base_model, self.config)

    def __prepare_scriptable__(self):
        raise TypeError("torch.jit.script cannot compile this model; torch.compile does")


def held_models(module: nn.Module) -> list[PreTrainedModel]:
    """The models in a module that trains one or several of them; a model holds itself."""
    if isinstance(module, PreTrainedModel):
        return [module]
    return [model for child in module.children() for model in held_models(child)]


class HasModel:
    """What is no module but runs one (SentenceEncoder): fastbert.quantize and fastbert.repack take it in its place."""

    model: PreTrainedModel

    def encode(self, inputs: Any) -> Any:
        """Run the model on inputs; what comes back has a length, the number of them."""
        raise NotImplementedError


class EncoderModel(PreTrainedModel, RunsBaseModel):
    """A family's encoder. Subclasses name their family; the leaves sit at Hugging Face's paths."""

    @may_be_unfilled
    def __init__(self, config: EncoderConfig, add_pooling_layer: bool | None = None):
        super().__init__(config)
        config, family = self.config, self.family
        names, norm = config.embeddings, family.norm_spec(config)
        padding_idx, width = config.padding_idx, config.embedding_width
        position_padding = padding_idx if names.pads_positions else None

        def word() -> nn.Embedding:
            if names.word_scale is not None:
                return ScaledEmbedding(config.vocab_size, width, names.word_scale, padding_idx)
            return nn.Embedding(config.vocab_size, width, padding_idx=padding_idx)

        make = {
            "word": word,
            "position": lambda: nn.Embedding(config.max_position_embeddings, width, padding_idx=position_padding),
            "token_type": lambda: nn.Embedding(config.type_vocab_size, width),
            "task_type": lambda: nn.Embedding(config.task_type_vocab_size, width),
            "norm": lambda: make_norm(norm, config.hidden_size if names.projects_first else width),
            "project": lambda: nn.Linear(width, config.hidden_size, bias=not names.projects_first),
        }
        for role in names.order:
            path = getattr(names, role)
            if path is not None:
                set_module(self, path, make[role]())
        wants_pooler = family.has_pooler if add_pooling_layer is None else add_pooling_layer
        self.has_pooler = family.pooler is not None and wants_pooler
        self.calls = Calls()
        if family.pooler_first:
            self._place_pooler()
        place_rotary(self, config.rotaries, config.max_position_embeddings)
        layers = dict(zip(config.layer_paths, config.layer_specs, strict=True))
        for i in range(config.num_unique_layers):
            path = family.path_of_layer(config, i)
            spec = layers[path] if path in layers else family.layer_spec(config, i)
            set_module(self, path, EncoderLayer(spec, config.hidden_size))
        first = family.layer_spec(config, 0)
        place_relative(self, first.attention, norm, config.hidden_size)
        if first.after is not None:
            place_convolution(self, first.after, norm, config.hidden_size)
        if family.final_norm is not None:
            set_module(self, family.final_norm, make_norm(norm, config.hidden_size))
        if not family.pooler_first:
            self._place_pooler()
        for path, (columns, rows) in family.unused_linears(config).items():
            set_module(self, path, nn.Linear(columns, rows))
        place_parts(self, encoder_parts(config, self.has_pooler))
        self.draw_weights()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("calls", Calls())  # which pickles of models from before have not

    def _place_pooler(self) -> None:
        if self.has_pooler:
            assert self.family.pooler is not None
            set_module(self, self.family.pooler, nn.Linear(self.config.hidden_size, self.config.hidden_size))

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "family" in cls.__dict__:
            cls.base_model_prefix = cls.family.prefix

    @property
    def base_model(self) -> EncoderModel:
        return self

    def config_now(self) -> EncoderConfig:
        return self.running_config

    def encode(self, inputs: EncoderInputs, wanted: Wanted = NOTHING_ELSE) -> EncoderOutput:
        """The last hidden state of checked inputs, and what else is wanted."""
        return run(OwnTree(self, is_causal=wanted.is_causal), inputs, wanted)

    def encode_packed(
        self,
        input_ids: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        task_type_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Encode a packed batch. torch.compile(fullgraph=True) and torch.export take this method.

        Args:
            input_ids, token_type_ids, position_ids, task_type_ids: int64 (total_tokens,).
            cu_seqlens: int32 (batch + 1,), the offsets of the sequences.
            max_seqlen: an upper bound of their lengths, a Python int.

        Returns:
            The last hidden state, (total_tokens, hidden_size).

        Raises:
            InputError: an id, a shape, a dtype or an offset is out of bounds.
        """
        arguments = ModelInputs(
            input_ids,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            task_type_ids=task_type_ids,
        )
        inputs = self.prepare(arguments)
        self.calls.ran_packed()
        return self.encode(inputs).packed

    def last_hidden_state(self, packed: PackedInputs) -> torch.Tensor:
        """The last hidden state of a batch, (total_tokens, hidden_size), by `forward` where somebody waits for its call
        (a hook), and else without the pooler. Raises InputError as `forward`.
        """
        if must_be_called(self):
            return self._last_hidden_state(packed, None)
        tree = OwnTree(self)
        output = at_once(tree, PackedIds.of_packed(packed, self.config))
        if output is None:
            return self._last_hidden_state(packed, tree)
        self.calls.ran_packed()
        return output.packed

    def infer(self, packed: PackedInputs, pooling: str = "none", normalizes: bool = False) -> tuple[torch.Tensor, bool]:
        """The same of a batch of which no gradients are wanted, whatever the mode, and which may be on the CPU still.

        Where one op makes all of it, (what `pooling` and `normalizes` say, as at_once has them, True); else (the last
        hidden state, False).
        """
        tree = None
        if not must_be_called(self):
            tree = OwnTree(self, infers=True)
            output = at_once(tree, PackedIds.of_packed(packed, self.config), False, pooling, normalizes)
            if output is not None:
                self.calls.ran_packed()
                return output.packed, True
        with torch.inference_mode():
            return self._last_hidden_state(packed.to(self.device), tree), False

    def _last_hidden_state(self, packed: PackedInputs, tree: OwnTree | None) -> torch.Tensor:
        """tree: of this call; None: somebody waits for `forward`."""
        if tree is None:
            others = {name: value for name, value in packed.items() if name != "input_ids"}
            return self(packed["input_ids"], **others).last_hidden_state
        inputs = self.prepare(ModelInputs(packed))
        self.calls.ran_packed()
        return run(tree, inputs).packed

    def prepare(self, arguments: ModelInputs, has_padding: bool | None = None) -> EncoderInputs:
        """Check and pack what a caller gave. has_padding: of its mask, as padding_in has it. Raises InputError."""
        if isinstance(arguments.input_ids, PackedInputs):
            arguments = arguments.opened()
            word, device = get_leaf(self, self.config.embeddings.word), arguments.input_ids.device
            # Where hooks are, they may bring weights from elsewhere before a leaf is called.
            if is_plain(word, nn.Embedding) and not has_hooks(self) and word.weight.device != device:
                raise InputError(f"the PackedInputs is on {device}, the model on {word.weight.device}")
        refuse_others(self, is_padded=arguments.attention_mask is not None)
        return prepare_inputs(self.config, self.table_sizes(), arguments, has_padding=has_padding)

    def table_sizes(self) -> TableSizes:
        return table_sizes(self, self.config, self.config)

    def pool(self, packed: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """The pooled output (batch, hidden_size) of each sequence's first real token."""
        assert self.family.pooler is not None
        first = first_tokens(packed, batch)
        return within(self, parent_of(self.family.pooler), lambda x: run_pooler(self, self.family, x), first)

    def forward(
        self,
        input_ids: torch.Tensor | PackedInputs | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | int | Sequence[int] | None = None,
        return_dict: bool | None = None,
        *,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
        batch: PackedBatch | None = None,
        task_type_ids: torch.Tensor | None = None,
        **options: Any,
    ) -> ModelOutput | tuple:
        """Encode a batch, padded or packed, or a PackedInputs, which stands for all of the arguments but the options.

        Args:
            input_ids, token_type_ids, position_ids: (batch, seqlen), or (total_tokens,) with `cu_seqlens` or `batch`.
            attention_mask: (batch, seqlen), 1 at real tokens. Padding may be on any side, and between tokens.
            inputs_embeds: (batch, seqlen, embedding_size), instead of input_ids.
            cu_seqlens, max_seqlen: int32 (batch + 1,) and the longest sequence's length, if the input is packed.
            batch: instead of these two, that of a PackedInputs, as in `model(**packed_inputs)`.
            task_type_ids: as token_type_ids, of families that have task types (ERNIE 2.0 and later).
            options: what transformers' encoders ignore, too: `use_cache`, `num_items_in_batch`, and what
                sentence-transformers has left of its results in features.

        Returns:
            `last_hidden_state`: (batch, seqlen, hidden_size), zeros at padding; (total_tokens, hidden_size) if packed.
            For a PackedInputs, what there would be for the batch that it was made from.
            `pooler_output`: (batch, hidden_size), from each sequence's first real token. A sequence without tokens
            gives the pooler's value of zeros. `hidden_states`, and `attentions` (batch, heads, seqlen, seqlen), if they
            were asked for. Numbers in `output_hidden_states` select some of them; the others are None.

        Raises:
            InputError: an id, a shape, a dtype or an offset is out of bounds. Nothing has been launched.
            TypeError: there is no argument of such a name.
        """
        taken(options, (), self)
        arguments = ModelInputs(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            cu_seqlens,
            max_seqlen,
            batch,
            task_type_ids,
        )
        if records_hf() and not arguments.are_packed():
            asked = {"output_attentions": output_attentions, "output_hidden_states": output_hidden_states}
            recorded = ModelOutput(record(self, arguments, asked))
            return recorded if self.config.option("return_dict", return_dict) else recorded.to_tuple()
        option = self.config.option
        wanted = self.wanted(output_attentions, output_hidden_states)
        has_padding = padding_in(attention_mask, input_ids)
        tree, ids = OwnTree(self), None
        if not wanted.is_of_layers:
            ids = PackedIds.of_grid(arguments, self.config.embeddings.token_type is not None, has_padding)
        encoded = at_once(tree, ids, self.has_pooler)
        if encoded is None:
            inputs = self.prepare(arguments, has_padding)
            encoded, batch = run(tree, inputs, wanted), inputs.batch
        else:
            assert ids is not None
            batch = ids.batch
        self.calls.ran_packed()
        pools = self.has_pooler and encoded.pooled is None
        output = ModelOutput(
            last_hidden_state=encoded.last_state(batch),
            pooler_output=self.pool(encoded.packed, batch) if pools else encoded.pooled,
            **encoded.extras(),
        )
        if is_sharded(self):
            output.update({name: without_views(value) for name, value in output.items()})
        return output if option("return_dict", return_dict) else output.to_tuple()

    def wanted(self, output_attentions: bool | None, output_hidden_states: Any) -> Wanted:
        """What a call's options, or the config's, ask for."""
        option = self.config.option
        states = option("output_hidden_states", output_hidden_states)
        probs = option("output_attentions", output_attentions)
        if not states and not probs:
            return Wanted(pooler=self.has_pooler)
        return Wanted.of_all(len(self.running_config.layer_paths), states, probs, self.has_pooler)


_own_forward = EncoderModel.forward


def must_be_called(base: EncoderModel) -> bool:
    """Whether calling a base model does anything else than `EncoderModel.forward`, for which `run` may stand in."""
    return has_hooks(base) or "forward" in base.__dict__ or type(base).forward is not _own_forward
