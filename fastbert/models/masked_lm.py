"""The heads of pre-training: masked tokens, sentence pairs, and both."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from fastbert import ops
from fastbert.config import ACTIVATIONS, EncoderConfig
from fastbert.families.schema import MaskedLM, PreTraining, SentencePair, value_of
from fastbert.layers.encoder import add_norm
from fastbert.layers.leaves import (
    get_leaf,
    in_use,
    is_called,
    is_linear,
    is_plain,
    linear,
    parent_of,
    set_module,
    weights_of,
    within,
)
from fastbert.layers.norms import make_norm
from fastbert.layers.resizing import resize_rows
from fastbert.models.heads import HeadModel, class_labels, token_labels
from fastbert.models.outputs import Deferred
from fastbert.models.parts import head_parts
from fastbert.packing import PackedBatch


def labelled_tokens(labels: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """int64 (n,): where packed labels are not -100; a wait where the host has not looked."""
    return (labels != -100).nonzero().flatten() if batch.labelled is None else batch.labelled


class MaskedLMHeadModel(HeadModel):
    """The masked-LM head: dense, activation, norm and a decoder whose weight is the word embedding."""

    @property
    def masked_lm(self) -> MaskedLM:
        return self.head_spec.of(self.config)

    def build_masked_lm(self, config: EncoderConfig) -> None:
        names = self.masked_lm
        width, has_bias = self.decoder_width(config), value_of(names.dense_bias, config)
        dense_width = value_of(names.width, config)
        leaves = {
            "dense": lambda: nn.Linear(config.hidden_size, dense_width, bias=has_bias),
            "second": lambda: nn.Linear(dense_width, config.hidden_size, bias=has_bias),
            "norm": lambda: make_norm(self.family.norm_spec(config), width),
            "decoder": lambda: nn.Linear(width, config.vocab_size, bias=value_of(names.decoder_bias, config)),
        }
        for role in names.order:
            path = getattr(names, role)
            if path is not None:
                set_module(self, path, leaves[role]())
        if names.bias is not None:
            parent, _, leaf = names.bias.rpartition(".")
            get_leaf(self, parent).register_parameter(leaf, nn.Parameter(torch.zeros(config.vocab_size)))

    def decoder_width(self, config: EncoderConfig) -> int:
        names = self.masked_lm
        is_whole = names.dense is None or names.second is not None
        return config.hidden_size if is_whole else value_of(names.width, config)

    def tied_keys(self) -> dict[str, str]:
        """Second names of shared tensors -> the name that a file holds."""
        names = self.masked_lm
        tied = {}
        if self.config.tie_word_embeddings and names.may_tie and names.decoder is not None:
            tied[f"{names.decoder}.weight"] = f"{self.family.prefix}.{self.config.embeddings.word}.weight"
        if self.config.tie_word_embeddings and names.bias is not None and value_of(names.decoder_bias, self.config):
            tied[f"{names.decoder}.bias"] = names.bias
        return tied

    def table_shapes(self, config: EncoderConfig) -> dict[str, tuple[int, ...]]:
        names, words = self.masked_lm, config.vocab_size
        biases = [] if names.bias is None else [names.bias]
        decoder = {}
        if names.decoder is not None:
            biases.append(f"{names.decoder}.bias")
            decoder = {f"{names.decoder}.weight": (words, self.decoder_width(config))}
        return {**super().table_shapes(config), **decoder, **dict.fromkeys(biases, (words,))}

    def tie_weights(self) -> None:
        for copy, original in self.tied_keys().items():
            (copy_root, copy_leaf), (root, leaf) = (key.rsplit(".", 1) for key in (copy, original))
            get_leaf(self, copy_root)._parameters[copy_leaf] = get_leaf(self, root)._parameters[leaf]

    def get_output_embeddings(self) -> nn.Module:
        """The decoder; the word table, where that is what scores words."""
        decoder = self.masked_lm.decoder
        return get_leaf(self.base_model, self.config.embeddings.word) if decoder is None else get_leaf(self, decoder)

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the decoder; as in transformers, its bias is the head's from then on."""
        if self.masked_lm.decoder is None:
            raise TypeError(f"{type(self).__name__} has no decoder: the word table scores the words")
        parent, _, leaf = self.masked_lm.decoder.rpartition(".")
        in_use(get_leaf(self, parent) if parent else self).add_module(leaf, new_embeddings)
        if self.masked_lm.bias is not None and isinstance(new_embeddings._parameters.get("bias"), nn.Parameter):
            parent, _, leaf = self.masked_lm.bias.rpartition(".")
            in_use(get_leaf(self, parent))._parameters[leaf] = new_embeddings._parameters["bias"]

    def resize_decoder(self, rows: int, std: float | None) -> None:
        decoder, names = self.get_output_embeddings(), self.masked_lm
        if names.decoder is None:
            raise TypeError(f"{type(self).__name__} has no decoder to resize: the word table scores the words")
        if not isinstance(decoder, nn.Linear):
            raise TypeError(f"the decoder is a {type(decoder).__name__}; only an nn.Linear can be resized")
        is_tied = f"{names.decoder}.weight" in self.tied_keys()
        resize_rows(decoder, rows, 0.0 if is_tied else std)  # whose weight is the word table's after tie_weights
        if names.bias is None:
            return
        parent, _, leaf = names.bias.rpartition(".")
        holder = in_use(get_leaf(self, parent))
        if decoder.bias is not None:
            holder._parameters[leaf] = decoder.bias
        else:
            bias = holder._parameters[leaf]
            longer = torch.cat([bias.detach()[:rows], bias.new_zeros(max(0, rows - bias.shape[0]))])
            holder._parameters[leaf] = nn.Parameter(longer, requires_grad=bias.requires_grad)

    def num_words(self) -> int:
        """The classes of the decoder that is there; a leaf that is not plain checks labels by itself."""
        decoder = self.get_output_embeddings()
        if is_plain(decoder, nn.Embedding):
            return decoder.weight.shape[0]
        return weights_of(decoder).weight.shape[0] if is_linear(decoder) else self.config.vocab_size

    def decoder_loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of decoder(hidden) (tokens, vocab_size), without padding rows (-100)."""
        decoder, lone = self.get_output_embeddings(), self.lone_bias
        if isinstance(decoder, nn.Embedding) and lone is not None:
            return ops.cross_entropy(hidden, decoder.weight, lone, labels)
        if is_plain(decoder, nn.Linear) and (lone is None or decoder.bias is None):
            return ops.cross_entropy(hidden, decoder.weight, decoder.bias if lone is None else lone, labels)
        return ops.logits_cross_entropy(self.decoded(hidden), labels)

    @property
    def lone_bias(self) -> torch.Tensor | None:
        """The bias of a decoder that has none of its own."""
        names = self.masked_lm
        if names.bias is None or value_of(names.decoder_bias, self.config):
            return None
        parent, _, leaf = names.bias.rpartition(".")
        return in_use(get_leaf(self, parent))._parameters[leaf]

    def decoded(self, hidden: torch.Tensor) -> torch.Tensor:
        """(tokens, embedding_size) -> scores (tokens, vocab_size)."""
        decoder, bias = self.get_output_embeddings(), self.lone_bias
        if isinstance(decoder, nn.Embedding):  # read, not called, as in transformers
            return ops.linear(hidden, decoder.weight, bias)
        if bias is not None and is_plain(decoder, nn.Linear) and decoder.bias is None:
            return ops.linear(hidden, decoder.weight, bias)
        scores = linear(decoder, hidden)  # hooked, or LoRA's: called, as every leaf is
        return scores if bias is None else scores + bias

    def masked_lm_hidden(self, packed: torch.Tensor) -> torch.Tensor:
        """The head before its decoder: (tokens, hidden_size) -> (tokens, embedding_size)."""
        return packed if self.masked_lm.dense is None else within(self, self.dense_container, self.transformed, packed)

    def transformed(self, x: torch.Tensor) -> torch.Tensor:
        """The same, inside of the container of its leaves."""
        names = self.masked_lm
        activation = ACTIVATIONS[value_of(names.activation, self.config)]
        assert names.dense is not None
        x = linear(get_leaf(self, names.dense), x, activation)
        x = x if names.second is None else linear(get_leaf(self, names.second), x, activation)
        return x if names.norm is None else add_norm(get_leaf(self, names.norm), x, None, None, 0.0)

    def token_scores(self, packed: torch.Tensor) -> torch.Tensor:
        """Scores of the vocabulary: (tokens, hidden_size) -> (tokens, vocab_size)."""
        return within(self, self.inner_container, self.scored, packed)

    def scored(self, packed: torch.Tensor) -> torch.Tensor:
        """The same, inside of the container of the decoder."""
        return self.decoded(self.masked_lm_hidden(packed))

    def masked_lm_scores(self, packed: torch.Tensor) -> torch.Tensor:
        """`token_scores`, by way of all containers of the head that have hooks."""
        return within(self, self.outer_container, self.token_scores, packed)

    def callable_parts(self):
        runs = {
            self.dense_container: self.transformed,
            self.inner_container: self.scored,
            self.outer_container: self.token_scores,
        }
        return head_parts(runs)

    @property
    def dense_container(self) -> str | None:
        """What holds the dense and the norm alone."""
        scope = parent_of(self.masked_lm.dense or "")
        return None if scope == self.inner_container else scope

    @property
    def inner_container(self) -> str | None:
        """What holds the decoder, or its bias where the word table is the decoder."""
        names = self.masked_lm
        leaf = names.bias if names.decoder is None else names.decoder
        return None if leaf is None else parent_of(leaf)

    @property
    def outer_container(self) -> str | None:
        """BERT's `cls`, which holds all that is above the base model; None where a family has no such container."""
        return parent_of(self.inner_container or "")

    def needs_scores(self) -> bool:
        """Whether a container is called that returns scores, which the loss then starts from."""
        scopes = (self.inner_container, self.outer_container)
        return any([is_called(self, path) for path in scopes if path is not None])

    def masked_lm_logits(self, packed: torch.Tensor, batch: PackedBatch):
        return batch.unpack(self.masked_lm_scores(packed))

    def masked_lm_loss(self, packed: torch.Tensor, batch: PackedBatch, labels: torch.Tensor) -> torch.Tensor:
        """The whole head runs for labelled tokens only; `labels` of tokens, packed."""
        kept = labelled_tokens(labels, batch)
        packed, labels = packed.index_select(0, kept), labels.index_select(0, kept)
        if self.needs_scores():
            return ops.logits_cross_entropy(self.masked_lm_scores(packed), labels)
        return self.decoder_loss(self.masked_lm_hidden(packed), labels)


