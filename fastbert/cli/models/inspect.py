"""`fastbert inspect`: what a model's heads look at in a text, which words decided, and why two texts are close."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from fastbert.cli.outputs import STDOUT, check_output
from fastbert.cli.parser import UsageError, add_command, add_model, short
from fastbert.cli.stopping import raise_if_stopped, say

if TYPE_CHECKING:
    from typing import Any

    from fastbert import inspect
    from fastbert.packed_inputs import PackedInputs
    from fastbert.sentences import SentenceEncoder, TextClassifier

KINDS = (".html", ".npz", ".png", ".svg")
STEPS = 32  # points of the path: of MiniLM's cosines the shares then miss less than 1 %


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "inspect",
        run,
        "what the heads of a model look at",
        """
        Shows what the attention heads of MODEL look at in TEXT. Of a classifier also what it says, and which tokens
        decided; a second text makes a pair. Of an encoder, with a second text, how close the two are, and which tokens
        make them so. OUT is a page to look at (.html, one file that needs no network), the numbers (.npz), or a
        picture of the first text's attention (.png, .svg).
        """,
        'fastbert inspect all-MiniLM-L6-v2 "He sat on the bank of the river." --output bank.html',
    )
    add_model(parser)
    parser.add_argument("text", metavar="TEXT", nargs="+", help="one text, or two")
    parser.add_argument(
        "--layers",
        metavar="N",
        type=int,
        nargs="+",
        help="the layers to show, from 0; -1 is the last one (default: all)",
    )
    parser.add_argument("--heads", metavar="N", type=int, nargs="+", help="the heads to show, from 0 (default: all)")
    parser.add_argument("--label", metavar="NAME", help="of a classifier: the label to explain; else the likeliest")
    parser.add_argument("--output", metavar="OUT", type=Path, help="an .html, .npz, .png or .svg")
    parser.add_argument("--force", action="store_true", help="replace OUT")


def run(options: argparse.Namespace) -> int:
    if len(options.text) > 2:
        raise UsageError(f"{len(options.text)} texts are given; one or two are compared (put each in quotes)")
    if any(not text.strip() for text in options.text):
        raise UsageError("a text is empty")
    if twice := next(filter(_is_model, options.text), None):
        raise UsageError(f"TEXT is the model {twice}, and MODEL is {options.model}: name one, by MODEL or by --model")
    if options.output == STDOUT:
        raise UsageError("--output -: pages, arrays and pictures go into a file")
    if options.output is not None:
        check_output(options.output, KINDS, options.force)

    from fastbert import inspect
    from fastbert.checkpoint.pretrained import is_classifier, read_config
    from fastbert.data.sentence_folder import transformer_folder
    from fastbert.hub import resolve
    from fastbert.sentences import SentenceEncoder, TextClassifier

    raise_if_stopped()
    classifies = is_classifier(read_config(transformer_folder(resolve(options.model))))
    if options.label is not None and not classifies:
        raise UsageError(f"--label: {options.model} is no classifier")
    model = TextClassifier(options.model) if classifies else SentenceEncoder(options.model)
    if isinstance(model, TextClassifier) and options.label not in (None, *model.labels):
        raise UsageError(f"--label {options.label}: the model has {', '.join(model.labels)}")
    inputs = [tuple(options.text)] if classifies and len(options.text) == 2 else options.text
    encodings = [model.tokenizer.encode(*((one,) if isinstance(one, str) else one)) for one in inputs]
    titles = [one if isinstance(one, str) else " | ".join(one) for one in inputs]
    for title, encoding in zip(titles, encodings, strict=True):
        if encoding.overflowing:
            say(f"warning: cut to {len(encoding.ids)} tokens: {short(title, 60)}")
    batch, tokens = model.tokenize(inputs).pack(range(len(encodings))), [encoding.tokens for encoding in encodings]
    maps = inspect.attention(model.model, batch, options.layers, options.heads)
    separators = [[i for i, special in enumerate(one.special_tokens_mask) if special and i] for one in encodings]
    measures = [inspect.measure_heads(*each) for each in zip(maps, separators, strict=True)]
    for title, words, measured in zip(titles, tokens, measures, strict=True):
        print("\n".join(_lines(title, words, maps, measured)), flush=True)
    raise_if_stopped()
    close = decided = None
    if isinstance(model, TextClassifier):
        decided = _explain(model, batch, encodings[0], options.label)
        print("\n".join(_lines_of_label(decided, tokens[0])), flush=True)
    elif len(encodings) == 2:
        close = _compare(model, encodings)
        print("\n".join(_lines_of_two(close, tokens)), flush=True)
    if options.output is None:
        return 0
    if options.output.suffix == ".npz":
        _write_arrays(options.output, maps, tokens, measures, close, decided)
    elif options.output.suffix in (".png", ".svg"):
        try:
            inspect.draw_attention(options.output, tokens[0], maps)
        except ImportError:
            raise UsageError(f"{options.output}: a picture needs matplotlib: pip install matplotlib") from None
    else:
        _page(options.model, model.model.config, titles, tokens, maps, close, decided).write(options.output)
    say(f"{len(maps.layers)} layers, {len(maps.heads)} heads -> {options.output}")
    return 0


def _is_model(text: str) -> bool:
    """As far as is known without a network."""
    from fastbert.hub import PACKAGED_MODELS

    return text in PACKAGED_MODELS or any(
        os.path.isfile(os.path.join(text, name)) for name in ("config.json", "modules.json")
    )


def _lines(text: str, tokens: list[str], maps: inspect.AttentionMaps, measured: Any) -> list[str]:
    """Of each layer the means over its heads; of each measure the head that has most of it."""
    from fastbert.inspect import HEAD_MEASURES

    lines = [short(text, 100), f"  {len(tokens)} tokens: {short(' '.join(tokens), 85)}", ""]
    lines.append("  mean of heads" + "".join(f"{name:>12}" for name in HEAD_MEASURES))
    for layer, row in zip(maps.layers, measured.mean(1).tolist(), strict=True):
        lines.append(f"  layer {layer:<7}" + "".join(f"{value:12.2f}" for value in row))
    best = []
    for k in range(len(HEAD_MEASURES)):
        of_measure = measured[..., k]
        layer, head = divmod(int(of_measure.argmax()), len(maps.heads))
        best.append((f"{maps.layers[layer]}.{maps.heads[head]}", float(of_measure.max())))
    lines.append("  most: head   " + "".join(f"{name:>12}" for name, _ in best))
    lines.append("               " + "".join(f"{value:12.2f}" for _, value in best))
    return [*lines, ""]


def _explain(classifier: TextClassifier, batch: PackedInputs, encoding: Any, label: str | None) -> dict[str, Any]:
    """What a classifier says of one text, or of a pair, and what each token adds to the logit of a label."""
    import torch

    from fastbert import inspect
    from fastbert.sentences.text_model import InferenceOptions

    with torch.no_grad():
        probabilities = classifier.probabilities(classifier.compute(batch.to(classifier.device), InferenceOptions()))[0]
    label_index = int(probabilities.argmax()) if label is None else classifier.labels.index(label)
    special = {i for i, flag in zip(encoding.ids, encoding.special_tokens_mask, strict=True) if flag}
    (attribution,) = inspect.integrated_gradients(
        classifier.model, batch, inspect.label(label_index), kept_ids=special, steps=STEPS
    )
    return {"labels": classifier.labels, "probabilities": probabilities, "label": label_index, "shares": attribution}


def _lines_of_label(decided: dict[str, Any], tokens: list[str]) -> list[str]:
    labels, probabilities = decided["labels"], decided["probabilities"]
    first = probabilities.argsort(descending=True).tolist()[:5]
    lines = [f"  says: {', '.join(f'{labels[i]} {probabilities[i]:.3f}' for i in first)}"]
    lines.append(f"  what adds most to the logit of {labels[decided['label']]}, and what takes most from it")
    return [*lines, _line_of_shares(decided["shares"], tokens)]


def _line_of_shares(attribution: inspect.Attribution, tokens: list[str]) -> str:
    order = attribution.scores.argsort(descending=True).tolist()
    told = [*order[:4], *(i for i in order[4:][-2:] if attribution.scores[i] < 0)]
    said = ", ".join(f"{tokens[i]} {attribution.scores[i]:+.3f}" for i in told)
    return f"    {said}  ({attribution.completeness_error:.1%} missed)"


def _compare(encoder: SentenceEncoder, encodings: list[Any]) -> dict[str, Any]:
    """The cosine of two texts, what each token adds to it, and the cosines of their tokens."""
    import torch

    from fastbert import inspect
    from fastbert.packed_inputs import pack_inputs

    batch = pack_inputs([encoding.ids for encoding in encodings])
    states = [x[0] for x in inspect.hidden_states(encoder.model, batch, [-1])]
    offsets = batch["batch"].cu_seqlens.to(encoder.device)
    vectors = encoder.pool(torch.cat(states), offsets)
    special = {i for one in encodings for i, flag in zip(one.ids, one.special_tokens_mask, strict=True) if flag}
    shares = []
    for i, encoding in enumerate(encodings):
        target = inspect.similarity(vectors[1 - i], encoder.pool)
        one = pack_inputs([encoding.ids])
        shares += inspect.integrated_gradients(encoder.model, one, target, kept_ids=special, steps=STEPS)
    rows = inspect.cosines(torch.cat(states).float())[: len(states[0]), len(states[0]) :]
    return {
        "cosine": float(torch.nn.functional.cosine_similarity(vectors[0], vectors[1], dim=0)),
        "shares": shares,
        "tokens": rows,
    }


def _lines_of_two(close: dict[str, Any], tokens: list[list[str]]) -> list[str]:
    lines = [f"  cosine of the two: {close['cosine']:.3f}; what adds most to it, and what takes most from it"]
    return [*lines, *(_line_of_shares(share, words) for words, share in zip(tokens, close["shares"], strict=True))]


def _page(
    name: str,
    config: Any,
    titles: list[str],
    tokens: list[list[str]],
    maps: inspect.AttentionMaps,
    close: dict[str, Any] | None,
    decided: dict[str, Any] | None,
) -> inspect.Page:
    from fastbert.inspect import Page

    page = Page(
        f"Inside {name}",
        f"{config.model_type}, {config.num_hidden_layers} layers of {config.num_attention_heads} heads",
    )
    if decided is not None:
        label = decided["labels"][decided["label"]]
        page.add_attribution(tokens[0], decided["shares"], f"What speaks for {label}: {short(titles[0], 60)}")
    if close is not None:
        for words, attribution, title in zip(tokens, close["shares"], titles, strict=True):
            page.add_attribution(words, attribution, f"What adds to the cosine: {short(title, 60)}")
        page.add_similarity(tokens[0], tokens[1], close["tokens"], "Cosines of the tokens", "Behind the last layer.")
    for i, title in enumerate(titles):
        page.add_attention(tokens[i], maps, i, f"Attention: {short(title, 60)}")
    return page


def _write_arrays(
    path: Path,
    maps: inspect.AttentionMaps,
    tokens: list[list[str]],
    measures: list[Any],
    close: dict[str, Any] | None,
    decided: dict[str, Any] | None,
) -> None:
    import numpy as np

    from fastbert.files import writing

    arrays: dict[str, Any] = {"layers": np.array(maps.layers), "heads": np.array(maps.heads)}
    for i, words in enumerate(tokens):
        arrays |= {f"tokens_{i}": np.array(words), f"attention_{i}": maps[i].cpu().numpy()}
        arrays[f"measures_{i}"] = measures[i].cpu().numpy()
        if close is not None:
            arrays[f"shares_{i}"] = close["shares"][i].scores.cpu().numpy()
    if close is not None:
        arrays |= {"cosine": np.array(close["cosine"]), "token_cosines": close["tokens"].cpu().numpy()}
    if decided is not None:
        arrays |= {"labels": np.array(decided["labels"]), "label": np.array(decided["label"])}
        arrays |= {"probabilities": decided["probabilities"].cpu().numpy()}
        arrays |= {"shares_0": decided["shares"].scores.cpu().numpy()}
    with writing(path) as new, open(new, "wb") as file:
        np.savez_compressed(file, **arrays)
