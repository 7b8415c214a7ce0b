"""Texts and words are read as they are written, and labels without white space around them. What may be meant in two
ways is asked for.
"""

from __future__ import annotations

import pytest
from finetuning_runs import TEXTS, base, task_of, write_rows

from fastbert.errors import ConfigError, InputError

HOT = ([1.0, 0.0, 0.0], [0.0, 1.0, 1.0])


def labelled(folder, values, name="a.jsonl"):
    """A file of the texts with these labels, in turn."""
    rows = [{"text": text, "label": values[i % len(values)]} for i, text in enumerate(TEXTS)]
    if name.endswith(".jsonl"):
        return write_rows(folder / name, rows)
    sign = "\t" if name.endswith(".tsv") else ";"
    lines = [f"text{sign}label", *(f"{row['text']}{sign}{row['label']}" for row in rows)]
    (folder / name).write_text("\n".join(lines).replace(",", "").replace(";", ",") + "\n")
    return str(folder / name)


def meaning(folder, path, **options):
    """(problem, names, what the first two rows learn)."""
    task = task_of(base(folder), path, **options)
    return task.labels.problem, task.labels.names, task.train.labels["labels"][:2].tolist()


SEVERAL, ONE = "multi_label_classification", "single_label_classification"
NAMES = ("LABEL_0", "LABEL_1", "LABEL_2")


@pytest.mark.parametrize(
    "values,name,problem",
    (
        ((" pos", "neg", "pos", "neg\t"), "a.csv", ONE),
        ((" pos", "neg", "pos", "neg\u00a0"), "a.jsonl", ONE),
        (([" pos"], ["neg "], ["pos"], ["neg"]), "a.jsonl", SEVERAL),
    ),
)
def test_white_space_around_a_label_is_no_part_of_it(values, name, problem, tmp_path):
    """Two rows with a blank between comma and label were a class of their own."""
    found, names, first = meaning(tmp_path, labelled(tmp_path, values, name))
    assert (found, names) == (problem, ("neg", "pos"))
    assert first == ([1, 0] if problem == ONE else [[0.0, 1.0], [1.0, 0.0]])
    held_out = labelled(tmp_path, ("pos ", " neg"), "b.jsonl")
    task = task_of(base(tmp_path), labelled(tmp_path, values, name), held_out, problem_type=problem)
    assert task.labels.names == ("neg", "pos")


@pytest.mark.parametrize("values", (HOT, ([1, 0, 0], [0, 1, 1])))
def test_multi_hot_rows(values, tmp_path):
    assert meaning(tmp_path, labelled(tmp_path, values)) == (SEVERAL, NAMES, list(HOT))


def test_multi_hot_rows_go_by_the_order_of_a_head(tmp_path):
    from tiny import write_model

    names = {"num_labels": 3, "id2label": {0: "z", 1: "x", 2: "y"}}
    model = str(write_model(tmp_path / "own", head="SequenceClassification", **names))
    task = task_of(model, labelled(tmp_path, HOT))
    assert task.labels.names == ("z", "x", "y") and task.train.labels["labels"][:2].tolist() == list(HOT)


@pytest.mark.parametrize(
    "values,options,error",
    (
        (
            [[1, 0], [0, 1]],
            {},
            r"a.jsonl: label is \[1, 0\], \[0, 1\], \[1, 0\], ...: .* --label-type multi_hot, or na",
        ),
        ([[0.5], [1.0]], {}, r"label is \[0.5\], .* Say --label-type names if they are"),
        (["['a', 'b']", "['a']"], {}, r"lists written as texts\? Give lists in a .jsonl"),
        ([0.0, 1.0], {}, r"a.jsonl: label is 0.0, 1.0, 0.0, ...: .* Say --problem-type regression, or single_label_"),
        ([0, 1], {"label_type": "multi_hot"}, r"label_type multi_hot is for several labels a row"),
        ([[1, 0], [1]], {"label_type": "multi_hot"}, r"row 2: label is \[1\]; it must be a 0 or a 1 for each of the 2"),
        ([[1, 0], [1, 2]], {"label_type": "multi_hot"}, r"row 2: label is \[1, 2\]; it must be a 0 or a 1"),
        ([[1, 0], []], {"label_type": "multi_hot"}, r"row 2: label is \[\]; it must be"),
    ),
)
def test_what_may_be_meant_in_two_ways_is_asked_for(values, options, error, tmp_path):
    with pytest.raises(InputError, match=error):
        task_of(base(tmp_path), labelled(tmp_path, values), **options)