class ForMaskedLM(MaskedLMHeadModel):
    """Masked language modelling (Devlin et al. 2018, section 3.1).

    With labels, the decoder runs for labelled tokens only; `logits` of all tokens are computed if they are read.
    """

    def build_head(self, config):
        self.build_masked_lm(config)

    def check_options(self, options, batch):
        return {name: token_labels(labels, batch, self.num_words()) for name, labels in options.items()}

    def compute(self, encoded, options):
        packed, batch = encoded.packed, encoded.batch
        if not options:
            return {"logits": self.masked_lm_logits(packed, batch)}
        if value_of(self.head_spec.sparse, self.config):
            kept = labelled_tokens(options["labels"], batch)
            logits = self.masked_lm_scores(packed.index_select(0, kept))
            return {"loss": ops.logits_cross_entropy(logits, options["labels"].index_select(0, kept)), "logits": logits}
        logits = Deferred(lambda: self.masked_lm_logits(packed, batch), packed.device.type)
        return {"loss": self.masked_lm_loss(packed, batch, options["labels"]), "logits": logits}


class ForNextSentencePrediction(HeadModel):
    """Is sentence B what follows A (0) or a random one (1)?"""

    head_spec: ClassVar[SentencePair]

    @property
    def needs_pooler(self):
        return True

    def build_head(self, config):
        set_module(self, self.head_spec.out, nn.Linear(config.hidden_size, 2))

    def scored(self, pooled: torch.Tensor) -> torch.Tensor:
        """(batch, hidden_size) -> (batch, 2), inside of the head's container."""
        return linear(get_leaf(self, self.head_spec.out), pooled)

    def callable_parts(self):
        return head_parts({parent_of(self.head_spec.out): self.scored})

    def check_options(self, options, batch):
        classes = self.classes_at(self.head_spec.out)
        return {name: class_labels(labels, batch, classes) for name, labels in options.items()}

    def compute(self, encoded, options):
        path = self.head_spec.out
        logits = within(self, parent_of(path), self.scored, encoded.pooled())
        loss = self.class_loss(path, logits, options["labels"], encoded.batch) if options else None
        return {"loss": loss, "logits": logits}


