"""What a server's operator needs: a line a request and its id, web pages' origins, TLS, a root path, /docs."""

from __future__ import annotations

import json
import re
import signal
import ssl
import urllib.request

import asgi
import certificate
import pytest
import tiny
import warm
from command_line import ENVIRONMENT, command_without, fails
from test_connections import GET, POST, running, statuses, talk
from test_routes import Held, app, send

from fastbert.serve.app import Limits, make_app
from fastbert.serve.engine import load_engine
from fastbert.serve.logs.access_log import RequestLog
from fastbert.serve.run import Web

pytestmark = pytest.mark.dear_to_set_up
ORIGIN = "https://a.page"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_model(tmp_path_factory.mktemp("operated") / "model")


@pytest.fixture(scope="module")
def engine(folder):
    return load_engine(str(folder), "auto", "cpu")


def logged(engine, form, *requests, **options):
    """The lines of some requests, and their answers."""
    lines: list[str] = []

    async def program(client):
        client.app = RequestLog(client.app, form, lines.append)
        return [await client.send(path, content, **sent) for path, content, sent in requests]

    return lines, asgi.run(app(engine, **options), program)


def test_a_line_a_request_with_the_id_that_the_client_gets(engine):
    requests = (
        ("/embed", {"inputs": "a dog"}, {}),
        ("/embed", {"inputs": 3}, {"headers": {"x-request-id": "abc.1-2"}}),
        ("/nowhere\n{}", None, {"method": "GET", "headers": {"x-request-id": "two\nlines"}}),
        ("/embed", {"inputs": "a"}, {"headers": {"content-length": "9999999"}}),
        ("/" + "é" * 10_000, None, {"method": "GET"}),
    )
    lines, answers = logged(engine, "json", *requests)
    found = [json.loads(line) for line in lines]
    assert [one["status"] for one in found] == [200, 422, 404, 413, 404] == [answer.status for answer in answers]
    assert [one["id"] for one in found] == [answer.headers["x-request-id"] for answer in answers]
    assert found[1]["id"] == "abc.1-2" and len({one["id"] for one in found}) == 5
    assert all(re.fullmatch("[0-9a-f]{32}", one["id"]) for one in (found[0], found[2]))
    assert found[0].keys() == {"time", "id", "client", "method", "path", "status", "bytes", "seconds"}
    assert (found[0]["method"], found[0]["path"], found[0]["client"]) == ("POST", "/embed", "test")
    assert found[0]["bytes"] == len(answers[0].body) and 0 < found[0]["seconds"] < 60
    assert (found[1]["kind"], found[1]["error"]) == ("validation", answers[1].json["error"])
    assert found[2]["path"] == "/nowhere%0A%7B%7D" and found[3]["kind"] == "too_large"
    assert len(lines[4]) < 3000 and found[4]["error"] == answers[4].json["error"]
    text, _ = logged(engine, "text", *requests)
    assert [line.split(" ")[3:6] for line in text][:2] == [["POST", "/embed", "200"], ["POST", "/embed", "422"]]
    assert all("\n" not in line for line in (*lines, *text))
    assert text[1].endswith('validation "inputs: it is a number; it must be a text or a list of texts"')


def test_without_an_access_log_errors_have_their_line(engine):
    held = Held(engine, fails=True)
    held.gate.set()
    good, bad = ("/embed", {"inputs": "a"}, {}), ("/embed", {}, {})
    lines, answers = logged(held, None, good, good, bad, ("/health", None, {"method": "GET"}))
    assert [answer.status for answer in answers] == [424, 200, 422, 200]
    assert all("x-request-id" in answer.headers for answer in answers)
    assert [line.split(" ")[5] for line in lines] == ["424", "422"] and "no room" in lines[0]


