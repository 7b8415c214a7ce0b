"""`fastbert serve` as a process: many clients at once, signals, ports and keys."""

from __future__ import annotations

import contextlib
import gc
import http.client
import json
import re
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tiny
import warm
from command_line import ENVIRONMENT, command_without, fails, run_python
from precise import assert_close_to_theirs

from fastbert import SentenceEncoder
from fastbert.errors import CheckpointError
from fastbert.serve.app import Limits
from fastbert.serve.run import Uvicorn, serve

pytestmark = pytest.mark.dear_to_set_up


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    # Large enough that a batch takes milliseconds, so that requests meet.
    return tiny.write_model(tmp_path_factory.mktemp("served"), hidden_size=256, num_hidden_layers=4)


@contextlib.contextmanager
def served(*arguments: object, without: Sequence[str] = (), **environment: str) -> Iterator[tuple[warm.Process, int]]:
    """A running server, `without` some modules, and its port; it is killed at the end, if it has not ended."""
    env = {**ENVIRONMENT, **environment}
    words = command_without(without, "serve", *arguments, "--device", "cpu", "--port", 0)
    process = warm.Process(words, env=env)
    try:
        line = process.stderr.readline()
        found = re.search(r"at http://127\.0\.0\.1:(\d+), described at", line)
        assert found is not None, line + process.stderr.read()
        yield process, int(found[1])
    finally:
        process.kill()
        process.communicate()


def post(port: int, content: object, path: str = "/embed", **headers: str) -> tuple[int, object]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(content), {"content-type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def page(port: int, path: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().read().decode()


def texts(count: int, longest: int = 20) -> list[str]:
    words = tiny.WORDS.split()
    return [" ".join(words[(i * j) % len(words)] for j in range(1 + i % longest)) for i in range(count)]


def test_many_clients_share_batches_and_get_encodes_vectors(model):
    requests = [texts(1 + i % 5, 1 + i % 30) for i in range(100)]
    encoder, exact = (SentenceEncoder.from_pretrained(model, device="cpu", dtype=d) for d in ("float32", "float64"))
    with served(model) as (_, port), ThreadPoolExecutor(32) as clients:
        answers = list(clients.map(lambda inputs: post(port, {"inputs": inputs}), requests))
        metrics = page(port, "/metrics")
    assert {status for status, _ in answers} == {200}
    # Which kernels run depends on the longest text of a batch, and so do the last bits. All texts are judged together.
    near, oracle = (
        np.concatenate([each.encode(inputs, normalize=True) for inputs in requests]) for each in (encoder, exact)
    )
    assert_close_to_theirs(np.concatenate([np.float32(vectors) for _, vectors in answers]), near, oracle)
    batches = float(re.search(r"^te_batch_next_size_count (\S+)$", metrics, re.MULTILINE)[1])
    assert batches < len(requests)  # requests met in batches
    assert "te_request_failure" not in re.sub(r"^#.*$", "", metrics, flags=re.MULTILINE)


def test_clients_that_vanish_or_talk_rubbish(model):
    with served(model) as (_, port):
        body = json.dumps({"inputs": texts(32, 60)}).encode()
        head = b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        for sent in (head + body, head + body[:20], head, b"rubbish\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b""):
            with socket.create_connection(("127.0.0.1", port), 60) as connection:
                connection.sendall(sent)
        # One after the other on one connection: an error does not end it.
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        statuses = []
        for given in (b"{", b'{"inputs": "a dog"}', b'{"inputs": []}', b'{"inputs": "a cat"}'):
            connection.request("POST", "/embed", given)
            answer = connection.getresponse()
            answer.read()
            statuses.append(answer.status)
        connection.close()
        assert statuses == [400, 200, 400, 200]
        assert page(port, "/health") == ""


def test_the_api_key_comes_from_the_environment_too(model):
    with served(model, FASTBERT_API_KEY="secret") as (_, port):
        assert post(port, {"inputs": "a"})[0] == 401
        assert post(port, {"inputs": "a"}, authorization="Bearer secret")[0] == 200
        refused = post(port, {"input": "a"}, "/v1/embeddings")
        assert refused[0] == 401 and refused[1]["error"]["code"] == "unauthorized"


def test_errors_before_anything_is_loaded(model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "Address already in use" in fails("serve", model, "--port", taken.getsockname()[1])
    assert "'70000' is no port" in fails("serve", model, "--port", 70000)
    assert "is not a folder" in fails("serve", model / "nothing", "--port", 0)
    assert "the API key is empty" in fails("serve", model, "--api-key", "")
    assert "printable ASCII" in fails("serve", model, "--api-key", "a\nb")
    assert "192.0.2.99:" in fails("serve", model, "--host", "192.0.2.99", "--port", 0)  # not of this machine
    assert "unrecognized arguments: --trust-remote-code" in fails("serve", model, "--trust-remote-code")
    assert "'0' is not a whole number of at least 1" in fails("serve", model, "--timeout", 0)
    assert "invalid choice: 'float64'" in fails("serve", model, "--dtype", "float64")
    assert "device 'tpu'" in fails("serve", model, "--device", "tpu", "--port", 0)


def test_a_models_own_code_is_not_run(tmp_path):
    model = tiny.write_model(tmp_path / "model")
    (model / "modeling_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    tiny.edit_config(model, model_type="own", auto_map={"AutoModel": "modeling_own.Own"}, architectures=["Own"])
    assert "'own'" in fails("serve", model, "--port", 0)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "host,key,said",
    (
        ("0.0.0.0", None, ["all clients that reach 0.0.0.0 may use this server: it asks for no API key"]),
        ("0.0.0.0", "secret", []),
        ("127.0.0.1", None, []),
    ),
)
def test_an_open_door_is_told(tmp_path, host, key, said):
    lines: list[str] = []
    with pytest.raises(CheckpointError, match="is not a folder"):
        serve(str(tmp_path / "nothing"), host=host, port=0, api_key=key, limits=Limits(), say=lines.append)
    assert lines == said


def test_what_stays_is_not_looked_through_for_garbage(tmp_path, monkeypatch):
    """Each look took 0.1 s, of all requests. It is over when the server is: `serve` is a function, too."""
    done: list[str] = []
    for place, name in ((gc, "freeze"), (gc, "unfreeze"), (Uvicorn, "run")):
        monkeypatch.setattr(place, name, lambda *args, name=name, **options: done.append(name))
    serve(str(tiny.write_model(tmp_path)), host="127.0.0.1", port=0, limits=Limits(), say=print)
    assert done[-3:] == ["freeze", "run", "unfreeze"]


def test_without_the_extra_one_line_says_what_to_install(model):
    done = run_python(command_without(["fastapi"], "serve", model))
    assert done.returncode == 2
    assert done.stderr == "fastbert: error: serve needs fastapi: pip install -e '.[serve]' in a clone of fastbert\n"
