"""containers/: what is said to `fastbert serve` there is what it knows. Images are built where there is a Docker."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml
from pages import PAGES

from fastbert.cli import main

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "containers/Dockerfile").read_text(encoding="utf-8")
SERVICE = yaml.safe_load((ROOT / "containers/compose.yaml").read_text(encoding="utf-8"))["services"]["fastbert"]
ENTRY = json.loads(re.search(r"^ENTRYPOINT (\[.*\])$", DOCKERFILE, re.MULTILINE)[1])


def test_what_containers_run_is_an_option_of_the_command(capsys):
    on_the_page = re.findall(r"^    fastbert (.*)$", PAGES["containers.md"], re.MULTILINE)
    assert ENTRY[0] == "fastbert" and len(on_the_page) == 1
    for words in (SERVICE["command"], on_the_page[0].split()):
        assert main([*ENTRY[1:], *words, "--nothing"]) == 2
        assert "unrecognized arguments: --nothing" in capsys.readouterr().err  # and it is the only one


def test_time_and_files_fit_each_other():
    assert int(SERVICE["stop_grace_period"].removesuffix("s")) > 2 * 60 + 1  # uvicorn's timeout for a graceful end
    assert SERVICE["build"] == {"context": "..", "dockerfile": "containers/Dockerfile"}
    assert SERVICE["volumes"] == ["models:/models"] and "ENV HF_HOME=/models" in DOCKERFILE
    assert SERVICE["ports"] == ["127.0.0.1:8080:8080"] and "EXPOSE 8080" in DOCKERFILE
