"""fastbert's own classes in tools that run, look into or export transformers' models: equal numbers, packed layers."""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers
from family_configs import config_for
from full import left_to_full
from hf import make_hf, make_ours
from seeds import torch_generator
from theirs import mend
from tiny import write_model

import fastbert
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

TEXTS = ["the cat sat on a mat", "who ran in ?"]
IDS = torch.randint(5, 43, (2, 7), generator=torch_generator(0))
MASK = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
TASKS = {
    "feature-extraction": "Model",
    "text-classification": "SequenceClassification",
    "token-classification": "TokenClassification",
    "fill-mask": "MaskedLM",
    "zero-shot-classification": "SequenceClassification",
}


def numbers(found) -> list:
    """All numbers and texts of what a pipeline gives, in order."""
    if isinstance(found, dict):
        return [x for value in found.values() for x in numbers(value)]
    if isinstance(found, (list, tuple)):
        return [x for value in found for x in numbers(value)]
    return [float(found) if not isinstance(found, (str, int)) else found]


@pytest.mark.parametrize("task", TASKS)
def test_pipeline(task, tmp_path, packed_layers):
    head = TASKS[task]
    write_model(tmp_path, head=head)
    auto = "AutoModel" if head == "Model" else f"AutoModelFor{head}"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    found = []
    for library, dtype in ((transformers, torch.float64), (transformers, torch.float32), (fastbert, torch.float32)):
        assert not packed_layers
        model = getattr(library, auto).from_pretrained(tmp_path, dtype=dtype)
        pipe = transformers.pipeline(task, model=model, tokenizer=tokenizer)
        if task == "fill-mask":
            found.append(numbers(pipe("the [MASK] sat")))
        elif task.startswith("zero"):
            found.append(numbers(pipe(TEXTS[0], candidate_labels=["cat", "dog"])))
        else:
            found.append(numbers(pipe(TEXTS, batch_size=2 if task != "feature-extraction" else 1)))
    texts = [[x for x in side if isinstance(x, (str, int))] for side in found]
    assert texts[0] == texts[1] == texts[2]
    oracle, near, actual = (torch.tensor([x for x in side if isinstance(x, float)]).double() for side in found)
    assert_close_to_reference(actual.float(), oracle, near.float(), GRADIENT_FACTOR)
    assert len(packed_layers) >= 2


def test_datasets_map(packed_layers):
    datasets = pytest.importorskip("datasets")
    config = config_for("bert", "Model")
    theirs = make_hf(config, "Model").eval()
    ours = make_ours(config, "Model", theirs).eval()
    data = datasets.Dataset.from_dict({"input_ids": IDS.tolist(), "attention_mask": MASK.tolist()}).with_format("torch")

    def embedded(model):
        def embed(batch):
            with torch.no_grad():
                return {"vector": model(batch["input_ids"], attention_mask=batch["attention_mask"]).pooler_output}

        return torch.stack(list(data.map(embed, batched=True, batch_size=2, load_from_cache_file=False)["vector"]))

    near, oracle = embedded(theirs), embedded(make_hf(config, "Model", torch.float64).eval())
    assert_close_to_reference(embedded(ours), oracle.double(), near, GRADIENT_FACTOR)
    assert len(packed_layers) == 4


def test_captum(packed_layers):
    attr = pytest.importorskip("captum.attr")
    config = config_for("bert", "SequenceClassification")
    theirs = make_hf(config, "SequenceClassification").eval()
    ours = make_ours(config, "SequenceClassification", theirs).eval()

    def attributions(model):
        def score(ids, mask):
            return model(ids, attention_mask=mask).logits

        gradients = attr.LayerIntegratedGradients(score, model.get_input_embeddings())
        return gradients.attribute(
            IDS, baselines=torch.zeros_like(IDS), target=1, additional_forward_args=(MASK,), n_steps=4
        )

    near, oracle = attributions(theirs), attributions(make_hf(config, "SequenceClassification", torch.float64).eval())
    actual = attributions(ours)  # of packed words: of real tokens
    real = MASK.bool()
    actual = actual if actual.dim() == 2 else actual[real]
    assert_close_to_reference(actual, oracle[real], near[real], 3)
    assert len(packed_layers) >= 4


