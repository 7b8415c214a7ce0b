"""`fastbert serve`: a model behind HTTP."""

from __future__ import annotations

import argparse
import os
import re
from functools import partial
from typing import Any

from fastbert.cli.parser import UsageError, add_command, add_model, dtype_name, positive
from fastbert.cli.stopping import raise_if_stopped, say
from fastbert.messages import install

LOCAL, PORT, API_KEY = "127.0.0.1", 8080, "FASTBERT_API_KEY"


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "serve",
        run,
        "serve a model over HTTP: vectors, reranking, classification",
        """
        Serves MODEL over HTTP, with OpenAI's route /v1/embeddings and the routes of text-embeddings-inference: /embed,
        /rerank, /predict, /info, /health and /metrics. Requests that arrive together are computed together.
        /openapi.json describes the routes.
        """,
        "fastbert serve all-MiniLM-L6-v2\n"
        "  curl localhost:8080/embed -H 'content-type: application/json' -d '{\"inputs\": \"a text\"}'",
    )
    add_model(parser)
    add_computing(parser)
    add_limits(parser)
    add_http(parser)


def add_computing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--served-model-name", metavar="NAME", help="what clients call the model (default: MODEL)")
    parser.add_argument(
        "--dtype",
        type=dtype_name,
        choices=("auto", "float32", "bfloat16", "float16", "int8"),
        default="auto",
        help="the number format to compute in; auto (the default) is the model's own",
    )
    parser.add_argument("--device", metavar="D", help="cpu, cuda or cuda:1; by default a GPU if there is one")
    parser.add_argument(
        "--threads",
        metavar="N",
        type=positive,
        help="threads that compute (default: one for each core that the process may use)",
    )
    parser.add_argument("--auto-truncate", action="store_true", help="cut long texts where a request does not say")


def add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-batch-tokens", metavar="N", type=positive, help="how many tokens are computed at a time, at most"
    )
    parser.add_argument(
        "--max-concurrent-requests",
        metavar="N",
        type=positive,
        default=512,
        help="how many requests may wait or run; more are refused with status 429 (default 512)",
    )
    parser.add_argument(
        "--max-client-batch-size",
        metavar="N",
        type=positive,
        default=32,
        help="how many texts a request may have (default 32)",
    )
    parser.add_argument(
        "--max-request-tokens",
        metavar="N",
        type=positive,
        default=300_000,
        help="how many tokens the texts of a request may have together (default 300,000)",
    )
    parser.add_argument(
        "--payload-limit",
        metavar="BYTES",
        type=positive,
        default=2_000_000,
        help="how many bytes the body of a request may have (default 2,000,000)",
    )
    parser.add_argument(
        "--timeout", metavar="S", type=positive, default=60, help="seconds that a request may take (default 60)"
    )


def add_http(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default=LOCAL, help=f"the address to listen at (default {LOCAL}: this machine only)")
    parser.add_argument(
        "--port", type=port, default=PORT, help=f"the port to listen at (default {PORT}); 0: a free one"
    )
    parser.add_argument(
        "--access-log", choices=("text", "json"), help="a line on stdout for each request, not for errors alone"
    )
    parser.add_argument(
        "--cors-origin",
        metavar="ORIGIN",
        type=origin,
        action="append",
        default=[],
        dest="cors_origins",
        help="whose web pages may use the server, such as https://example.org, or *; may stand several times",
    )
    parser.add_argument(
        "--root-path",
        metavar="PATH",
        type=root_path,
        help="the beginning of the path that a proxy in front takes off, such as /models",
    )
    parser.add_argument("--ssl-certfile", metavar="FILE", help="serve by TLS, with this certificate in PEM")
    parser.add_argument("--ssl-keyfile", metavar="FILE", help="its key, if that is in a file of its own")
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"what clients must send as `Authorization: Bearer KEY`; rather set {API_KEY}, which `ps` does not show",
    )


def port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: a number from 0 to 65535")
    return int(text)


def origin(text: str) -> str:
    if not re.fullmatch(r"\*|https?://[^/\s?#@]+", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no origin: https://, a host and perhaps a port, and no path; or *"
        )
    return text


def root_path(text: str) -> str:
    if not re.fullmatch(r"(/[\w.~-]+)+", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is no root path: it begins with / and does not end with it")
    return text


def run(options: argparse.Namespace) -> int:
    try:
        from fastbert.serve.limits import Limits
        from fastbert.serve.logs.access_log import lost
        from fastbert.serve.logs.lines import Lines
        from fastbert.serve.run import Web, serve
    except ImportError as error:
        if error.name is None or error.name.startswith("fastbert"):
            raise
        raise UsageError(f"serve needs {error.name}: {install('serve')}") from None

    raise_if_stopped()
    api_key = options.api_key if options.api_key is not None else os.environ.get(API_KEY)
    if api_key == "":
        raise UsageError(f"the API key is empty; without --api-key and {API_KEY} none is asked for")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key == api_key.strip()):
        raise UsageError("the API key must consist of printable ASCII characters: it is sent in a header")
    if options.ssl_keyfile is not None and options.ssl_certfile is None:
        raise UsageError("--ssl-keyfile is the key of --ssl-certfile, which is not given")
    limits = Limits(
        max_concurrent_requests=options.max_concurrent_requests,
        max_client_batch_size=options.max_client_batch_size,
        max_request_tokens=options.max_request_tokens,
        payload_limit=options.payload_limit,
        timeout_s=float(options.timeout),
        auto_truncate=options.auto_truncate,
    )
    with Lines(1, partial(lost, options.access_log)) as log:
        serve(
            options.model,
            served_name=options.served_model_name,
            host=options.host,
            port=options.port,
            dtype=options.dtype,
            device=options.device,
            batch_tokens=options.max_batch_tokens,
            threads=options.threads,
            api_key=api_key,
            limits=limits,
            web=Web(
                root_path=options.root_path or "",
                certfile=options.ssl_certfile,
                keyfile=options.ssl_keyfile,
                cors_origins=options.cors_origins,
                access_log=options.access_log,
            ),
            say=say,
            log=log.write,
        )
    return 0
