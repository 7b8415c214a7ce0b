"""Who tokenises for whom: texts by their size, results beside them, and what is left when clients have gone."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from functools import partial

import pytest
import tiny

from fastbert.native import memory
from fastbert.serve import app as app_module
from fastbert.serve import run, tokenizing
from fastbert.serve.app import make_app
from fastbert.serve.engine import load_engine
from fastbert.serve.limits import Limits
from fastbert.serve.tokenizing import INLINE, LARGE, Tokenizing

SIZES = pytest.mark.parametrize("size", (INLINE + 1, LARGE + 1), ids=("middle", "large"))


@SIZES
def test_a_flood_of_texts_does_not_hold_up_results(size):
    gate = threading.Event()

    async def program():
        runner = Tokenizing()
        texts = [asyncio.ensure_future(runner.run(lambda: gate.wait(60), ["a" * size], 60)) for _ in range(40)]
        await asyncio.sleep(0)
        try:
            return await asyncio.wait_for(asyncio.to_thread(lambda: "result"), 5), len(texts)
        finally:
            gate.set()
            assert all(made for made, _ in await asyncio.gather(*texts))

    assert asyncio.run(program()) == ("result", 40)


class Texts:
    """What a request holds."""

    def tokens(self, started: threading.Event, gate: threading.Event) -> int:
        started.set()
        return 3 if gate.wait(60) else 0


@SIZES
def test_who_has_gone_leaves_no_texts_behind(size, monkeypatch):
    monkeypatch.setattr(tokenizing, "MIDDLE_THREADS", 1)
    gate, started = threading.Event(), threading.Event()

    async def program():
        runner = Tokenizing()

        def ask(timeout_s: float = 60):
            texts = Texts()
            making = runner.run(partial(texts.tokens, started, gate), ["a" * size], timeout_s)
            return asyncio.ensure_future(making), weakref.ref(texts)

        first, _ = ask()
        assert await asyncio.to_thread(started.wait, 60)
        gone, late, last = [ask() for _ in range(5)], ask(0.01), ask()
        await asyncio.sleep(0)
        first.cancel()  # its thread goes on, and no other begins beside it
        for request, _ in gone:
            request.cancel()
        await asyncio.wait([first, late[0], *(request for request, _ in gone)])
        assert first.cancelled() and isinstance(late[0].exception(), TimeoutError)
        left = [texts for _, texts in (*gone, late)]
        del gone, late, request
        gc.collect()
        assert [texts() is None for texts in left] == [True] * 6
        gate.set()
        return (await last[0])[0]

    assert asyncio.run(program()) == 3


def test_memory_goes_back_after_what_is_large(monkeypatch):
    """And after nothing else: computing would have to ask for its own again, which took a tenth of the throughput."""
    given_back = []
    monkeypatch.setattr(memory, "_trim", given_back.append)

    def refuse():
        raise ValueError

    async def program():
        runner = Tokenizing()
        for size, times in ((INLINE, 0), (LARGE, 0), (LARGE + 1, 1)):
            await runner.run(lambda: 3, ["a" * size], 60)
            assert len(given_back) == times, size
        with pytest.raises(ValueError):
            await runner.run(refuse, ["a" * (LARGE + 1)], 60)

    asyncio.run(program())
    assert len(given_back) == 2


def test_memory_goes_back_now_and_then(tmp_path, monkeypatch):
    """As long as the application runs, and not behind it."""
    given_back = []
    engine = load_engine(str(tiny.write_model(tmp_path)), "float32", "cpu")
    monkeypatch.setattr(memory, "_trim", given_back.append)
    monkeypatch.setattr(app_module, "GIVE_BACK_S", 0.01)
    app = make_app(engine, Limits(), batch_tokens=64, workers=1, threads=1)

    async def program():
        async with app.router.lifespan_context(app):
            while len(given_back) < 3:
                await asyncio.sleep(0.01)
        count = len(given_back)
        await asyncio.sleep(0.05)
        assert len(given_back) == count

    asyncio.run(asyncio.wait_for(program(), 60))


def test_the_allocator_is_told_before_a_model_is_loaded(monkeypatch):
    """With the values of glibc's malloc.h."""
    told = []

    def load(*_):
        raise LookupError(*told)

    monkeypatch.setattr(memory, "_mallopt", lambda *given: told.append(given))
    monkeypatch.setattr(run, "load_engine", load)
    with pytest.raises(LookupError) as raised:
        run.serve("a model", host="127.0.0.1", port=0, limits=Limits(), say=print)
    assert raised.value.args == ((-8, 2), (-3, 1 << 20))
