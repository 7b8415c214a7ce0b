"""Other people's clients against `fastbert serve`, each with its own package: the table of docs/serve.md.

    python -m venv clients && clients/bin/python -m pip install -r tests/ecosystem/serve_clients.txt
    python tests/ecosystem/serve_clients.py clients/bin/python [PACKAGE ...]    # all of them, or some

The servers are of this checkout, with random models; the Python that is given runs the clients. What they make of the
answers is compared with what the routes of text-embeddings-inference answer to a plain request. Prints the table, and
leaves with 1 where a client fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODELS = {  # the head of each kind, and its fields
    "embedding": ("Model", {}),
    "reranker": ("SequenceClassification", {"num_labels": 1}),
    "classifier": ("SequenceClassification", {"num_labels": 3}),
    "token-classifier": ("TokenClassification", {"num_labels": 3, "id2label": {0: "O", 1: "B-PER", 2: "I-PER"}}),
    "question-answerer": ("QuestionAnswering", {"num_labels": 2}),
}
TEXTS = ["the cat sat on the mat.", "a dog", "who ran in to the old house?"]
QUERY = "who sat?"
NAME = "tiny"  # what all of the models are served as
CLIENTS: list[tuple[str, str, str, str, Callable[[str], None]]] = []  # package, call, kind of model, route, program


def client(package: str, call: str, kind: str, route: str) -> Callable:
    def add(program: Callable[[str], None]) -> Callable[[str], None]:
        CLIENTS.append((package, call, kind, route, program))
        return program

    return add


def post(url: str, path: str, **content: Any) -> Any:
    asked = urllib.request.Request(url + path, json.dumps(content).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return json.load(answer)


def same(found: Any, expected: Any) -> None:
    import numpy as np

    np.testing.assert_allclose(np.float32(found), np.float32(expected), rtol=1e-5, atol=1e-6)


def vectors(url: str, texts: list[str] = TEXTS) -> Any:
    return post(url, "/embed", inputs=texts)


def ranked(url: str) -> list[tuple[int, float]]:
    return [(one["index"], one["score"]) for one in post(url, "/rerank", query=QUERY, texts=TEXTS)]


def same_ranks(found: list[tuple[int, float]], expected: list[tuple[int, float]]) -> None:
    assert [i for i, _ in found] == [i for i, _ in expected], (found, expected)
    same([score for _, score in found], [score for _, score in expected])


@client("openai", "embeddings.create", "embedding", "/v1/embeddings")
def _(url: str) -> None:
    import openai

    ours = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    for given in ({}, {"encoding_format": "float"}):  # base64, which it decodes itself, and numbers
        made = ours.embeddings.create(model=NAME, input=TEXTS, **given)
        same([one.embedding for one in made.data], vectors(url))
    many = ours.embeddings.create(model=NAME, input=["a dog"] * 2048)
    assert len(many.data) == 2048 and many.usage.total_tokens == 4 * 2048
    assert len(ours.embeddings.create(model=NAME, input=TEXTS, dimensions=5).data[0].embedding) == 5


@client("openai", "embeddings.create of token ids", "embedding", "/v1/embeddings")
def _(url: str) -> None:
    import openai

    ours = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    ids = [[one["id"] for one in row] for row in post(url, "/tokenize", inputs=TEXTS, add_special_tokens=False)]
    same([one.embedding for one in ours.embeddings.create(model=NAME, input=ids).data], vectors(url))
    same([one.embedding for one in ours.embeddings.create(model=NAME, input=ids[0]).data], vectors(url, TEXTS[:1]))


@client("openai", "models.list, models.retrieve, errors", "embedding", "/v1/models")
def _(url: str) -> None:
    import openai

    ours = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    assert [one.id for one in ours.models.list()] == [NAME] and ours.models.retrieve(NAME).id == NAME
    with contextlib.suppress(openai.NotFoundError):
        raise AssertionError(ours.models.retrieve("other"))
    with contextlib.suppress(openai.BadRequestError):
        raise AssertionError(ours.embeddings.create(model=NAME, input="a " * 999))


@client("huggingface_hub", "feature_extraction", "embedding", "/, /embed")
def _(url: str) -> None:
    from huggingface_hub import InferenceClient

    for path in ("", "/embed"):
        same(InferenceClient(url + path).feature_extraction(TEXTS), vectors(url))
        cut = InferenceClient(url + path).feature_extraction("a " * 999, truncate=True, truncation_direction="left")
        assert cut.shape == (1, 32)


@client("huggingface_hub", "sentence_similarity", "embedding", "/, /similarity")
def _(url: str) -> None:
    from huggingface_hub import InferenceClient

    first, *others = vectors(url)
    for path in ("", "/similarity"):
        found = InferenceClient(url + path).sentence_similarity(TEXTS[0], TEXTS[1:])
        same(found, [sum(a * b for a, b in zip(first, other, strict=True)) for other in others])


@client("huggingface_hub", "text_classification", "classifier", "/, /predict")
def _(url: str) -> None:
    from huggingface_hub import InferenceClient

    expected = post(url, "/predict", inputs=TEXTS[0])
    for path in ("", "/predict"):
        found = InferenceClient(url + path).text_classification(TEXTS[0])
        assert [one.label for one in found] == [one["label"] for one in expected]
        same([one.score for one in found], [one["score"] for one in expected])


@client("huggingface_hub", "token_classification", "token-classifier", "/, /entities")
def _(url: str) -> None:
    from huggingface_hub import InferenceClient

    expected = post(url, "/entities", inputs=TEXTS[0])[0]
    for path in ("", "/entities"):
        found = InferenceClient(url + path).token_classification(TEXTS[0])
        assert [(one.entity_group, one.word, one.start, one.end) for one in found] == [
            (one["label"], one["text"], one["start"], one["end"]) for one in expected
        ]
    assert expected


@client("huggingface_hub", "question_answering", "question-answerer", "/, /answers")
def _(url: str) -> None:
    from huggingface_hub import InferenceClient

    expected = post(url, "/answers", inputs={"question": QUERY, "context": TEXTS[0]})[0]
    for path in ("", "/answers"):
        found = InferenceClient(url + path).question_answering(question=QUERY, context=TEXTS[0])
        assert (found.answer, found.start, found.end) == (expected["answer"], expected["start"], expected["end"])


@client("langchain-openai", "OpenAIEmbeddings(check_embedding_ctx_length=False)", "embedding", "/v1/embeddings")
def _(url: str) -> None:
    from langchain_openai import OpenAIEmbeddings

    ours = OpenAIEmbeddings(model=NAME, base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False)
    same(ours.embed_documents(TEXTS), vectors(url))
    same(ours.embed_query(TEXTS[0]), vectors(url)[0])


@client("litellm", "embedding", "embedding", "/v1/embeddings")
def _(url: str) -> None:
    import litellm

    found = litellm.embedding(model=f"openai/{NAME}", input=TEXTS, api_base=f"{url}/v1", api_key="none")
    same([one["embedding"] for one in found.data], vectors(url))


@client("litellm", "rerank (cohere, jina_ai)", "reranker", "/v1/rerank")
def _(url: str) -> None:
    import litellm

    for provider in ("cohere", "jina_ai"):
        found = litellm.rerank(
            model=f"{provider}/{NAME}", query=QUERY, documents=TEXTS, top_n=2, api_base=url, api_key="none"
        )
        same_ranks([(one["index"], one["relevance_score"]) for one in found.results], ranked(url)[:2])


@client("cohere", "Client.rerank, ClientV2.rerank", "reranker", "/v1/rerank, /v2/rerank")
def _(url: str) -> None:
    import cohere

    for kind in (cohere.Client, cohere.ClientV2):
        found = kind(api_key="none", base_url=url).rerank(model=NAME, query=QUERY, documents=TEXTS, top_n=2)
        same_ranks([(one.index, one.relevance_score) for one in found.results], ranked(url)[:2])


@client("llama-index-embeddings-openai-like", "OpenAILikeEmbedding", "embedding", "/v1/embeddings")
def _(url: str) -> None:
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    ours = OpenAILikeEmbedding(model_name=NAME, api_base=f"{url}/v1", api_key="none")
    same(ours.get_text_embedding_batch(TEXTS), vectors(url))


@client("llama-index-embeddings-text-embeddings-inference", "TextEmbeddingsInference", "embedding", "/embed")
def _(url: str) -> None:
    from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

    same(TextEmbeddingsInference(model_name=NAME, base_url=url).get_text_embedding_batch(TEXTS), vectors(url))


def _rerank_nodes(postprocessor: Any, url: str) -> None:
    from llama_index.core.schema import NodeWithScore, TextNode

    nodes = [NodeWithScore(node=TextNode(text=text, id_=str(i)), score=0.0) for i, text in enumerate(TEXTS)]
    found = postprocessor.postprocess_nodes(nodes, query_str=QUERY)
    same_ranks([(int(one.node.node_id), one.score) for one in found], ranked(url)[:2])


@client("llama-index-postprocessor-tei-rerank", "TextEmbeddingInference", "reranker", "/rerank")
def _(url: str) -> None:
    from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

    _rerank_nodes(TextEmbeddingInference(base_url=url, top_n=2), url)


@client("llama-index-postprocessor-cohere-rerank", "CohereRerank", "reranker", "/v2/rerank")
def _(url: str) -> None:
    from llama_index.postprocessor.cohere_rerank import CohereRerank

    _rerank_nodes(CohereRerank(base_url=url, api_key="none", model=NAME, top_n=2), url)


@client("llama-index-postprocessor-jinaai-rerank", "JinaRerank", "reranker", "/v1/rerank")
def _(url: str) -> None:
    from llama_index.postprocessor.jinaai_rerank import JinaRerank

    _rerank_nodes(JinaRerank(base_url=f"{url}/v1", api_key="none", model=NAME, top_n=2), url)


def run_clients(addresses: dict[str, str], packages: list[str]) -> int:
    """Inside of the Python that has the clients."""
    print("| client | call | model | routes | |\n|---|---|---|---|---|")
    failed = 0
    for package, call, kind, route, program in CLIENTS:
        if packages and package not in packages:
            continue
        try:
            program(addresses[kind])
            result = "as it should be"
        except Exception as error:
            traceback.print_exc()
            failed, result = failed + 1, f"{type(error).__name__}: {error}".splitlines()[0]
        print(f"| {package} {version(package)} | {call} | {kind} | {route} | {result} |", flush=True)
    return 1 if failed else 0


@contextlib.contextmanager
def servers(models: Mapping[str, tuple[str, dict]], *options: str) -> Iterator[dict[str, str]]:
    """The address of a server of this checkout for each kind of model, tiny and random."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]
    import tiny

    with tempfile.TemporaryDirectory() as root, contextlib.ExitStack() as stack:
        addresses = {}
        for kind, (head, fields) in models.items():
            folder = tiny.write_model(Path(root) / kind, head=head, **fields)
            if kind == "sparse":
                tiny.write_modules(folder, "SpladePooling")
                tiny.write_json(folder / "1_SpladePooling/config.json", {"pooling_strategy": "max"})
            words = [sys.executable, "-m", "fastbert", "serve", str(folder), "--port", "0", "--device", "cpu"]
            words += ["--served-model-name", NAME, *options]
            pipes: Any = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
            process = stack.enter_context(subprocess.Popen(words, cwd=ROOT, **pipes))
            stack.callback(process.terminate)
            assert process.stderr is not None
            line = process.stderr.readline()
            found = re.search(r"at (http://\S+), described", line)
            assert found is not None, line
            addresses[kind] = found[1]
        yield addresses


def serve_and_run(python: str, packages: list[str]) -> int:
    """In this checkout: the servers, and then the clients."""
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    with servers(MODELS) as addresses:
        words = [python, __file__, "--inside", json.dumps(addresses), *packages]
        return subprocess.run(words, env=environment).returncode


if __name__ == "__main__":
    if sys.argv[1] == "--inside":
        sys.exit(run_clients(json.loads(sys.argv[2]), sys.argv[3:]))
    sys.exit(serve_and_run(sys.argv[1], sys.argv[2:]))
