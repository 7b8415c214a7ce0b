"""Likelihoods of words, their vectors, and what a model does without some of its heads."""

from __future__ import annotations

import pytest
import torch
from family_configs import config_for, make_config
from full import left_to_full
from hf import MODELS, make_hf, make_ours, make_trio
from seeds import torch_generator
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import BPE, WordPiece
from tokenizers.pre_tokenizers import BertPreTokenizer, ByteLevel, Whitespace

import fastbert
from fastbert import inspect
from fastbert.errors import InputError
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

MASK = 4
MASKED_LMS = sorted(model_type for model_type, head in MODELS if head == "MaskedLM")


def texts(config) -> list[list[int]]:
    generator = torch_generator(2)
    return [torch.randint(5, config.vocab_size, (n,), generator=generator).tolist() for n in (7, 3, 5)]


@left_to_full(lambda p: p["model_type"] not in ("bert", "esm", "modernbert"))  # whose heads differ
@pytest.mark.parametrize("model_type", MASKED_LMS)
def test_likelihoods_are_those_of_transformers(model_type):
    config = config_for(model_type, "MaskedLM", 0)
    trio, ids = make_trio(config, "MaskedLM", torch.float32), texts(config)
    words = [[None, 0, 1, 1, 1, 2, None], [None, None, None], [0, 0, 1, 2, 2]]

    def one_by_one(theirs, of_words: bool) -> list[torch.Tensor]:
        found = []
        for text, numbers in zip(ids, words, strict=True):
            row = []
            for place in range(len(text)):
                masked, rest = list(text), range(place + 1, len(text))
                masked[place] = MASK
                for later in rest if of_words and numbers[place] is not None else ():
                    if numbers[later] != numbers[place]:
                        break
                    masked[later] = MASK
                with torch.no_grad():
                    logits = theirs.eval()(torch.tensor([masked]), attention_mask=torch.ones(1, len(text))).logits
                row.append(logits[0, place].log_softmax(-1)[text[place]])
            found.append(torch.stack(row))
        return found

    for of_words in (False, True):
        found = inspect.token_log_probs(
            trio.ours.eval(), fastbert.pack_inputs(ids), MASK, words=words if of_words else None, batch_tokens=30
        )
        oracle, near = (torch.cat(one_by_one(m, of_words)) for m in (trio.oracle, trio.baseline))
        assert [len(t) for t in found] == [7, 3, 5]
        assert_close_to_reference(torch.cat(found), oracle, near, GRADIENT_FACTOR)


def test_likelihoods_that_cannot_be():
    config = make_config("bert", 0)
    model = make_ours(config, "MaskedLM", make_hf(config, "MaskedLM")).eval()
    batch = fastbert.pack_inputs([[2, 5, 3], [2, 3]])
    found = inspect.token_log_probs(model, batch, MASK, skipped_ids=[2, 3])
    assert [t.isnan().tolist() for t in found] == [[True, False, True], [True, True]]
    with pytest.raises(InputError, match=r"words has \[3\] tokens for texts of \[3, 2\]"):
        inspect.token_log_probs(model, batch, MASK, words=[[None, 0, None]])
    with pytest.raises(InputError, match="mask_id is 100000; the model has"):
        inspect.token_log_probs(model, batch, 100000)
    with pytest.raises(InputError, match="training mode"):
        inspect.token_log_probs(model.train(), batch, MASK)
    with pytest.raises(InputError, match="BertModel has no masked-LM head"):
        inspect.token_log_probs(fastbert.AutoModel.from_config(config).eval(), batch, MASK)


def test_hidden_states_are_transformers():
    config = make_config("bert", 0)
    trio = make_trio(config, "Model", torch.float32)
    ids = texts(config)
    found = inspect.hidden_states(trio.ours.eval(), fastbert.pack_inputs(ids), layers=[0, -1, 2])
    for one, states in zip(ids, found, strict=True):
        theirs = [
            m.eval()(torch.tensor([one]), output_hidden_states=True).hidden_states for m in (trio.oracle, trio.baseline)
        ]
        oracle, near = (torch.cat([of_all[i] for i in (0, 2, 4)]) for of_all in theirs)
        assert_close_to_reference(states, oracle, near, GRADIENT_FACTOR)
    with pytest.raises(InputError, match="no layer 5: the model has 5, 0 to 4"):
        inspect.hidden_states(trio.ours, fastbert.pack_inputs(ids), layers=[5])


