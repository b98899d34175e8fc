"""What a team typically writes to serve translation with a library: FastAPI, and batches of requests that arrive within
milliseconds.

    python -m benchmarks.serving.service transformers FOLDER --wait-ms 20 --port 8001

A batch has up to 16 sentences, padded to the longest, and waits at most this long for others. One batch runs at a time,
in a thread. Nothing here is FastGen's.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import uvicorn
from fastapi import FastAPI

MOST = 16
BEAMS = 4
MOST_TOKENS = 120
Translate = Callable[[Sequence[str]], list[str]]


def over_transformers(folder: str) -> Translate:
    """Translates with `generate`."""
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def translate(texts: Sequence[str]) -> list[str]:
        inputs = tokenizer(list(texts), padding=True, return_tensors="pt")
        with torch.inference_mode():
            made = model.generate(**inputs, num_beams=BEAMS, do_sample=False, max_new_tokens=MOST_TOKENS)
        return tokenizer.batch_decode(made, skip_special_tokens=True)

    return translate


def over_ctranslate2(folder: str) -> Translate:
    """Translates with CTranslate2, on its conversion of the model (`translation.convert`), in float32."""
    import ctranslate2
    import torch
    from transformers import AutoTokenizer

    translator = ctranslate2.Translator(
        f"{folder}/ctranslate2", device="cpu", compute_type="float32", intra_threads=torch.get_num_threads()
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def translate(texts: Sequence[str]) -> list[str]:
        tokens = [list(map(str, ids)) for ids in tokenizer(list(texts))["input_ids"]]
        made = translator.translate_batch(tokens, beam_size=BEAMS, max_decoding_length=MOST_TOKENS, max_batch_size=MOST)
        ids = [list(map(int, result.hypotheses[0])) for result in made]
        return tokenizer.batch_decode(ids, skip_special_tokens=True)

    return translate


class _Waiting(NamedTuple):
    """A sentence, how long it waits for others, in the loop's time, and the future of its translation."""

    text: str
    until: float
    future: asyncio.Future[str]


class Batches:
    """Batches the sentences that arrive within `wait` seconds, up to 16."""

    def __init__(self, translate: Translate, wait: float) -> None:
        self._translate, self._wait = translate, wait
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue()

    async def ask(self, text: str) -> str:
        loop = asyncio.get_running_loop()
        waiting = _Waiting(text, loop.time() + self._wait, loop.create_future())
        await self._queue.put(waiting)
        return await waiting.future

    async def run(self) -> None:
        while True:
            batch = [await self._queue.get()]
            try:
                async with asyncio.timeout_at(batch[0].until):
                    while len(batch) < MOST:
                        batch.append(await self._queue.get())
            except TimeoutError:
                while len(batch) < MOST and not self._queue.empty():
                    batch.append(self._queue.get_nowait())
            made = await asyncio.to_thread(self._translate, [each.text for each in batch])
            for waiting, text in zip(batch, made, strict=True):
                if not waiting.future.done():
                    waiting.future.set_result(text)


def create_app(translate: Translate, wait: float) -> FastAPI:
    batches = Batches(translate, wait)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(batches.run())
        yield
        task.cancel()

    app = FastAPI(lifespan=lifespan)

    @app.get("/ready")
    async def ready() -> dict[str, bool]:
        return {"ready": True}

    @app.post("/translate")
    async def answer(asked: dict[str, str]) -> dict[str, Any]:
        return {"text": await batches.ask(asked["text"])}

    return app


KINDS = {"transformers": over_transformers, "ctranslate2": over_ctranslate2}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.service")
    parser.add_argument("kind", choices=list(KINDS))
    parser.add_argument("folder")
    parser.add_argument("--wait-ms", type=int, default=20)
    parser.add_argument("--port", type=int, default=8001)
    words = parser.parse_args()
    app = create_app(KINDS[words.kind](words.folder), words.wait_ms / 1000)
    uvicorn.run(app, host="127.0.0.1", port=words.port, log_level="warning", access_log=False)