@pytest.mark.parametrize(
    "values,options,wanted",
    (
        ([[1, 0], [0, 1]], {"label_type": "multi_hot"}, (SEVERAL, NAMES[:2], [[1.0, 0.0], [0.0, 1.0]])),
        ([[1, 0], [1]], {"label_type": "names"}, (SEVERAL, ("0", "1"), [[1.0, 1.0], [0.0, 1.0]])),
        ([0.0, 1.0], {"problem_type": "regression"}, ("regression", (), [0.0, 1.0])),
        ([0.0, 1.0], {"problem_type": ONE}, (ONE, ("0.0", "1.0"), [0, 1])),
        ([0.0, 1.5], {}, ("regression", (), [0.0, 1.5])),
    ),
)
def test_what_was_asked_for(values, options, wanted, tmp_path):
    assert meaning(tmp_path, labelled(tmp_path, values), **options) == wanted


@pytest.mark.parametrize("name", ("a.csv", "a.tsv"))
def test_labels_of_a_table_are_what_is_written(name, tmp_path):
    assert meaning(tmp_path, labelled(tmp_path, ["01", "1"], name)) == (ONE, ("01", "1"), [0, 1])
    assert meaning(tmp_path, labelled(tmp_path, ["10", "9"], name)) == (ONE, ("9", "10"), [1, 0])  # by their size
    assert meaning(tmp_path, labelled(tmp_path, ["true", "False"], name)) == (ONE, ("False", "true"), [1, 0])
    assert meaning(tmp_path, labelled(tmp_path, ["0.5", "2"], name)) == ("regression", (), [0.5, 2.0])
    with pytest.raises(InputError, match=r"label is '0.0', '1.0', '0.0', ...: numbers, or labels\?"):
        task_of(base(tmp_path), labelled(tmp_path, ["0.0", "1.0"], name))


