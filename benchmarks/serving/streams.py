"""Streams: SmolLM2-135M-Instruct in float32, with weights that are numbers of bfloat16, and 8 clients of a chat.

`fastgen-serve` against `transformers serve`, with and without `--continuous-batching`. Answers are greedy, of up to 96
tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from benchmarks.serving import models, report, servers
from benchmarks.serving.load import Load, Seen, run
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
        seen = _seen(side, model, options.seconds)
        texts[side] = {answer.body: answer.content for answer in seen.answers if answer.is_good}
        rows.append({"side": side, **_numbers(seen, model)})
        compare(rows, texts)
        print(report.table(rows[-1:], COLUMNS), flush=True)
        report.write(options.out, "streams", rows, report.table(rows, COLUMNS))
    print(report.table(rows, COLUMNS))


def compare(rows: Sequence[Row], texts: Mapping[str, Mapping[int, str]]) -> None:
    """Adds how many times as many tokens per second `fastgen` has made, and how many answers are the same.

    Args:
        texts: by server and question.
    """
    own = next((row for row in rows if row["side"] == "fastgen"), None)
    for row in rows:
        if own is None or row is own:
            continue
        theirs = texts[row["side"]]
        both = texts["fastgen"].keys() & theirs.keys()
        same = sum(texts["fastgen"][question] == theirs[question] for question in both)
        row |= {"same": f"{same} of {len(both)}", "times": own["tokens"] / row["tokens"]}


def _started(side: str, model: Path) -> AbstractContextManager[Server]:
    if side == "fastgen":
        return servers.fastgen_serve("smollm2", model)
    return servers.transformers_serve(model, continuous=side.endswith("continuous"))


def _seen(side: str, model: Path, seconds: float) -> Seen:
    name = "smollm2" if side == "fastgen" else str(model)
    with _started(side, model) as server:
        load = Load(f"{server.url}/v1/chat/completions", bodies(name), seconds / 4, clients=CLIENTS, streams=True)
        run(load)  # a warm-up
        load.seconds = seconds
        seen = run(load)
    if not any(answer.is_good for answer in seen.answers):
        raise RuntimeError(f"{side} has answered nothing: {seen.answers[:3]}")
    return seen


def bodies(name: str) -> list[Any]:
    """Requests of a chat."""
    common = {"model": name, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    return [{**common, "messages": [{"role": "user", "content": question}]} for question in QUESTIONS]


def _numbers(seen: Seen, model: Path) -> Row:
    tokenizer, good = tokenizer_of(model), [answer for answer in seen.answers if answer.is_good]
    tokens = sum(len(tokenizer(answer.content, add_special_tokens=False).input_ids) for answer in good)
    return {
        "tokens": tokens / max(answer.end or 0 for answer in good),
        "first50": report.first_tokens(seen, 50),
        "first95": report.first_tokens(seen, 95),
        "answers": len(good),
    }
