"""How probable a masked LM finds the tokens of a text, each masked in turn: all of them as packed batches."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from fastbert.data.budget import token_batches
from fastbert.errors import InputError
from fastbert.execution.request import Wanted
from fastbert.inspect.live import as_ours
from fastbert.inspect.texts import PackedTexts
from fastbert.models.masked_lm import MaskedLMHeadModel
from fastbert.packed_inputs import ModelInputs, PackedInputs


@torch.no_grad()
def token_log_probs(
    model: nn.Module,
    batch: PackedInputs,
    mask_id: int,
    *,
    skipped_ids: Collection[int] = (),
    words: Sequence[Sequence[int | None]] | None = None,
    causal: bool = False,
    batch_tokens: int = 8192,
) -> list[torch.Tensor]:
    """log P(token | all others), each token of a text masked by itself (Salazar et al. 2020, section 2).

    Their sum is the text's pseudo-log-likelihood.

    Args:
        model: one of fastbert's, or transformers', with a masked-LM head, in eval mode.
        batch: packed texts (`fastbert.pack_inputs`).
        mask_id: the id of [MASK].
        skipped_ids: tokens that are not masked: [CLS] and [SEP].
        words: of each text, which word each token is of, as a tokenizer's `word_ids` says; None for a token of no word.
            Then the tokens behind it in its word are masked, too (Kauf & Ivanova 2023, "PLL-word-l2r"): else a long
            word's pieces give each other away.
        causal: no token sees those behind it, as in a language model that writes from left to right.
            A masked token is then guessed from what is before it, by a model that was not trained so.
        batch_tokens: how many tokens run at once.

    Returns:
        Of each text (tokens,), float32, with NaN for tokens that are skipped.

    Raises:
        InputError: the model has no masked-LM head, or is in training mode; `words` does not fit the texts; there is no
            such mask_id.
    """
    model = as_ours(model)
    if not isinstance(model, MaskedLMHeadModel):
        raise InputError(f"{type(model).__name__} has no masked-LM head: load it with AutoModelForMaskedLM")
    texts, base = PackedTexts.of(model, batch), model.base_model
    ids, ends, lengths = texts.ids, texts.ends, texts.lengths
    if not 0 <= mask_id < model.num_words():
        raise InputError(f"mask_id is {mask_id}; the model has {model.num_words()} words")
    if words is not None and [len(of_text) for of_text in words] != lengths:
        raise InputError(f"words has {[len(of_text) for of_text in words]} tokens for texts of {lengths}")
    skipped, wanted = frozenset(skipped_ids), Wanted(is_causal=causal)
    rows = [
        (i, position)
        for i, length in enumerate(lengths)
        for position, token in enumerate(ids[ends[i] : ends[i + 1]].tolist())
        if token not in skipped
    ]
    log_probs = torch.full((len(ids),), torch.nan, device=ids.device)
    for chosen in token_batches([lengths[i] for i, _ in rows], batch_tokens):
        part = [rows[j] for j in chosen]
        of_texts = [i for i, _ in part]
        places, masked, asked = texts.places(of_texts), list[int](), list[int]()
        for start, (i, position) in zip(texts.offsets(of_texts).tolist(), part, strict=False):
            last = position + 1
            if words is not None and words[i][position] is not None:
                while last < lengths[i] and words[i][last] == words[i][position]:
                    last += 1
            masked += range(start + position, start + last)
            asked.append(start + position)
        input_ids = ids[places]
        input_ids[torch.tensor(masked, device=ids.device)] = mask_id
        packed = ModelInputs(input_ids, **texts.arguments(of_texts, places))
        hidden = base.encode(base.prepare(packed), wanted).packed
        at = torch.tensor(asked, device=ids.device)
        scores = model.masked_lm_scores(hidden.index_select(0, at)).float().log_softmax(-1)
        token = torch.tensor([ends[i] + position for i, position in part], device=ids.device)
        log_probs[token] = scores.gather(-1, ids[token][:, None])[:, 0]
    return list(log_probs.split(lengths))
