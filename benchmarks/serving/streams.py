"""Streams: SmolLM2-135M-Instruct in float32, with weights that are numbers of bfloat16, and 8 clients of a chat.

`fastgen-serve` against `transformers serve`, with and without `--continuous-batching`. Answers are greedy, of up to 96
tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
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


def run_all(options: argparse.Namespace, folder: Path) -> None:
    """Runs it, and writes what it has shown."""
    model = models.smollm2_from_bfloat16(folder / "smollm2")
    rows: list[Row] = []
    texts: dict[str, dict[int, str]] = {}
    for side in options.only:
        seen = _answers(side, model, options.seconds)
        texts[side] = {answer.body: answer.content for answer in seen}
        rows.append({"side": side, **_numbers(seen, model)})
        own, tokens = texts.get("fastgen"), next((row["tokens"] for row in rows if row["side"] == "fastgen"), None)
        if own and tokens and side != "fastgen":
            both = own.keys() & texts[side].keys()
            same = sum(own[question] == texts[side][question] for question in both)
            rows[-1] |= {"same": f"{same} of {len(both)}", "times": tokens / rows[-1]["tokens"]}
        print(report.table(rows[-1:], COLUMNS), flush=True)
        report.write(options.out, "streams", rows, report.table(rows, COLUMNS))
    print(report.table(rows, COLUMNS))


def _started(side: str, model: Path) -> AbstractContextManager[Server]:
    if side == "fastgen":
        return servers.fastgen_serve("smollm2", model)
    return servers.transformers_serve(model, continuous=side.endswith("continuous"))


def _answers(side: str, model: Path, seconds: float) -> list[Answer]:
    name = "smollm2" if side == "fastgen" else str(model)
    with _started(side, model) as server:
        load = Load(f"{server.url}/v1/chat/completions", bodies(name), seconds / 4, clients=CLIENTS, streams=True)
        run(load)  # a warm-up
        load.seconds = seconds
        seen = run(load)
    good = [answer for answer in seen.answers if answer.is_good]
    if not good:
        raise RuntimeError(f"{side} has answered nothing: {seen.answers[:3]}")
    return good


def bodies(name: str) -> list[Any]:
    """Requests of a chat."""
    common = {"model": name, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    return [{**common, "messages": [{"role": "user", "content": question}]} for question in QUESTIONS]


def _numbers(good: Sequence[Answer], model: Path) -> Row:
    tokenizer = tokenizer_of(model)
    tokens = sum(len(tokenizer(answer.content, add_special_tokens=False).input_ids) for answer in good)
    firsts = [(answer.first or answer.end or 0) - answer.due for answer in good]
    return {
        "tokens": tokens / max(answer.end or 0 for answer in good),
        "first50": report.percentile(firsts, 50),
        "first95": report.percentile(firsts, 95),
        "answers": len(good),
    }
