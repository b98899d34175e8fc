"""Streams: SmolLM2-135M-Instruct in float32, with weights that are numbers of bfloat16, and 8 clients of a chat.

`fastgen-serve` against `transformers serve`, with and without `--continuous-batching`. Answers are greedy, of up to 96
tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from benchmarks.serving import models, report, servers
from benchmarks.serving.load import Answer, Load, run
from benchmarks.serving.report import Row
from benchmarks.serving.servers import Server
from benchmarks.workloads.smollm2_chat import QUESTIONS, tokenizer_of

CLIENTS = 8
TOKENS = 96
SIDES = ("fastgen", "transformers", "transformers-continuous")
COLUMNS = {
    "side": "server",
    "tokens": "tokens per second",
    "first50": "first token, p50, s",
    "first95": "first token, p95, s",
    "answers": "answers",
    "same": "same as fastgen's",
    "times": "fastgen is faster",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=SIDES, default=list(SIDES), help="servers")


def measured(options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    model = models.smollm2_from_bfloat16(folder / "smollm2")
    tokenizer, seconds = tokenizer_of(model), options.seconds
    for side in options.only:
        name = "smollm2" if side == "fastgen" else str(model)
        with _started(side, model) as server:
            url = f"{server.url}/v1/chat/completions"
            run(Load(url, bodies(name), seconds / 4, clients=CLIENTS, streams=True))  # warm-up
            answers = run(Load(url, bodies(name), seconds, clients=CLIENTS, streams=True))
        good = [answer for answer in answers if answer.is_good]
        if not good:
            raise RuntimeError(f"{side} has answered nothing: {answers[:3]}")
        tokens = sum(len(tokenizer(answer.content, add_special_tokens=False).input_ids) for answer in good)
        yield {
            "side": side,
            "tokens": tokens / max(answer.end or 0 for answer in good),
            "first50": report.first_tokens(answers, seconds, 50),
            "first95": report.first_tokens(answers, seconds, 95),
            "answers": len(good),
            "_texts": texts_of(good),
        }


def texts_of(good: Sequence[Answer]) -> dict[int, str]:
    """Returns the answers by question."""
    return {answer.body: answer.content for answer in good}


def compare(rows: Sequence[Row]) -> None:
    """Adds how many times as many tokens per second `fastgen` generated, and how many answers are equal."""
    own = next((row for row in rows if row["side"] == "fastgen"), None)
    for row in rows:
        if own is not None and row is not own:
            both = own["_texts"].keys() & row["_texts"].keys()
            same = sum(own["_texts"][question] == row["_texts"][question] for question in both)
            row |= {"same": f"{same} of {len(both)}", "times": own["tokens"] / row["tokens"]}


def _started(side: str, model: Path) -> AbstractContextManager[Server]:
    if side == "fastgen":
        return servers.fastgen_serve("smollm2", model)
    words = ["transformers.cli.transformers", "serve", str(model), "--device", "cpu", "--dtype", "float32"]
    words += ["--continuous-batching"] if side.endswith("continuous") else []
    return servers.started("/health", *words)


def bodies(name: str) -> list[Any]:
    """Returns chat requests."""
    common = {"model": name, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    return [{**common, "messages": [{"role": "user", "content": question}]} for question in QUESTIONS]