def test_a_words_tokens_and_its_vector():
    pieces = {piece: i for i, piece in enumerate(("[UNK]", "the", "bank", "##er", "##s", "a"))}
    tokenizer = Tokenizer(WordPiece(pieces, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = BertPreTokenizer()
    encoding = tokenizer.encode("the bankers a")
    assert encoding.tokens == ["the", "bank", "##er", "##s", "a"]
    assert inspect.tokens_of_word(encoding, 4, 11) == [1, 2, 3]
    with pytest.raises(InputError, match="no token stands for the characters 40 to 44"):
        inspect.tokens_of_word(encoding, 40, 44)
    states = [torch.arange(20.0).view(2, 5, 2), torch.ones(2, 3, 2)]
    found = inspect.word_vectors(states, [[1, 2, 3], [0]])
    assert found.tolist() == [[[4.0, 5.0], [1.0, 1.0]], [[14.0, 15.0], [1.0, 1.0]]]


def test_a_word_of_one_character_behind_a_blank_that_the_tokenizer_adds():
    """ByteLevel's span of it is empty: there was no token of it."""
    pieces = {piece: i for i, piece in enumerate(("\u0120", "a", "b", "c", "\u0120a"))}
    tokenizer = Tokenizer(BPE(pieces, [("\u0120", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([Whitespace(), ByteLevel(add_prefix_space=True)])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    encoding = tokenizer.encode("a bc a")
    assert encoding.tokens == ["\u0120a", "\u0120", "b", "c", "\u0120a"]
    assert [inspect.tokens_of_word(encoding, *at) for at in ((0, 1), (2, 4), (5, 6))] == [[0], [1, 2, 3], [4]]
    with pytest.raises(InputError, match="no token stands for the characters 4 to 5"):
        inspect.tokens_of_word(encoding, 4, 5)


def test_neighbours_cosines_and_components():
    angles = torch.tensor([0.0, 0.1, 1.5, 1.6])
    layer = torch.stack([angles.cos(), angles.sin()], -1)
    found = inspect.cosines(layer)
    assert torch.allclose(found, (angles[:, None] - angles).cos(), atol=1e-6)
    both = torch.stack([layer, layer[[0, 2, 1, 3]]])
    assert inspect.neighbour_accuracy(both, ["river", "river", "money", "money"]).tolist() == [1.0, 0.0]
    with pytest.raises(ValueError, match="3 senses of 4 vectors"):
        inspect.neighbour_accuracy(layer[None], [1, 2, 3])
    line = torch.tensor([[0.0, 0.0], [3.0, 4.0], [-3.0, -4.0]])
    components = inspect.principal_components(line, 2)
    assert components[:, 0].abs().tolist() == pytest.approx([0.0, 5.0, 5.0], abs=1e-6)
    assert components[:, 1].tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-6)
    assert inspect.principal_components(line[:1], 2).tolist() == [[0.0, 0.0]]


def test_a_probe_finds_what_is_linear():
    generator = torch_generator(3)
    labels = ["a", "b", "c"] * 10
    noise = torch.randn(30, 4, generator=generator)
    place = torch.eye(4)[[{"a": 0, "b": 1, "c": 2}[label] for label in labels]]
    accuracy = inspect.linear_probe(torch.stack([noise, noise + 20 * place]), labels)
    assert accuracy[1] == 1.0 and accuracy[0] < 0.8
    with pytest.raises(ValueError, match="2 labels of 30 vectors"):
        inspect.linear_probe(noise[None], ["a", "b"])
    with pytest.raises(ValueError, match="label 'z' has 1 vectors; cross-validation in 5 folds"):
        inspect.linear_probe(noise[None], [*labels[:-1], "z"])


@pytest.mark.parametrize("model_type", ("bert", "albert", "modernbert", "deberta-v2"))
def test_a_head_that_is_taken_out_adds_nothing(model_type):
    config = config_for(model_type, "Model", 0)
    theirs = make_hf(config, "Model").eval()
    ours, ids = make_ours(config, "Model", theirs).eval(), texts(config)
    batch, shared = fastbert.pack_inputs(ids), len(set(config.layer_paths)) < len(config.layer_paths)
    layers = range(len(config.layer_paths)) if shared else [1]
    before = ours(batch).last_hidden_state
    with inspect.without_heads(ours, {i: [-1] for i in layers}):
        found = ours(batch).last_hidden_state
    assert torch.equal(ours(batch).last_hidden_state, before)
    with torch.no_grad():  # the same by the weights
        for path in {config.layer_paths[i] for i in layers}:
            spec = config.layer_specs[0]
            leaf = theirs.get_submodule(f"{path}.{spec.names.attention_output}")
            leaf.weight[:, -spec.attention.head_dim :] = 0.0
        alone = [
            theirs(torch.tensor([one]), attention_mask=torch.ones(1, len(one))).last_hidden_state[0] for one in ids
        ]
        exact = theirs.double()
        oracle = [
            exact(torch.tensor([one]), attention_mask=torch.ones(1, len(one))).last_hidden_state[0] for one in ids
        ]
    assert_close_to_reference(found.detach(), torch.cat(oracle), torch.cat(alone), GRADIENT_FACTOR)
    if shared:
        with (
            pytest.raises(InputError, match="share their weights: they lose the same heads, or none"),
            inspect.without_heads(ours, {0: [0]}),
        ):
            pass


def test_each_head_is_taken_out_in_turn():
    config = make_config("bert", 0)
    model = make_ours(config, "Model", make_hf(config, "Model")).eval()
    batch = fastbert.pack_inputs(texts(config))
    whole = model(batch).last_hidden_state.detach()
    measured = inspect.measure_without_each_head(
        model, lambda: float((model(batch).last_hidden_state.detach() - whole).abs().max())
    )
    assert measured.shape == (config.num_hidden_layers, config.num_attention_heads)
    assert (measured > 0).all() and torch.equal(model(batch).last_hidden_state, whole)
    with inspect.without_heads(model, {2: [0]}):
        assert float((model(batch).last_hidden_state.detach() - whole).abs().max()) == measured[2, 0]
    with inspect.without_heads(model, {-1: [0], 3: [1]}):  # one layer, named twice
        both = model(batch).last_hidden_state.detach()
    with inspect.without_heads(model, {3: [0, 1]}):
        assert torch.equal(model(batch).last_hidden_state, both)
    with pytest.raises(InputError, match="no layer 9"), inspect.without_heads(model, {9: [0]}):
        pass


@left_to_full(lambda p: p["model_type"] == "modernbert")  # test_accelerate_families.py finds its leaves, too
@pytest.mark.parametrize("model_type", ("bert", "modernbert"))
def test_live_models_of_transformers_are_read_as_ours(model_type):
    config = config_for(model_type, "MaskedLM", 0)
    theirs = make_hf(config, "MaskedLM").eval()
    ours, batch = make_ours(config, "MaskedLM", theirs).eval(), fastbert.pack_inputs(texts(config))
    for call in (
        inspect.attention,
        inspect.weighted_attention,
        inspect.hidden_states,
        lambda model, batch: inspect.token_log_probs(model, batch, MASK),
        lambda model, batch: inspect.attention_relevance(model, batch, inspect.token_label(1, 5)),
        lambda model, batch: [a.scores for a in inspect.integrated_gradients(model, batch, inspect.token_label(1, 5))],
    ):
        assert all(map(torch.equal, call(theirs, batch), call(ours, batch)))
    base = theirs.base_model
    assert all(map(torch.equal, inspect.attention(base, batch), inspect.attention(ours, batch)))
    with pytest.raises(InputError, match="none of fastbert's models: heads"), inspect.without_heads(theirs, {0: [0]}):
        pass
    with pytest.raises(InputError, match="Linear is none of fastbert's models"):
        inspect.attention(torch.nn.Linear(2, 2), batch)
    with pytest.raises(InputError, match="training mode"):
        inspect.attention(theirs.train(), batch)
