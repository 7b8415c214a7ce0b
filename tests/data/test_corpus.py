"""Files of each kind as a corpus, and the windows and pairs of it, by what stands in them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from seeds import numpy_generator, shifted
from shares import assert_share
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from fastbert.data.long_texts.template import Template
from fastbert.data.pretraining.chunks import CorpusChunks, CorpusPairs, cut_chunks
from fastbert.data.pretraining.corpus import Corpus, tokenize_corpus
from fastbert.data.sources import load_source
from fastbert.errors import InputError

datasets = pytest.importorskip("datasets")

DOCUMENTS = [["a b c", "d e"], ["f", "g h i j"], ["k"]]
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


@pytest.fixture
def tokenizer() -> Tokenizer:
    """A letter is a token: a is 2, b is 3, ..."""
    made = Tokenizer(
        models.WordLevel({"[CLS]": 0, "[SEP]": 1} | {c: i for i, c in enumerate(LETTERS, 2)}, unk_token="a")
    )
    made.add_special_tokens(["[CLS]", "[SEP]"])
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    return made


def write(folder: Path, kind: str) -> str:
    path = folder / f"corpus{kind}"
    texts = ["\n".join(lines) for lines in DOCUMENTS]
    if kind == ".txt":
        path.write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    elif kind == ".txt.gz":
        path.write_bytes(gzip.compress("\n\n".join(texts).encode()))
    elif kind == ".jsonl":
        path.write_text("".join(json.dumps({"text": text, "other": 1}) + "\n" for text in [*texts, ""]))
    elif kind == ".parquet":
        datasets.Dataset.from_dict({"text": texts}).to_parquet(path)
    else:
        datasets.Dataset.from_dict({"text": texts}).to_csv(path)
    return str(path)


@pytest.mark.parametrize("kind", [".txt", ".txt.gz", ".jsonl", ".csv", ".parquet", "datasets"])
def test_a_corpus_of_each_kind(kind, tokenizer, tmp_path):
    if kind == "datasets":
        source = datasets.Dataset.from_dict({"text": ["\n".join(lines) for lines in DOCUMENTS]})
    else:
        source = write(tmp_path, kind)
    corpus = tokenize_corpus(source, tokenizer)
    assert corpus.tokens.tolist() == list(range(2, 13))
    assert corpus.segments.tolist() == [0, 3, 5, 6, 10, 11] and corpus.documents.tolist() == [0, 5, 10, 11]
    assert repr(corpus) == "Corpus(11 tokens, 5 segments, 3 documents)"


def test_several_files_and_processes(tokenizer, tmp_path):
    (tmp_path / "more").mkdir()
    files = [write(tmp_path, ".jsonl"), write(tmp_path / "more", ".jsonl")]
    corpus = tokenize_corpus(files, tokenizer, processes=2)
    assert corpus.tokens.tolist() == [*range(2, 13)] * 2 and len(corpus.documents) == 7


def make_corpus(documents: int = 200, seed: int = 0, sizes: tuple[int, int] = (1, 40)) -> Corpus:
    """Every token is another number, so that it says where it comes from. `sizes`: of segments."""
    draw = numpy_generator(seed)
    sizes = [draw.integers(*sizes, draw.integers(1, 12)) for _ in range(documents)]
    segments = np.cumsum([0, *np.concatenate(sizes)])
    return Corpus(np.arange(segments[-1], dtype=np.int32), segments, np.cumsum([0, *map(sum, sizes)]))


def document_of(corpus: Corpus, token: np.ndarray) -> np.ndarray:
    return np.searchsorted(corpus.documents, token, "right") - 1


def test_windows_cover_each_document_once_and_are_full(tokenizer):
    corpus = make_corpus()
    windows = CorpusChunks(corpus, tokenizer, 66, seed=shifted(0), epoch=0)
    found = [windows[i]["input_ids"] for i in range(len(windows))]
    assert all(row[0] == 0 and row[-1] == 1 for row in found)
    assert np.array_equal(np.concatenate([row[1:-1] for row in found]), corpus.tokens)
    assert [len(row) for row in found] == windows.lengths.tolist() and windows.lengths.max() == 66
    homes = [set(document_of(corpus, row[1:-1]).tolist()) for row in found]
    assert all(len(home) == 1 for home in homes)
    inner = [row for i, row in enumerate(found[1:-1], 1) if homes[i - 1] == homes[i] == homes[i + 1]]
    assert inner and all(len(row) == 66 for row in inner)
    whole = np.diff(corpus.documents) <= 64  # one window each
    assert sum(len(home & set(np.flatnonzero(whole))) for home in homes) == whole.sum()


def test_every_epoch_cuts_at_other_places():
    corpus = make_corpus()
    cuts = [cut_chunks(corpus, 64, 0, epoch)[0] for epoch in (0, 1, 0)]
    assert np.array_equal(cuts[0], cuts[2]) and not np.array_equal(cuts[0], cuts[1])


@pytest.mark.parametrize("kind", ["nsp", "sop"])
def test_pairs(kind, tokenizer):
    """Half have label 1: B is of another document (nsp), or stands before A (sop); else it follows A at once."""
    corpus = make_corpus(400)
    pairs = CorpusPairs(corpus, tokenizer, 67, kind, seed=shifted(0), epoch=0)
    labels, at_ends = [], []
    for i in range(len(pairs)):
        example = pairs[i]
        ids, types = example["input_ids"], example["token_type_ids"]
        a, b = ids[types == 0][1:-1], ids[types == 1][:-1]
        label = example["next_sentence_label" if kind == "nsp" else "sentence_order_label"]
        assert ids[0] == 0 and (ids[types == 0][-1], ids[-1]) == (1, 1) and len(ids) == pairs.lengths[i] <= 67
        assert (np.diff(a) == 1).all() and (np.diff(b) == 1).all() and len(a) and len(b)
        assert len(set(document_of(corpus, a))) == len(set(document_of(corpus, b))) == 1
        is_same = document_of(corpus, a[:1]) == document_of(corpus, b[:1])
        if kind == "nsp":
            assert (b[0] == a[-1] + 1) == (label == 0) and is_same == (label == 0)
        else:
            assert is_same and (a[0] == b[-1] + 1 if label else b[0] == a[-1] + 1)
        labels.append(label)
        if kind == "nsp" and label == 0:
            margin = max(1, (len(a) + len(b)) // 4)
            inner = range(a[0] + margin, b[-1] + 1 - margin + 1)
            at_ends += [b[0] in corpus.segments] * bool(set(inner) & set(corpus.segments.tolist()))
    assert_share(torch.tensor(labels), 0.5)
    assert all(at_ends) and (kind == "sop" or len(at_ends) > 100)


@pytest.mark.parametrize("sizes", [(1, 40), (60, 400)], ids=["short segments", "long segments"])
@pytest.mark.parametrize("kind", ["nsp", "sop"])
def test_ends_of_segments_do_not_tell_the_label(kind, sizes, tokenizer):
    """Or a model would learn where sentences end, and no more. The best rule over the four ends is right for a few more
    than half of the pairs, as short documents leave no choice.
    """
    corpus = make_corpus(3000, sizes=sizes)
    pairs = CorpusPairs(corpus, tokenizer, 67, kind, seed=shifted(0), epoch=0)
    ends = np.isin(np.concatenate([pairs.a, pairs.b], 1), corpus.segments) @ [1, 2, 4, 8]
    counts = np.zeros((16, 2))
    np.add.at(counts, (ends, pairs.labels), 1)
    assert counts.sum() > 3000 and counts.max(1).sum() / counts.sum() < 0.58, counts


def test_templates_of_families(tokenizer):
    assert [t.tolist() for t in Template.of(tokenizer, 2).ids] == [[0], [1], [1]]
    tokenizer.post_processor = processors.RobertaProcessing(("[SEP]", 1), ("[CLS]", 0))
    pair = Template.of(tokenizer, 2)
    assert [t.tolist() for t in pair.ids] == [[0], [1, 1], [1]] and pair.added == 4
    ids, types = pair.around(np.array([5, 6]), np.array([7]))
    encoded = tokenizer.encode("d e", "f")
    assert ids.tolist() == encoded.ids and types.tolist() == encoded.type_ids
    tokenizer.post_processor = None
    assert Template.of(tokenizer, 1).added == 0


def test_bad_input(tokenizer, tmp_path):
    text, table = write(tmp_path, ".txt"), write(tmp_path, ".jsonl")
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "broken.jsonl").write_text('{"text": \n')
    (tmp_path / "numbers.jsonl").write_text('{"text": 1}\n')
    for source, said in [
        (str(tmp_path / "no.txt"), "no.txt is not a file"),
        ([text, table], "files of one kind are needed"),
        ([], "no files were given"),
        (str(tmp_path / "empty.txt"), "the corpus has no tokens"),
        (str(tmp_path / "broken.jsonl"), "broken.jsonl, line 1: not JSON"),
        (str(tmp_path / "numbers.jsonl"), "numbers.jsonl, row 1: text is 1, not a text"),
        (datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["a"]})}), r"several splits .*\(train\)"),
    ]:
        with pytest.raises(InputError, match=said):
            tokenize_corpus(source, tokenizer)
    with pytest.raises(InputError, match="has no column 'body'; it has: text, other"):
        tokenize_corpus(table, tokenizer, column="body")
    with pytest.raises(InputError, match="the corpus has one document"):
        CorpusPairs(make_corpus(1), tokenizer, 64, "nsp", seed=shifted(0), epoch=0)
    with pytest.raises(InputError, match="max_length is 2; the special tokens alone take 2"):
        CorpusChunks(make_corpus(1), tokenizer, 2, seed=shifted(0), epoch=0)


def test_files_with_quotes_are_read_as_glue_writes_them(tmp_path):
    path = tmp_path / "train.tsv"
    path.write_text('sentence\tlabel\n"a quote that does not end\t1\nplain\t0\n')
    assert load_source(path).to_dict() == {"sentence": ['"a quote that does not end', "plain"], "label": ["1", "0"]}