def test_texts_that_are_all_numbers(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\n007,a\n12.50,b\n")
    (tmp_path / "a.jsonl").write_text('{"text": "007", "label": "a"}\n{"text": "12.50", "label": "b"}\n')
    found, wanted = (task_of(base(tmp_path), str(tmp_path / name)).train for name in ("a.csv", "a.jsonl"))
    assert found.sequences.ids.tolist() == wanted.sequences.ids.tolist()


def test_files_of_other_columns(tmp_path):
    from fastbert.data.sources import load_source

    for name, text in (("a.csv", "text,label\nx,1\n"), ("b.csv", "label,text\n2,y\n"), ("c.csv", "text,tag\nx,1\n")):
        (tmp_path / name).write_text(text)
    paths = [tmp_path / "a.csv", tmp_path / "b.csv"]
    assert load_source(paths).to_list() == [{"text": "x", "label": "1"}, {"text": "y", "label": "2"}]
    with pytest.raises(InputError, match=r"c.csv has the columns text, tag; .*a.csv has text, label"):
        load_source([tmp_path / "a.csv", tmp_path / "c.csv"])


def test_scores_of_a_table(tmp_path):
    (tmp_path / "a.csv").write_text("sentence1,sentence2,score\nthe cat,12,0.5\na dog,13,1\n")
    from tiny import write_sentence_model

    task = task_of(str(write_sentence_model(tmp_path / "base")), str(tmp_path / "a.csv"), task="embedding")
    assert task.train.scores.tolist() == [0.5, 1.0]


def test_comments_of_conll_files(tmp_path):
    from fastbert.training.finetuning.inputs.tagged import read_conll

    path = tmp_path / "a.conll"
    path.write_text(
        "#begin document (a); part 000\n# id 1 domain=en\n# 7 _ O\ncat _ O\n# _ O\n\n"
        "# id 2 domain=en\n#tag _ X\nOslo _ B-X\n#end _ O\n\n#end document\n"
    )
    wanted = [[("cat", "O"), ("#", "O")], [("#tag", "X"), ("Oslo", "B-X"), ("#end", "O")]]
    with pytest.raises(InputError, match=r"a.conll, line 3: '# 7 _ O' may be a comment, or a word with a tag"):
        read_conll(path)
    path.write_text(path.read_text().replace("# 7 _ O\n", ""))
    assert read_conll(path) == wanted
    assert [[word for word, _ in text] for text in read_conll(path, with_tags=False)] == [
        [word for word, _ in text] for text in wanted
    ]
    path.write_text("cat O\n# id 1\ndog B-X\n")
    with pytest.raises(InputError, match="line 2: '# id 1' may be a comment"):
        read_conll(path)


def words_and_tags(path, text, **options):
    from fastbert.training.finetuning.inputs.tagged import read_conll

    path.write_text(text)
    return [" ".join(f"{word}/{tag}" for word, tag in found) for found in read_conll(path, **options)]


@pytest.mark.parametrize(
    "text,wanted",
    (
        ("#\tSYM\n200\tCD\n", ["#/SYM 200/CD"]),  # of a tag that no other word has
        ("No\tDT\n\n#\t#\n200\tCD\n", ["No/DT", "#/# 200/CD"]),
        ("#\tSYM\n", ["#/SYM"]),
        ("# id 1\nNo\tIN\tDT\n\n# id 2\n#\tx\tSYM\n", ["No/DT", "#/SYM"]),  # by tabs three columns are another thing
        ("#begin document\ncat O\n\n#end document\n", ["cat/O"]),
        ("# text = the cat .\nthe\tDET\ncat\tN\n.\t.\n", ["the/DET cat/N ./."]),  # it ends with what is a tag
        ("the\tDET\n# is this so: O\n# SYM\n#\tSYM\n1\tO\n", ["the/DET #/SYM 1/O"]),
    ),
)
def test_lines_of_conll_files_that_are_clear(text, wanted, tmp_path):
    assert words_and_tags(tmp_path / "a.conll", text) == wanted


@pytest.mark.parametrize(
    "text,lines,as_words,as_comments",
    (
        ("No DT\n\n# #\n200 CD\n", r"line 3: '# #' may be", ["No/DT", "#/# 200/CD"], ["No/DT", "200/CD"]),
        (
            "# #\n200 CD\n# SYM\n\n# id\nNo DT\n",
            r"line 1: '# #' may be .*as may line 3, 5\): say --hash-lines comment, or word",
            ["#/# 200/CD #/SYM", "#/id No/DT"],
            ["200/CD", "No/DT"],
        ),
        ("cat O\n# id 1\ndog B-X\n", r"line 2: '# id 1' may be", ["cat/O #/1 dog/B-X"], ["cat/O dog/B-X"]),
        ("# #\n", r"line 1: '# #' may be", ["#/#"], []),
    ),
)
def test_lines_of_conll_files_that_may_be_either_are_asked_for(text, lines, as_words, as_comments, tmp_path):
    path = tmp_path / "a.conll"
    with pytest.raises(InputError, match=lines):
        words_and_tags(path, text)
    assert words_and_tags(path, text, hash_lines="word") == as_words
    assert words_and_tags(path, text, hash_lines="comment") == as_comments


def test_what_the_option_says_is_of_lines_that_may_be_either(tmp_path):
    text = "# id = 1\ncat O\n# O\n# X\n"
    assert words_and_tags(tmp_path / "a.conll", text, hash_lines="word") == ["cat/O #/O #/X"]
    assert words_and_tags(tmp_path / "a.conll", text, hash_lines="comment") == ["cat/O #/O"]


def test_a_fine_tuning_is_told_what_a_line_is(tmp_path):
    (tmp_path / "a.conll").write_text("No DT\n\n# #\n200 CD\n")
    task = task_of(base(tmp_path), str(tmp_path / "a.conll"), task="tokens", hash_lines="word")
    assert set(task.labels.names) == {"#", "CD", "DT"}
    with pytest.raises(ConfigError, match="hash_lines is for the tasks tokens, and the task is classification"):
        task_of(base(tmp_path), labelled(tmp_path, ["a", "b"]), hash_lines="word")


def test_options_of_other_files_with_words(tmp_path):
    (tmp_path / "a.conll").write_text("No DT\n\n200 CD\n")
    rows = write_rows(tmp_path / "a.jsonl", [{"tokens": ["No", "200"], "tags": ["DT", "CD"]}])
    with pytest.raises(InputError, match=r"hash_lines is for CoNLL files \(.conll, .*\), and .*a.jsonl is none"):
        task_of(base(tmp_path), rows, task="tokens", hash_lines="word")
    for options in ({"text_columns": ("tokens",)}, {"label_column": "tags"}):
        with pytest.raises(InputError, match=r"_columns? is for files that have columns by name, and .*a.conll"):
            task_of(base(tmp_path), str(tmp_path / "a.conll"), task="tokens", **options)
        mixed = task_of(base(tmp_path), str(tmp_path / "a.conll"), rows, task="tokens", hash_lines="word", **options)
        assert mixed.labels.names == ("CD", "DT")


def test_words_alone_with_comments(tmp_path):
    tabs = "# .\nthe\tDET\ncat\tN\n.\t.\n"
    assert words_and_tags(tmp_path / "b.conll", tabs, with_tags=False) == ["the/DET cat/N ./."]
    text = "# newdoc\n# text = he saw .\nhe\nsaw\n# text = x\n#\n.\n"
    assert words_and_tags(tmp_path / "a.conll", text, with_tags=False) == ["he/he saw/saw #/# ./."]


HOT_TEXTS = (["1,0,0", "0,1,1"], ["1, 0, 0", "0, 1, 1"], ["true,false,false", "False,True,True"])


@pytest.mark.parametrize("values", (*HOT_TEXTS, (["1", "0", "0"], ["0", "1", "1"])))
def test_multi_hot_rows_that_are_texts(values, tmp_path):
    assert meaning(tmp_path, labelled(tmp_path, values), problem_type=SEVERAL) == (SEVERAL, NAMES, list(HOT))


def test_multi_hot_rows_of_a_csv(tmp_path):
    (tmp_path / "a.csv").write_text('text,label\nx,"1,0,0"\ny,"0,1,1"\nz,"1,0,1"\n')
    for options in ({"problem_type": SEVERAL}, {"problem_type": SEVERAL, "label_type": "multi_hot"}):
        assert meaning(tmp_path, str(tmp_path / "a.csv"), **options) == (SEVERAL, NAMES, list(HOT))
    with pytest.raises(InputError, match=r"label is '1,0,0', .* a label by itself\? Say --problem-type multi_label_cl"):
        task_of(base(tmp_path), str(tmp_path / "a.csv"))
    found = meaning(tmp_path, str(tmp_path / "a.csv"), problem_type=ONE)
    assert found == (ONE, ("0,1,1", "1,0,0", "1,0,1"), [1, 0])


@pytest.mark.parametrize(
    "values,options,error",
    (
        (["1,0", "0,1"], {}, r"label is '1,0', '0,1', .* --label-type multi_hot, or names"),
        (["1,0,1", "0,1"], {}, r"label is '1,0,1', '0,1', .* --label-type multi_hot, or names"),  # a row that is wrong
        ([[1, 0, 1], [0, 1]], {}, r"label is \[1, 0, 1\], \[0, 1\], .* --label-type multi_hot, or names"),
        (["1,0,1", "0,1"], {"label_type": "multi_hot"}, r"row 2: label is '0,1'; it must be .* each of the 3 labels"),
        (["1,0,1", "0,1,a"], {"label_type": "multi_hot"}, r"row 2: label is '0,1,a'; it must be a 0 or a 1"),
        ([1, 0], {"label_type": "multi_hot"}, r"row 1: label is 1; a row of several labels has a list of a 0 or a 1"),
        ([[], [1, 0]], {"label_type": "multi_hot"}, r"row 1: label is \[\]; a row of several labels has a list of"),
        (["a", "1,0"], {"label_type": "multi_hot"}, r"row 1: label is 'a'; a row of several labels has a list of"),
    ),
)
def test_multi_hot_rows_of_several_shapes(values, options, error, tmp_path):
    with pytest.raises(InputError, match=error):
        task_of(base(tmp_path), labelled(tmp_path, values), problem_type=SEVERAL, **options)


def test_names_in_brackets(tmp_path):
    assert meaning(tmp_path, labelled(tmp_path, ["[PER]", "[LOC]"])) == (ONE, ("[LOC]", "[PER]"), [1, 0])
    numbers = labelled(tmp_path, ["[7]", "[LOC]"])  # a list of JSON
    with pytest.raises(InputError, match=r"lists written as texts\? .* Where names have brackets, say --problem-type"):
        task_of(base(tmp_path), numbers)
    assert meaning(tmp_path, numbers, problem_type=ONE) == (ONE, ("[7]", "[LOC]"), [0, 1])
    found = meaning(tmp_path, numbers, problem_type=SEVERAL, label_type="names")
    assert found == (SEVERAL, ("[7]", "[LOC]"), [[1.0, 0.0], [0.0, 1.0]])


@pytest.mark.parametrize("text", ('["a"]', "['a', 'b']", "[1, 0]", "[0 1 1]", "[0. 1.]", "[]", "[true, null]"))
def test_lists_that_are_texts(text, tmp_path):
    with pytest.raises(InputError, match=r"lists written as texts\? Give lists in a .jsonl"):
        task_of(base(tmp_path), labelled(tmp_path, [text, "[a]"]))


@pytest.mark.parametrize(
    "values",
    (
        ["['a', 'b']", "['a']"],
        ['["a", "b"]', '["a"]'],
        ["['a' 'b']", "['a']"],
        ["[a, b]", "[a]"],
        ["('a', 'b')", "('a',)"],
        ["{'a', 'b'}", "{'a'}"],
        ["[0 1]", "[1]"],
        ["a", "[]"],
    ),
)
def test_lists_that_are_texts_are_no_names(values, tmp_path):
    """They would fall into labels such as ['a' and 'b']. The message does not say what is refused, either."""
    for options in ({}, {"label_type": "names"}, {"label_type": "multi_hot"}):
        with pytest.raises(InputError, match=r"lists written as texts\? .*, say --problem-type single_label_class\w+$"):
            task_of(base(tmp_path), labelled(tmp_path, values), problem_type=SEVERAL, **options)


def test_several_names_in_brackets(tmp_path):
    found = meaning(tmp_path, labelled(tmp_path, ["[PER], [LOC]", "[LOC]"]), problem_type=SEVERAL)
    assert found == (SEVERAL, ("[LOC]", "[PER]"), [[1.0, 1.0], [1.0, 0.0]])
