"""schemathesis against `fastbert serve`: requests by /openapi.json and against it, for each kind of model.

    clients/bin/python -m pip install -r tests/ecosystem/serve_clients.txt
    python tests/ecosystem/serve_schema.py clients/bin/schemathesis [EXAMPLES] [SEED]

EXAMPLES are those of each route and phase, 100 by default, which makes thousands of requests. Leaves with 1 where
something was found: an answer that /openapi.json does not have, of another form, to what should be refused, or a fault
of the server.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from serve_clients import MODELS, servers

HERE = Path(__file__).resolve().parent
LONG = {"max_position_embeddings": 512}


def main(program: str, examples: str = "100", seed: str = "1") -> int:
    models = {kind: (head, {**fields, **LONG}) for kind, (head, fields) in MODELS.items()}
    models["sparse"] = ("MaskedLM", LONG)
    found = 0
    program = str(Path(program).absolute())
    with servers(models, "--auto-truncate") as addresses, tempfile.TemporaryDirectory() as folder:  # for its notes
        for kind, url in addresses.items():
            print(f"== {kind}", flush=True)
            words = [program, "--config-file", str(HERE / "serve_schema.toml"), "run", f"{url}/openapi.json"]
            words += ["--max-examples", examples, "--seed", seed, "--no-color"]
            found |= subprocess.run(words, cwd=folder).returncode
    return found


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
