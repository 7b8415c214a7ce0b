"""The special tokens that a tokenizer puts around a text, or around two."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from fastbert.errors import InputError


@dataclass(frozen=True)
class Template:
    """The special tokens around one sequence, or two, as a tokenizer puts them: parts of ids and of their types."""

    ids: tuple[np.ndarray, ...]  # before the first sequence, (between the two,) behind the last
    types: tuple[np.ndarray, ...]
    type_of: tuple[int, ...]  # of each sequence's tokens

    @classmethod
    def of(cls, tokenizer: Tokenizer, sequences: int) -> Template:
        """Raises InputError: the tokenizer makes no token of any letter."""
        word = next((text for text in ("a", "e", "1") if tokenizer.encode(text, add_special_tokens=False).ids), None)
        if word is None:
            raise InputError("this tokenizer makes no token of a letter: it seems to be damaged")
        encoding = tokenizer.encode(word, word if sequences == 2 else None)
        is_special = np.array(encoding.special_tokens_mask, bool)
        places = np.array([-1 if s is None else s for s in encoding.sequence_ids])
        ids, types = np.array(encoding.ids, np.int64), np.array(encoding.type_ids, np.int64)
        starts = [np.flatnonzero(places == s)[0] for s in range(sequences)]
        stops = [np.flatnonzero(places == s)[-1] + 1 for s in range(sequences)]
        cuts = [slice(0, starts[0]), *(slice(a, b) for a, b in zip(stops, [*starts[1:], len(ids)], strict=True))]
        assert all(is_special[cut].all() for cut in cuts)
        return cls(tuple(ids[c] for c in cuts), tuple(types[c] for c in cuts), tuple(int(types[s]) for s in starts))

    @property
    def added(self) -> int:
        return sum(map(len, self.ids))

    def around(self, *sequences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(input_ids, token_type_ids), int64."""
        ids, types = [self.ids[0]], [self.types[0]]
        for sequence, type_id, after, after_types in zip(
            sequences, self.type_of, self.ids[1:], self.types[1:], strict=True
        ):
            ids += [sequence.astype(np.int64), after]
            types += [np.full(len(sequence), type_id), after_types]
        return np.concatenate(ids), np.concatenate(types)