class ForPreTraining(MaskedLMHeadModel):
    """Masked LM and a sentence-pair head together: next sentence (BERT) or sentence order (ALBERT)."""

    head_spec: ClassVar[PreTraining]

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.option_names = ("labels", cls.head_spec.pair_label)

    @property
    def needs_pooler(self):
        return True

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        token_type_ids=None,
        position_ids=None,
        inputs_embeds=None,
        labels=None,
        next_sentence_label=None,
        *args,
        sentence_order_label=None,
        **kwargs,
    ):
        """As other heads; the Trainer finds the names of labels here. A family has one of the two kinds of pairs."""
        pairs = {"next_sentence_label": next_sentence_label, "sentence_order_label": sentence_order_label}
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, labels)
        return super().forward(*inputs, *args, **pairs, **kwargs)

    @property
    def masked_lm(self):
        return self.head_spec.masked_lm.of(self.config)

    @property
    def label_leaf(self):
        return None if isinstance(self.head_spec.pair_size, int) else self.head_spec.pair

    def build_head(self, config):
        self.build_masked_lm(config)
        set_module(self, self.head_spec.pair, nn.Linear(config.hidden_size, value_of(self.head_spec.pair_size, config)))

    def check_options(self, options, batch):
        if len(options) < 2:  # as transformers: the loss needs both kinds of labels
            return {}
        name = self.head_spec.pair_label
        pairs = class_labels(options[name], batch, self.classes_at(self.head_spec.pair), name)
        return {"labels": token_labels(options["labels"], batch, self.num_words()), name: pairs}

    def compute(self, encoded, options):
        packed, batch, pooled = encoded.packed, encoded.batch, encoded.pooled()
        outer, has_loss = self.outer_container, bool(options)
        if outer is not None and is_called(self, outer):
            scores, pair = within(self, outer, self.both_scored, packed, pooled)
            logits = batch.unpack(scores)
            if has_loss:
                loss = ops.logits_cross_entropy(scores, options["labels"])
        elif has_loss:
            pair, loss = self.pair(pooled), self.masked_lm_loss(packed, batch, options["labels"])
            logits = Deferred(lambda: self.masked_lm_logits(packed, batch), packed.device.type)
        else:
            pair, logits = self.pair(pooled), self.masked_lm_logits(packed, batch)
        fields = {"prediction_logits": logits, self.head_spec.pair_logits: pair}
        if not has_loss:
            return fields
        name = self.head_spec.pair_label
        pair_loss = self.class_loss(self.head_spec.pair, pair, options[name], batch, name)
        return {"loss": {"labels": loss, name: pair_loss}, **fields}

    def pair(self, pooled: torch.Tensor) -> torch.Tensor:
        """Scores of a pair of sentences: (batch, hidden_size) -> (batch, 2)."""
        return within(self, self.pair_container, self.pair_scored, pooled)

    def pair_scored(self, pooled: torch.Tensor) -> torch.Tensor:
        """The same, inside of the container of the pair's head."""
        head = self.head_spec
        return linear(get_leaf(self, head.pair), self.drop(pooled, value_of(head.pair_dropout, self.config)))

    def both_scored(self, packed: torch.Tensor, pooled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores of words and of pairs, inside of the container that holds both heads."""
        return self.token_scores(packed), self.pair(pooled)

    @property
    def pair_container(self) -> str | None:
        """What holds the pair's head alone."""
        scope = parent_of(self.head_spec.pair)
        return None if scope == self.outer_container else scope

    def callable_parts(self):
        runs = {self.pair_container: self.pair_scored}
        if self.pair_container is None:
            runs[self.outer_container] = self.both_scored
        return super().callable_parts() | head_parts(runs)
