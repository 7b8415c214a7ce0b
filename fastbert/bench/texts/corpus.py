"""`fastbert bench --corpus FILE`: the vectors of many texts, beside other engines."""

from __future__ import annotations

import tempfile
from typing import Any

from fastbert.bench.compete import Say, compete, machine_of
from fastbert.bench.texts import report, tables
from fastbert.bench.texts.run import PACKAGES, WORKER, Steps, TextSettings


def run(settings: TextSettings, say: Say) -> dict[str, Any]:
    """Measure every precision; corpus.json, corpus.md and corpus.png in `settings.output`.

    corpus.json is written after every precision. Raises BenchmarkError.
    """
    with tempfile.TemporaryDirectory(prefix="fastbert-bench-") as folder:
        steps = Steps(settings, folder, True, say)
        size = {"texts": len(settings.texts), **steps.size}
        summary: dict[str, Any] = {
            "machine": machine_of(settings.threads, PACKAGES),
            "model": settings.source.name,
            "contestants": list(settings.contestants),
            "rounds": settings.rounds,
            "restarts": settings.restarts,
            "sorted_by": "tokens",
            **size,
            "rows": [],
        }
        for precision in settings.precisions:
            tasks, results = steps.contestants(precision, "corpus")
            say(f"{precision}: {', '.join(tasks)}")
            answers, failures = compete(tasks, settings.rounds, settings.restarts, module=WORKER)
            for name, replies in answers.items():
                results[name] = report.corpus_of(size["texts"], size["tokens"], replies, failures.get(name))
            summary["rows"].append({"dtype": precision, "results": results})
            say(report.short(summary["rows"][-1]))
            report.write(settings.output, "corpus", summary, tables.corpus)
    report.draw(settings.output, "corpus", summary, say)
    return summary