def test_a_fault_of_our_own_has_the_form_of_other_errors(engine, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr("fastbert.serve.app.encoded", lambda *args: [][0])

    async def program(client):
        inner = RequestLog(client.app, None, lines.append)

        async def caught(*asked):
            with pytest.raises(IndexError):  # uvicorn prints it
                await inner(*asked)

        client.app = caught
        return await client.send("/embed", {"inputs": "a dog"})

    answer = asgi.run(app(engine), program)
    assert (answer.status, answer.json["error_type"]) == (500, "internal")
    assert re.fullmatch(r"wait;.*, compute;dur=\d+\.\d", answer.headers["server-timing"])
    assert answer.headers["x-request-id"] in lines[0] and lines[0].endswith(f'internal "{answer.json["error"]}"')


def cors(engine, origins, method, path, content=None, **headers):
    made = make_app(engine, Limits(), "secret", batch_tokens=64, workers=1, threads=1, cors_origins=origins)
    return asgi.run(made, lambda client: client.send(path, content, method=method, headers=headers))


def test_web_pages_of_the_origins_that_are_named(engine):
    asks = {
        "origin": ORIGIN,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    allowed = cors(engine, [ORIGIN], "OPTIONS", "/embed", **asks)
    assert allowed.status == 200 and allowed.headers["access-control-allow-origin"] == ORIGIN
    key = {"authorization": "Bearer secret"}
    answer = cors(engine, [ORIGIN], "POST", "/embed", {"inputs": "a"}, origin=ORIGIN, **key)
    assert answer.status == 200 and answer.headers["access-control-allow-origin"] == ORIGIN
    refused = cors(engine, [ORIGIN], "POST", "/embed", {"inputs": "a"}, origin=ORIGIN)
    assert refused.status == 401 and refused.headers["access-control-allow-origin"] == ORIGIN  # the page reads why
    other = cors(engine, [ORIGIN], "OPTIONS", "/embed", **{**asks, "origin": "https://other.page"})
    assert other.status == 400 and "access-control-allow-origin" not in other.headers
    nobody = cors(engine, [], "OPTIONS", "/embed", **asks)
    assert nobody.status in (401, 405) and "access-control-allow-origin" not in nobody.headers


def test_below_a_root_path(engine):
    """As behind a proxy that takes /api off the paths: routes, public ones, forms of errors, the schema's address."""
    made = make_app(engine, Limits(), "secret", batch_tokens=64, workers=1, threads=1)
    with running(made, 100, web=Web(root_path="/api")) as port:
        for sent, status in (
            (GET, 200),
            (GET.replace(b"/health", b"/info"), 401),
            (POST, 401),
            (POST.replace(b"host: x", b"host: x\r\nauthorization: bearer secret"), 200),
        ):
            assert statuses(talk(port, sent)) == [status]
        assert b'{"error":{"message"' in talk(port, POST.replace(b"/embed", b"/v1/embeddings"))
        assert b"'/api/openapi.json'" in talk(port, GET.replace(b"/health", b"/docs"))
        schema = json.loads(talk(port, GET.replace(b"/health", b"/openapi.json")).partition(b"\r\n\r\n")[2])
    assert schema["servers"] == [{"url": "/api"}]
    assert set(schema["paths"]) >= {"/embed", "/v1/embeddings", "/similarity", "/tokenize", "/health"}
    assert "/rerank" not in schema["paths"] and schema["security"] == [{"key": []}]
    responses = schema["paths"]["/embed"]["post"]["responses"]
    assert set(responses) == {"200", "400", "401", "408", "413", "415", "422", "424", "429", "503"}


def test_tls_and_the_lines_of_a_process(folder, tmp_path):
    files = [tmp_path / "certificate.pem", tmp_path / "key.pem"]
    files[0].write_text(certificate.CERTIFICATE)
    files[1].write_text(certificate.KEY)
    words = ("serve", folder, "--device", "cpu", "--port", 0, "--access-log", "json")
    words = (*words, "--ssl-certfile", files[0], "--ssl-keyfile", files[1])
    process = warm.Process(command_without((), *words), env=ENVIRONMENT)
    try:
        line = process.stderr.readline()
        port = int(re.search(r"at https://127\.0\.0\.1:(\d+), described at https:", line)[1])
        context = ssl.create_default_context(cadata=certificate.CERTIFICATE)
        body = json.dumps({"inputs": "a dog"}).encode()
        asked = urllib.request.Request(f"https://127.0.0.1:{port}/embed", body, {"content-type": "application/json"})
        with urllib.request.urlopen(asked, context=context, timeout=60) as answer:
            assert len(json.load(answer)[0]) == 32
            own = answer.headers["x-request-id"]
        assert talk(port, POST) == b""  # no TLS: closed
        with urllib.request.urlopen(f"https://127.0.0.1:{port}/health", context=context, timeout=60) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, stderr) == (0, "fastbert: stopped: answered 1, refused 0\n")
    found = [json.loads(line) for line in stdout.splitlines()]
    assert [(one["path"], one["status"]) for one in found] == [("/embed", 200), ("/health", 200)]
    assert found[0]["id"] == own


def test_options_that_cannot_be(folder, tmp_path):
    for name, text in (("certificate.pem", certificate.CERTIFICATE), ("rubbish.pem", "rubbish")):
        (tmp_path / name).write_text(text)
    for words, said in (
        (("--ssl-keyfile", "key.pem"), "--ssl-keyfile is the key of --ssl-certfile, which is not given"),
        (("--ssl-certfile", tmp_path / "nothing.pem"), "nothing.pem"),
        (("--ssl-certfile", tmp_path / "rubbish.pem"), "rubbish.pem: no certificate with a key"),
        (("--ssl-certfile", tmp_path / "certificate.pem"), "certificate.pem: no certificate with a key"),
        (("--cors-origin", "a.page"), "'a.page' is no origin"),
        (("--cors-origin", "https://a.page/"), "'https://a.page/' is no origin"),
        (("--root-path", "api"), "'api' is no root path"),
        (("--root-path", "/"), "'/' is no root path"),
        (("--access-log", "xml"), "invalid choice: 'xml'"),
    ):
        assert said in fails("serve", folder, "--port", 0, *words)


def test_docs_is_a_page_that_reads_the_schema(engine):
    page = send(engine, "/docs", method="GET")
    assert page.headers["content-type"].startswith("text/html") and b"'/openapi.json'" in page.body
