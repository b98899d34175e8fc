"""Translation: opus-mt's shape, 4 beams, sentences of 5 to 60 tokens, 16 clients.

`fastgen-serve` against a service of FastAPI that batches up to 16 sentences and waits for others 5, 20 or 50 ms
(`service.py`), over plain Transformers and over CTranslate2. Translations end by themselves (`models.translator`), and
are the same everywhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.serving import models, report, servers
from benchmarks.serving.load import Load, run
from benchmarks.serving.report import Row
from benchmarks.serving.service import BEAMS, MOST_TOKENS

CLIENTS = 16
WAITS = (5, 20, 50)
SIDES = ("fastgen", *(f"{kind}-{wait}" for kind in ("transformers", "ctranslate2") for wait in WAITS))
COLUMNS = {
    "side": "server",
    "answered": "sentences per second",
    "tokens": "tokens per second",
    "p50": "p50, s",
    "p95": "p95, s",
    "right": "right translations",
    "times": "fastgen is faster",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=SIDES, default=list(SIDES), help="servers")
    parser.add_argument("--repetitions", type=int, default=1, help="of all of them, in turn (default: 1)")


def measured(options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    model = models.translator(folder / "opus-mt")
    if any(side.startswith("ctranslate2") for side in options.only):
        convert(model)
    for _ in range(options.repetitions):
        for side in options.only:
            yield _measured(side, model, options.seconds)


def convert(model: Path) -> None:
    """Writes the model in CTranslate2's format, in a folder beside it."""
    from transformers import AutoModelForSeq2SeqLM

    from benchmarks.backends import ctranslate2

    (model / "ctranslate2").mkdir()
    ctranslate2.convert(AutoModelForSeq2SeqLM.from_pretrained(model).eval(), str(model / "ctranslate2"))


def _measured(side: str, model: Path, seconds: float) -> Row:
    texts = models.sentences(1000)
    if side == "fastgen":
        started, path = servers.fastgen_serve("opus-mt", model), "/v1/completions"
        common: dict[str, Any] = {"model": "opus-mt", "num_beams": BEAMS, "max_tokens": MOST_TOKENS}
        bodies = [{**common, "prompt": text} for text in texts]
    else:
        kind, _, wait = side.rpartition("-")
        words = ["benchmarks.serving.service", kind, str(model), "--wait-ms", wait]
        started, path, bodies = servers.started("/ready", *words), "/translate", [{"text": text} for text in texts]
    with started as server:
        run(Load(f"{server.url}{path}", bodies, seconds / 4, clients=CLIENTS))  # warms up all batch sizes
        answers = run(Load(f"{server.url}{path}", bodies, seconds, clients=CLIENTS))
    good = [answer for answer in answers if answer.is_good]
    if not good:
        raise RuntimeError(f"{side} has answered nothing: {[answer.content for answer in answers[:3]]}")
    right = [_text(answer.content) == models.translation(texts[answer.body]) for answer in good]
    counted = [answer for answer in good if 0.2 * seconds <= (answer.end or 0) < seconds]
    tokens = sum(len(texts[answer.body].split()) for answer in counted) / (0.8 * seconds)
    return {"side": side, **report.of(answers, seconds), "tokens": tokens, "right": sum(right) / len(right)}


def _text(content: Any) -> str:
    return str(content.get("text") or content["choices"][0]["text"]).strip()


def compare(rows: Sequence[Row]) -> None:
    """Adds how many times as many tokens per second `fastgen` generated as each other server, from its best run."""
    own = max((row["tokens"] for row in rows if row["side"] == "fastgen"), default=None)
    for row in rows:
        row["times"] = own / row["tokens"] if own and row["tokens"] and row["side"] != "fastgen" else None
