"""README and docs stay true: tables are what the registries and the results say, and every example runs."""

from __future__ import annotations

import json
import re
import shlex
import statistics
from pathlib import Path

import pytest
import torch
from pages import DOCS, PAGES, ROOT, blocks

import fastbert
from benchmarks.update_speed import SECTION
from fastbert.backend import SUPPORTS, Backend, missing_kernels
from fastbert.bench.report import best_peer, ratio, to_markdown
from fastbert.bench.texts import tables
from fastbert.cli import main
from fastbert.families import FAMILIES
from fastbert.models import generated

README = PAGES["README.md"]
RESULTS = ROOT / "benchmarks" / "results" / "amd-epyc-2-cores"
REPORT = json.loads((RESULTS / "results.json").read_text(encoding="utf-8"))


def op_table() -> str:
    lines = ["| op | " + " | ".join(b.value for b in Backend) + " |", "|---|" + ":-:|" * len(Backend)]
    for op, table in sorted(SUPPORTS.items()):
        cells = ["yes" if b is Backend.TORCH or b in table else "-" for b in Backend]
        lines.append(f"| `{op}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_the_tables_are_those_of_the_registries():
    fastbert.backends()  # registers every op
    assert op_table() in PAGES["backends.md"], "docs/backends.md must hold:\n" + op_table()


@pytest.mark.parametrize("page", generated.WRITTEN)
def test_the_families_are_those_of_the_data(page):
    (section,) = (found.group() for found in generated.SECTION.finditer(PAGES[Path(page).name]))
    assert f"\n{generated.WRITTEN[page]()}\n" in section, "run: python -m fastbert.models.generated"


def test_models_under_another_name_are_of_families_that_are_there():
    section = PAGES["models.md"].split("under another name")[1].split("\n## ")[0]
    named = re.findall(r"`([a-z-]+)`", "".join(re.findall(r"^\|[^|]*\|([^|]*)\|", section, re.MULTILINE)[2:]))
    assert len(named) >= 6 and set(named) <= FAMILIES.keys()


def test_the_speed_is_that_of_the_committed_timings():
    (section,) = (found.group() for found in SECTION.finditer(PAGES["speed.md"]))
    assert to_markdown(REPORT) in section


@pytest.mark.parametrize(
    "folder", sorted(path.parent for path in RESULTS.parent.glob("*/results.json")), ids=lambda p: p.name
)
def test_committed_tables_are_made_from_the_committed_timings(folder):
    report = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert (folder / "results.md").read_text(encoding="utf-8") == to_markdown(report) + "\n"


def test_committed_tables_of_texts_are_made_from_the_committed_figures():
    for name in ("latency", "corpus"):
        for path in RESULTS.parent.glob(f"**/{name}.json"):
            report = json.loads(path.read_text(encoding="utf-8"))
            assert path.with_suffix(".md").read_text(encoding="utf-8") == getattr(tables, name)(report) + "\n", path


def latency_table(folder: str) -> str:
    """Of one string: ours in ms, and in brackets times the fastest peer, by tokens and dtype."""
    report = json.loads((ROOT / "benchmarks/results" / folder / "latency.json").read_text(encoding="utf-8"))
    rows = {(row["tokens"], row["dtype"]): row for row in report["rows"] if row["source"] == "strings"}
    dtypes = list(dict.fromkeys(dtype for _, dtype in rows))
    lines = ["| tokens | " + " | ".join(dtypes) + " |", "|--:|" + "--:|" * len(dtypes)]
    for tokens in dict.fromkeys(tokens for tokens, _ in rows):
        cells = [rows[tokens, dtype] for dtype in dtypes]
        shown = [f"{row['results']['fastbert']['p50_ms']:.2f} ({ratio(row, 'fastbert'):.2f})" for row in cells]
        lines.append(f"| {tokens} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def test_the_table_of_one_text_is_that_of_the_committed_figures():
    table = latency_table("amd-epyc-2-cores/latency/threads-2")
    assert table in PAGES["latency.md"], "docs/latency.md must hold:\n" + table


def test_the_ranges_of_one_text_are_those_of_the_committed_figures():
    page = " ".join(PAGES["latency.md"].split())
    said = {}
    for source in ("strings", "ids"):
        for folder in ("threads-2", "threads-1", "processes-2"):
            report = json.loads((RESULTS / "latency" / folder / "latency.json").read_text(encoding="utf-8"))
            found = [ratio(row, "fastbert") for row in report["rows"] if row["source"] == source]
            assert min(found) > 1, (folder, source)
            said[source, folder] = f"{min(found):.2f} to {max(found):.2f}"
    assert f"these are {said['strings', 'threads-1']} and {said['strings', 'processes-2']}" in page
    ids = [said["ids", folder] for folder in ("threads-2", "threads-1", "processes-2")]
    assert f"it is ahead in all rows, too: {ids[0]}, {ids[1]} and {ids[2]}." in page
    strings = [
        float(bound) for (source, _), each in said.items() if source == "strings" for bound in each.split(" to ")
    ]
    assert measured("all-MiniLM-L6-v2") == f"{min(strings):.2f} to {max(strings):.2f}"


def measured(what: str) -> str:
    """What README's table says of it."""
    rows = README.split("\n## Measured\n")[1].split("\n## ")[0]
    (said,) = re.findall(rf"^\| [^|]*{re.escape(what)} \|[^|]*\| ([^|]*) \|$", rows, re.MULTILINE)
    return said


def test_the_range_in_the_readme_is_that_of_all_committed_rows():
    """The slowest row and the fastest one, of every machine."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.parent.glob("*-2-cores/results.json")]
    rows = [row for report in reports for row in report["rows"]]
    ragged = [ratio(row, "fastbert") for row in rows if row["workload"] == "32-ragged"]
    dense = [ratio(row, "fastbert") for row in rows if row["workload"] != "32-ragged"]
    slower = [
        (report["machine"]["cpu"].split("(")[0], row["workload"], row["dtype"])
        for report in reports
        for row in report["rows"]
        if ratio(row, "fastbert") < 1
    ]
    assert slower == [("Intel", "8x128", "float32")]
    said = "[slower](docs/cpu.md) on the Xeon alone, with 8 texts of 128 tokens in float32"
    assert measured("texts of one length") == f"{min(dense):.2f} to {max(dense):.2f}; {said}"
    assert measured("32 texts of mixed length") == f"{min(ragged):.1f} to {max(ragged):.1f}"
    assert 2 * sum(best_peer(row).startswith("openvino") for row in rows) > len(rows)


def test_the_rows_without_avx512_are_those_that_were_measured():
    paths = RESULTS.parent.glob("amd-epyc-avx2-2-cores/*-layers/*/results.json")
    rows = [row for path in paths for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    ragged = [ratio(row, "fastbert") for row in rows if row["workload"] == "32-ragged"]
    dense = [ratio(row, "fastbert") for row in rows if row["workload"] != "32-ragged"]
    slower = f"slower in {sum(times < 1 for times in dense)} of {len(dense)} cases"
    assert measured("from ids, one length") == f"{min(dense):.2f} to {max(dense):.2f}; {slower}"
    assert measured("from ids, mixed length") == f"{min(ragged):.1f} to {max(ragged):.1f}"


def test_the_corpora_in_the_readme_are_those_that_were_measured():
    paths = sorted(RESULTS.parent.glob("*/corpus/*/corpus.json"))
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    reports = [report for report in reports if report.get("sorted_by") == "tokens"]  # others' loops as they are today

    def times(model: str, dtype: str) -> list[float]:
        rows = [row for report in reports if report["model"] == model for row in report["rows"]]
        return [ratio(row, "fastbert") for row in rows if row["dtype"] == dtype]

    dtypes = ("float32", "bfloat16", "int8")
    of_minilm = [times("minilm", dtype) for dtype in dtypes]
    assert [len(found) for found in of_minilm] == [3, 3, 3]
    said = [f"{min(found):.2f} to {max(found):.2f} in {dtype}" for found, dtype in zip(of_minilm, dtypes, strict=True)]
    assert measured("three corpora") == ", ".join(said)


def test_the_benchmark_of_inference_is_the_one_that_was_measured():
    models = json.loads((RESULTS / "inference.json").read_text(encoding="utf-8"))["models"]
    rows = [rates for model in models for rates in model["rows"].values()]
    assert len(models) == 4 and len(rows) == 12

    def times(ours: str, is_int8: bool) -> str:
        """The slowest and the fastest row, beside the best backend of that precision."""
        names = [name for name in rows[0] if not name.startswith("fastbert") and name.endswith("qint8") == is_int8]
        found = [rates[ours] / max(rates[name] for name in names) for rates in rows]
        return f"{min(found):.2f} to {max(found):.2f}"

    float32, int8 = times("fastbert float32", False), times("fastbert int8", True)
    assert measured("beside the best of its backends") == f"{float32} in float32, {int8} in int8"
    page = " ".join(PAGES["speed.md"].split())
    assert f"{float32} times as fast as the best of these backends, in int8 {int8} times the best int8" in page
    for name in rows[0]:
        cells = [f"{rates[name] / rates['torch']:.2f}" for rates in rows]
        for part in (cells[:6], cells[6:]):
            assert f"| {name} | {' | '.join(part)} |" in PAGES["speed.md"].replace("*", "")


def test_the_training_steps_are_those_that_were_measured():
    table = (RESULTS / "fine-tuning.md").read_text(encoding="utf-8")
    steps = re.findall(r"^\| (\d+) \| (\w+) \| [^|]* \| ([\d.]+) \|", table, re.MULTILINE)
    ms = {(int(sentences), name): f"{float(time):.0f}" for sentences, name, time in steps}
    said = " ".join(PAGES["training_speed.md"].split())
    assert f"on 32 sentences takes {ms[32, 'fastbert']} ms instead of {ms[32, 'transformers']}" in said
    assert f"on 128 sentences {ms[128, 'fastbert']} instead of {ms[128, 'transformers']}" in said


@pytest.mark.parametrize("task,name", (("sst2", "SST-2"), ("stsb", "STS-B")))
def test_the_rows_beside_the_trainer_are_those_that_were_measured(task, name):
    runs = json.loads((RESULTS / f"trainer-{task}.json").read_text(encoding="utf-8"))["runs"]
    both = runs["transformers"], runs["fastbert"]
    scores = [f"{100 * statistics.fmean(run['scores'][0] for run in found):.2f}" for found in both]
    seconds = [f"{statistics.median(run['seconds'] for run in found):,.0f}" for found in both]
    (row,) = re.findall(rf"^\| \[{name}\].*", PAGES["training_speed.md"], re.MULTILINE)
    assert row.endswith(f" | {' | '.join(scores + seconds)} |")
    if task == "sst2":
        times = int(seconds[0]) / int(seconds[1])
        told = f"{seconds[1]} s instead of {seconds[0]}; accuracy {float(scores[1]):.1f} % for {float(scores[0]):.1f} %"
        assert measured("beside the Hugging Face Trainer").endswith(f" to {times:.1f} ({told})")


EMBEDDINGS = {
    "stsb": "CoSENT on STS-B",
    "pairs": "In-batch negatives on STS-B's pairs",
    "banking": "In-batch negatives on BANKING77",
}


@pytest.mark.parametrize("task", EMBEDDINGS)
def test_the_rows_beside_sentence_transformers_are_those_that_were_measured(task):
    report = json.loads((RESULTS / "embedding-training.json").read_text(encoding="utf-8"))
    (found,) = (row for row in report["rows"] if row["task"] == task)
    both = "sentence-transformers", "fastbert"
    scores = [f"{100 * statistics.fmean(found['after'][name]):.2f}" for name in both]
    seconds = [f"{statistics.median(found['seconds'][name]):,.0f}" for name in both]
    (row,) = re.findall(rf"^\| \[{EMBEDDINGS[task]}\].*", PAGES["training_speed.md"], re.MULTILINE)
    assert row.endswith(f" | {' | '.join(scores + seconds)} |")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    folder = ROOT if page == "README.md" else (DOCS / page).parent
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", PAGES[page]):
        assert target.startswith("https://") or (folder / target).exists(), target


BLOCKS = {page: blocks(page, "python") for page in PAGES}
# Of a page that is a notebook each block goes on where the one before it ended.
RUNS = {page: ["".join(found)] if page.endswith(".nb.md") else found for page, found in BLOCKS.items()}


@pytest.mark.parametrize(
    "page,block",
    [
        pytest.param(page, block, id=f"{page}-{i}", marks=() if page == "README.md" else pytest.mark.full)
        for page, found in RUNS.items()
        for i, block in enumerate(found)
    ],
)
def test_examples_run(page, block, monkeypatch, tmp_path):
    """As they stand, without a network.

    What needs a bucket or the hub is marked "py": tests/bulk and tests/sentences run the same calls.
    """
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    exec(compile(block, page, "exec"), {})


def test_commands_run(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    for name in ("sentences.txt", "data/intents.csv", "data/intents_eval.csv"):  # a part is as good as the whole
        lines = (ROOT / "examples" / name).read_text(encoding="utf-8").splitlines(keepends=True)
        (Path("examples") / name).parent.mkdir(exist_ok=True)
        (Path("examples") / name).write_text("".join(lines[:13]), encoding="utf-8")
    commands = [line for block in blocks("README.md", "bash") for line in block.splitlines() if line[:9] == "fastbert "]
    assert [command.split()[1] for command in commands] == ["doctor", "encode", "finetune", "predict"]
    for command in commands:
        is_fault = command == "fastbert doctor" and missing_kernels() is not None
        assert main(shlex.split(command)[1:]) == int(is_fault)
    (shown,) = blocks("README.md", "text")
    said = capfd.readouterr().out
    for line in shown.splitlines():  # what doctor says of this machine may be other words after the first
        assert re.search(rf"^ *{line.split()[0]} ", said, re.MULTILINE), line


def test_every_example_is_found_and_every_variable_is_listed():
    assert sum(map(len, BLOCKS.values())) == sum(text.count("```python") for text in PAGES.values()) >= 10
    sources = [p.read_text() for p in (Path(fastbert.__file__).parent).rglob("*.py")]
    sources.append((ROOT / "setup.py").read_text())
    used = {name for text in sources for name in re.findall(r"environ[^\n]*\"(FASTBERT_\w+)\"", text)}
    assert used == set(re.findall(r"^\| `(FASTBERT_\w+)` \|", PAGES["backends.md"], re.MULTILINE))


def test_the_citation_names_this_version():
    assert f"\nversion: {fastbert.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_dtypes_that_the_torch_backend_is_said_to_serve():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(4, 2, 16, dtype=dtype)
        out = fastbert.ops.attention(x, x, x, torch.tensor([0, 1, 4], dtype=torch.int32), 3, backend="torch")
        assert out.dtype == dtype and out.isfinite().all()


def test_the_pages_install_what_they_need():
    """`pip install .` left the clone's own folder without kernels, and that is what Python imports there."""
    section = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]\n")[1].split("\n[")[0]
    extras = re.findall(r"^([a-z]+) = \[", section, re.MULTILINE)  # Python 3.10 has no tomllib
    (first,) = {re.findall(r"```bash\n(.*)\nfastbert doctor\n", PAGES[name])[0] for name in ("README.md", "start.md")}
    (named,) = re.findall(r"^pip install -e '\.\[([a-z,]+)\]'$", first)
    assert {"demo", "train", "serve"} <= set(named.split(",")) <= set(extras)
    table = PAGES["install.md"].split("\n## Extras\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([a-z]+)` \|", table, re.MULTILINE)
    assert sorted(rows) == sorted(extras)
    for name, page in PAGES.items():
        assert not re.search(r"pip install '?\.(\[|$|\s)", page.replace("`pip install .`", "")), name