def test_captum_by_inputs_embeds(packed_layers):
    """Attributions to the word vectors of a padded batch, in their own layout."""
    attr = pytest.importorskip("captum.attr")
    config = config_for("bert", "SequenceClassification")
    theirs = make_hf(config, "SequenceClassification").eval()
    ours = make_ours(config, "SequenceClassification", theirs).eval()

    def attributions(model):
        def score(embeds, mask):
            return model(inputs_embeds=embeds, attention_mask=mask).logits

        embeds = model.get_input_embeddings()(IDS).detach()
        gradients = attr.IntegratedGradients(score)
        return gradients.attribute(embeds, target=1, additional_forward_args=(MASK,), n_steps=4).float()

    near = attributions(theirs)
    oracle = attributions(make_hf(config, "SequenceClassification", torch.float64).eval()).double()
    assert not packed_layers
    assert_close_to_reference(attributions(ours), oracle, near, GRADIENT_FACTOR)
    assert len(packed_layers) >= 4


def test_bertviz(packed_layers):
    bertviz = pytest.importorskip("bertviz")
    config = config_for("bert", "Model")
    theirs = make_hf(config, "Model").eval()
    ours = make_ours(config, "Model", theirs).eval()
    tokens = [str(i) for i in range(IDS.shape[1])]
    views, probabilities = [], []
    for model in (make_hf(config, "Model", torch.float64).eval(), theirs, ours):
        assert not packed_layers
        attentions = model(IDS[:1], output_attentions=True).attentions
        probabilities.append(torch.stack(attentions))
        views.append(bertviz.head_view(attentions, tokens, html_action="return").data)
    oracle, near, actual = probabilities
    assert_close_to_reference(actual, oracle, near, GRADIENT_FACTOR)
    assert len(packed_layers) == 4
    assert len(views[2]) > 1000 and abs(len(views[1]) - len(views[2])) < 0.05 * len(views[1])


HEADS = ("Model", "SequenceClassification", "MaskedLM")
BATCH, SEQLEN = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("seqlen", min=2, max=16)
SHAPES = {"input_ids": {0: BATCH, 1: SEQLEN}, "attention_mask": {0: BATCH, 1: SEQLEN}}


def exported(head: str, how: str, folder):
    """What a graph of one padded batch gives for another; what transformers gives in float64, and in float32."""
    config = config_for("bert", head, num_hidden_layers=2)
    theirs = make_hf(config, head).eval()
    model = make_ours(config, head, theirs).eval()
    inputs = {"input_ids": IDS, "attention_mask": MASK}
    others = {"input_ids": torch.cat([IDS, IDS])[:, :5], "attention_mask": torch.cat([MASK.flip(0), MASK])[:, :5]}
    with pytest.warns(UserWarning, match=r"record transformers' own code"), warnings.catch_warnings():
        warnings.simplefilter("always")
        if how == "export":
            graph = torch.export.export(model, (), inputs, dynamic_shapes=SHAPES).module()
        elif how == "trace":
            graph = torch.jit.trace(model, example_kwarg_inputs=inputs, strict=False)
        else:
            path = str(folder / "model.onnx")
            torch.onnx.export(
                *(model, (), path),
                kwargs=inputs,
                input_names=list(inputs),
                dynamic_shapes=SHAPES,
                dynamo=True,
                verbose=False,
            )
    near, oracle = (m(**others)[0] for m in (theirs, make_hf(config, head, torch.float64).eval()))
    real = others["attention_mask"].bool() if near.dim() == 3 else slice(None)
    if how != "onnx":
        return graph(**others)["logits" if head != "Model" else "last_hidden_state"][real], oracle[real], near[real]
    session = pytest.importorskip("onnxruntime").InferenceSession(path)
    (first, *_) = session.run(None, {name: t.numpy() for name, t in others.items()})
    return torch.from_numpy(first)[real], oracle[real], near[real]


@pytest.mark.full
@left_to_full(lambda p: p["how"] == "onnx" or p["head"] != "SequenceClassification")  # the graph is export's, or a part
@pytest.mark.parametrize("how", ("export", "trace", "onnx"))
@pytest.mark.parametrize("head", HEADS)
def test_recorded(head, how, tmp_path):
    if how == "onnx":
        pytest.importorskip("onnxscript")
    assert_close_to_reference(*exported(head, how, tmp_path), GRADIENT_FACTOR)


@pytest.mark.full  # tests/models compile, too
def test_compile():
    """The mask is read between two graphs; tests/models/test_compiled_models.py has packed batches, in one."""
    config = config_for("bert", "SequenceClassification")
    theirs = make_hf(config, "SequenceClassification").eval()
    mend(theirs)
    ours = make_ours(config, "SequenceClassification", theirs).eval()
    oracle = make_hf(config, "SequenceClassification", torch.float64).eval()
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        compiled = torch.compile(ours, backend=keep)
        found = [m(IDS, attention_mask=MASK).logits for m in (compiled, oracle, theirs)]
    assert_close_to_reference(*found, GRADIENT_FACTOR)
    called = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert any(name.startswith(("fastbert.encoder_layers", "fastbert.attention")) for name in called), called
