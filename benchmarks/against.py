"""This checkout against another one: whether the bits are the same, and times in turn.

    python benchmarks/against.py OTHER             # digests of outputs, losses and gradients of every family of both
    python benchmarks/against.py OTHER --speed     # ratios of medians, two processes asked in turn
    python benchmarks/against.py OTHER --code      # functions of the extension whose machine code is not the same

OTHER is the root of a checkout with its extension built (`python setup.py build_ext --inplace`). Each checkout runs in
a process of its own, on the same weights and inputs. The machine must be quiet for --speed; where it is not, --code
says what can have another speed at all.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

SHAPES = {"1x16": (1, 16), "1x128": (1, 128), "8x128": (8, 128), "4x512": (4, 512), "ragged": None}
RAGGED = (12, 31, 55, 7, 90, 44, 167, 23, 61, 18, 102, 36, 5, 73, 49, 28)
# Of each way through the kernels one: a rate is a layer's, so all but MiniLM and BERT-base have few of them.
MODELS = {
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "base": {},
    "modernbert": {"model_type": "modernbert", "num_hidden_layers": 4, "pad_token_id": 0},
    "nomic": {"model_type": "nomic_bert", "num_hidden_layers": 3},
    "deberta": {
        "model_type": "deberta-v2", "num_hidden_layers": 3, "hidden_size": 768, "num_attention_heads": 12,
        "intermediate_size": 3072, "relative_attention": True, "share_att_key": True, "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 256, "norm_rel_ebd": "layer_norm", "position_biased_input": False,
    },
}  # fmt: skip

GROUPED = ("gemma3_text", "qwen3", "ultrabert")  # whose configs have more heads of keys than two


def make(model_type: str, head: str, **fields):
    import torch

    import fastbert
    from fastbert.models.auto import model_class

    model = model_class(model_type, head)(fastbert.EncoderConfig.of_family(model_type, **fields))
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in parameters(model):
            scale = 0.2 if p.dim() == 1 else 0.7 * p.shape[1] ** -0.5
            p.copy_(torch.randn(p.shape, generator=noise) * scale + (p.dim() == 1 and "orm.weight" in name))
    return model


def parameters(model) -> list:
    """By name, tied ones under both: which is a module's own depends on the order in which it has them."""
    return sorted(model.named_parameters(remove_duplicate=False))


def digest(*tensors) -> str:
    import torch

    found = hashlib.sha256()
    for t in tensors:
        found.update(str((t.dtype, tuple(t.shape))).encode())
        found.update(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def models() -> list[list[str]]:
    """(model_type, head) of every class."""
    from fastbert.models import auto

    return sorted(map(list, vars(auto).get("_CLASSES") or auto.CLASSES))  # _CLASSES: before the families' data


def bits(classes: list[list[str]]) -> dict[str, str]:
    """A digest for every family, head, dtype, mode and layout."""
    import torch

    import fastbert

    shape = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 96}
    shape |= {"vocab_size": 99, "max_position_embeddings": 64, "pad_token_id": 1}
    found = {}
    for model_type, head in classes:
        labels = 2 if head in ("QuestionAnswering", "MultipleChoice", "NextSentencePrediction") else 3
        sizes = shape | {"num_key_value_heads": 1} if model_type in GROUPED else shape
        model = make(model_type, head, num_labels=labels, **sizes)
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(2, 99, (6, 24), generator=generator)
        mask = (torch.arange(24) < torch.tensor([24, 3, 11, 1, 17, 9])[:, None]).long()
        ids = ids.where(mask.bool(), model.config.pad_token_id)
        inputs = {"input_ids": ids, "attention_mask": mask}
        if head == "MultipleChoice":
            inputs = {name: t.view(3, 2, 24) for name, t in inputs.items()}
        packed = {"input_ids": ids[mask.bool()], "max_seqlen": 24}
        packed["cu_seqlens"] = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).int()
        if head == "MultipleChoice":
            packed["num_choices"] = 2
        token = torch.randint(0, 2, (6, 24), generator=generator).where(mask.bool(), -100)
        given = {
            "Model": {}, "MaskedLM": {"labels": token}, "TokenClassification": {"labels": token},
            "QuestionAnswering": {"start_positions": torch.zeros(6).long(), "end_positions": torch.zeros(6).long()},
            "MultipleChoice": {"labels": torch.tensor([0, 1, 1])},
            "SequenceClassification": {"labels": torch.tensor([0, 1, 1, 0, 2, 1])},
            "NextSentencePrediction": {"labels": torch.tensor([0, 1, 1, 0, 1, 1])},
        }  # fmt: skip
        pair = "sentence_order_label" if model_type == "albert" else "next_sentence_label"
        both = {"labels": token} | ({} if model_type == "electra" else {pair: torch.tensor([0, 1, 1, 0, 1, 1])})
        labels = given.get(head, both)
        for dtype in ("float32", "bfloat16", "int8", "autocast"):
            name = f"{model_type} {head} {dtype}"
            model = model.to(torch.bfloat16) if dtype == "bfloat16" else model.float()
            runs = fastbert.quantize(make(model_type, head, **sizes), "int8") if dtype == "int8" else model
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
                for layout, batch in (("padded", inputs), ("packed", packed)):
                    with torch.inference_mode():
                        out = runs.eval()(**batch)
                    found[f"{name} eval {layout}"] = digest(*(out[k] for k in out if torch.is_tensor(out[k])))
                if dtype != "int8":
                    torch.manual_seed(7)
                    out = runs.train()(**inputs, **labels)
                    tensors = [out[k] for k in out if torch.is_tensor(out[k])]
                    runs.zero_grad()
                    (out.loss if labels else tensors[0].sum()).backward()
                    gradients = [p.grad for _, p in parameters(runs) if p.grad is not None]
                    found[f"{name} train"] = digest(*tensors, *gradients)
    return found


