"""`fastbert fill-mask`: the most probable tokens behind [MASK]."""

from __future__ import annotations

import argparse
import warnings
from typing import TYPE_CHECKING, Any

from fastbert.cli.parser import UsageError, add_command, add_model_option, positive, short
from fastbert.cli.stopping import raise_if_stopped
from fastbert.data.text_files import STDIN, read_texts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from fastbert.models.base import PreTrainedModel


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "fill-mask",
        run,
        "guess the words behind [MASK]",
        """
        Shows the most probable tokens for every [MASK] (or <mask>) in TEXT; - reads a text from each line of standard
        input. MODEL must have a masked-LM head, as bert-base-uncased and roberta-base on the hub have. Without a
        network: `hf download bert-base-uncased --local-dir FOLDER` elsewhere, and --model FOLDER.
        """,
        'fastbert fill-mask "The [MASK] sat on the mat." --model bert-base-uncased --top 5',
    )
    parser.add_argument("text", metavar="TEXT", help="a text with one [MASK] or more, or -")
    add_model_option(parser)
    parser.add_argument("--top", metavar="N", type=positive, default=5, help="how many tokens to show (default 5)")


def run(options: argparse.Namespace) -> int:
    from fastbert.data.tokenization import load_tokenizer, mask_token
    from fastbert.hub import resolve
    from fastbert.models.auto import AutoModelForMaskedLM
    from fastbert.packed_weights import keep_packed_only

    raise_if_stopped()
    folder = resolve(options.model)
    tokenizer = load_tokenizer(folder)
    mask = mask_token(folder, tokenizer)
    if mask is None:
        raise UsageError(f"the tokenizer of {options.model} has no mask token")
    texts = [options.text] if options.text != "-" else read_texts(STDIN)
    if options.text != "-" and not _has_mask(options.text, mask):
        raise UsageError(_no_mask(options.text, mask))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of missing keys: below
        model = AutoModelForMaskedLM.from_pretrained(folder)
    if model.missing_keys:
        missing = ", ".join(model.missing_keys[:3])
        raise UsageError(
            f"{options.model} has no masked-LM head, as bert-base-uncased has one; missing: {missing}, ..."
        )
    keep_packed_only(model)
    for text in texts:
        _show(text, model, tokenizer, mask, options.top)
        raise_if_stopped()
    return 0


def _has_mask(text: str, mask: str) -> bool:
    return any(name in text for name in (mask, "[MASK]", "<mask>"))


def _no_mask(text: str, mask: str) -> str:
    return f'no mask in "{short(text, 80)}": write {mask} where a word is missing'


def _show(text: str, model: PreTrainedModel, tokenizer: Tokenizer, mask: str, count: int) -> None:
    import torch

    text = text.replace("[MASK]", mask).replace("<mask>", mask)
    ids = tokenizer.encode(text).ids
    places = [i for i, token in enumerate(ids) if token == tokenizer.token_to_id(mask)]
    if not places:
        raise UsageError(_no_mask(text, mask))
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, places].float()
    top = logits.softmax(-1).topk(min(count, logits.shape[-1]))
    pieces = text.split(mask)
    for i, (probabilities, tokens) in enumerate(zip(top.values.tolist(), top.indices.tolist(), strict=True)):
        print(f"mask {i + 1} of {len(places)}" if len(places) > 1 else text)
        # A special token decodes to nothing.
        words = [tokenizer.decode([token]).strip() or str(tokenizer.id_to_token(token)) for token in tokens]
        width = max(map(len, words))
        before, after = mask.join(pieces[: i + 1]), mask.join(pieces[i + 1 :])
        for word, probability in zip(words, probabilities, strict=True):
            print(f"  {probability:7.2%}  {word:<{width}}  {short(before + word + after, 85 - width)}", flush=True)