def serve() -> None:
    """Times for cases asked for on stdin, a line each: seconds of every call."""
    import torch

    import fastbert

    torch.set_num_threads(2)
    made: dict = {}
    for line in sys.stdin:
        name, dtype, shape, calls = json.loads(line)
        head = "SequenceClassification" if shape == "training" else "Model"
        if (name, dtype, head) not in made:
            made.clear()
            model = make(**{"model_type": "bert", "head": head, **MODELS[name]}).eval()
            if dtype == "int8":
                model = fastbert.quantize(model, "int8")
            made[name, dtype, head] = model.to(getattr(torch, "bfloat16" if dtype == "int8" else dtype))
        model = made[name, dtype, head]
        generator = torch.Generator().manual_seed(2)
        if shape in ("ragged", "training"):
            lengths = torch.tensor(RAGGED * 2)
        else:
            lengths = torch.full((SHAPES[shape][0],), SHAPES[shape][1])
        width = int(lengths.max())
        ids = torch.randint(1000, 30000, (len(lengths), width), generator=generator)
        mask = (torch.arange(width) < lengths[:, None]).long()
        seconds = []
        for _ in range(calls):
            if shape == "training":
                model.train()
                begin = time.perf_counter()
                model(ids, mask, labels=torch.arange(len(lengths)) % 2).loss.backward()
                with torch.no_grad():
                    for p in model.parameters():
                        p.add_(p.grad, alpha=-1e-5)
                        p.grad = None
            else:
                with torch.inference_mode():
                    begin = time.perf_counter()
                    model(ids, mask)
            seconds.append(time.perf_counter() - begin)
        print(json.dumps(seconds), flush=True)


def start(root: Path, task: str, **pipes) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(root), "FASTBERT_AGAINST": task}
    return subprocess.Popen([sys.executable, __file__, str(root)], cwd=root, env=environment, text=True, **pipes)


def compare_speed(mine: Path, other: Path, rounds: int, models: list[str]) -> int:
    roots = {"this": mine, "other": other}
    servers = {n: start(r, "serve", stdin=subprocess.PIPE, stdout=subprocess.PIPE) for n, r in roots.items()}
    cases = [(m, d, s) for m in models for d in ("float32", "bfloat16", "int8") for s in SHAPES]
    cases += [(m, d, "training") for m in models for d in ("float32", "bfloat16") if m != "base"]
    cases.sort(key=lambda case: (case[0], case[2] == "training", case[1]))
    slowest = 2.0
    print("model      dtype     shape     this ms  other ms  other/this (quartiles over rounds)")
    for model, dtype, shape in cases:
        medians: dict[str, list[float]] = {name: [] for name in roots}
        for turn in range(rounds + 1):
            names = list(roots) if turn % 2 else list(roots)[::-1]
            for name in names:
                calls = 5 if shape == "training" else 60 if shape == "1x16" else 20 if shape == "1x128" else 5
                print(json.dumps([model, dtype, shape, calls]), file=servers[name].stdin, flush=True)
                seconds = json.loads(servers[name].stdout.readline())
                if turn:  # the first round packs weights and warms up
                    medians[name].append(statistics.median(seconds))
                time.sleep(0.05)  # until idle threads have stopped to spin
        ratios = sorted(b / a for a, b in zip(medians["this"], medians["other"], strict=True))
        low, middle, high = statistics.quantiles(ratios, n=4)
        slowest = min(slowest, middle)
        times = " ".join(f"{1e3 * statistics.median(medians[name]):9.2f}" for name in roots)
        print(f"{model:10} {dtype:9} {shape:9}{times}  {middle:6.3f} ({low:.3f} to {high:.3f})", flush=True)
    for server in servers.values():
        server.stdin.close()
        server.wait()
    print(f"slowest: {slowest:.3f}")
    return 0


def compare_bits(mine: Path, other: Path) -> int:
    def ask(root: Path, task: str, given: object = None):
        asked = start(root, task, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return json.loads(asked.communicate(json.dumps(given))[0])

    ours = ask(mine, "models")
    shared = [name for name in ask(other, "models") if name in ours]
    ours, theirs = (ask(root, "bits", shared) for root in (mine, other))
    differing = [name for name in theirs if ours.get(name) != theirs[name]]
    print(f"{len(theirs) - len(differing)} of {len(theirs)} cases have the same bits")
    print(*(f"differs: {name}" for name in differing), sep="\n")
    return 1 if differing else 0


def machine_code(root: Path) -> Counter[tuple[str, tuple[str, ...]]]:
    """The functions of a checkout's extension, (name, instructions), without addresses and padding."""
    (library,) = (root / "fastbert").glob("_C*.so")
    listing = subprocess.run(
        ["objdump", "-dC", "--no-show-raw-insn", library], text=True, stdout=subprocess.PIPE, check=True
    )
    functions, name, body = Counter(), "", list[str]()
    for line in [*listing.stdout.splitlines(), "0 <>:"]:
        if (head := re.match(r"[0-9a-f]+ <(.*)>:$", line)) is not None:
            functions[name, tuple(body)] += 1
            name, body = head[1], []
        elif "\t" in line:
            instruction = re.sub(r"#.*|<.*>|\b0?x?[0-9a-f]+(?= <)|0x[0-9a-f]+\(%rip\)", "", line.split("\t", 1)[1])
            body += [] if re.match(r"(cs |data16 )*nop|xchg +%ax,%ax", instruction) else [" ".join(instruction.split())]
    return functions


def compare_code(mine: Path, other: Path) -> int:
    """By their instructions: a name may have changed, and a function may have several bodies."""
    ours, theirs = machine_code(mine), machine_code(other)
    known = {body for _, body in theirs}
    new = sorted((-len(body), name) for name, body in ours if body not in known)
    total = sum(len(body) * count for (_, body), count in ours.items())
    print(f"{total:,} instructions; {-sum(count for count, _ in new):,} are in functions that {other} does not have so")
    print(*(f"{-count:7,} {name[:120]}" for count, name in new if count < -60), sep="\n")
    return 0


def main() -> int:
    task = os.environ.get("FASTBERT_AGAINST")
    if task is not None:
        import fastbert

        assert Path(fastbert.__file__).is_relative_to(sys.argv[1]), f"{fastbert.__file__} is not below {sys.argv[1]}"
    if task == "serve":
        serve()
        return 0
    if task == "bits":
        print(json.dumps(bits(json.load(sys.stdin))))
        return 0
    if task == "models":
        print(json.dumps(models()))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--code", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", choices=MODELS, action="append", help="for --speed, default: all")
    options = parser.parse_args()
    mine, other = Path(__file__).resolve().parents[1], options.other.resolve()
    if not (other / "fastbert").is_dir():
        parser.error(f"{other} is no checkout of fastbert")
    if options.code:
        return compare_code(mine, other)
    if options.speed:
        return compare_speed(mine, other, options.rounds, options.model or [*MODELS])
    return compare_bits(mine, other)


if __name__ == "__main__":
    sys.exit(main())
