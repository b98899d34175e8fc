"""Static and continuous batching side by side: the same requests, in batches and in the slots of `fastgen.Engine`.

Requests of many lengths come one by one to a language model that has eight rows. In static batches, what has come waits
until the longest output of the batch before is over; in slots, a request enters at once, and one that is over makes
room for the next. `--picture FILE` draws the rows over time. Both sides run with FastGen, and give the same tokens.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria

import fastgen

HERE = Path(__file__).resolve().parent
MODEL, TEXTS = HERE / "models" / "kjv-gpt2", HERE / "data" / "heldout.ref.txt"
ROWS, REQUESTS, SHORTEST, LONGEST = 8, 64, 8, 240
WAYS = {"static": "static batches", "slots": "slots"}


@dataclass
class Run:
    """The results of one way: when each request occupied a row, and its tokens."""

    arrivals: list[float]
    tokens: list[list[int]] = field(default_factory=list)
    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    held: list[float] = field(default_factory=list)  # when its row was released

    @property
    def seconds(self) -> float:
        return max(self.held)

    @property
    def waits(self) -> list[float]:
        """Seconds from the arrival of each request to its result, the shortest first."""
        return sorted(end - begin for begin, end in zip(self.arrivals, self.held, strict=True))

    @property
    def busy(self) -> float:
        """The share of the rows' occupied time in which their request was generated."""
        taken = sum(held - begin for begin, held in zip(self.begins, self.held, strict=True))
        return sum(end - begin for begin, end in zip(self.begins, self.ends, strict=True)) / taken


class Limits(StoppingCriteria):
    """Ends each row at its own length, and records when."""

    def __init__(self, lengths: list[int], clock: Any) -> None:
        self._lengths, self._clock, self.ends = torch.tensor(lengths), clock, [0.0] * len(lengths)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        is_over = input_ids.shape[1] >= self._lengths
        for row in is_over.nonzero().flatten().tolist():
            self.ends[row] = self.ends[row] or self._clock()
        return is_over


def requests(count: int, tokenizer: Any) -> list[tuple[list[int], int]]:
    """Returns prompts with their numbers of new tokens: most are short, some are long."""
    texts, draw = TEXTS.read_text(encoding="utf-8").splitlines()[:count], random.Random(1)
    prompts = [tokenizer(" ".join(text.split()[: draw.randint(3, 12)])).input_ids for text in texts]
    return [(prompt, int(SHORTEST * (LONGEST / SHORTEST) ** draw.random())) for prompt in prompts]


def static(model: Any, given: list[tuple[list[int], int]], arrivals: list[float]) -> Run:
    """Runs static batches of the requests that have arrived, at most as many as there are rows."""
    run, begin = Run(arrivals), time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - begin

    while (first := len(run.tokens)) < len(given):
        time.sleep(max(arrivals[first] - clock(), 0.0))
        batch = given[first : first + min(ROWS, sum(when <= clock() for when in arrivals[first:]))]
        width = max(len(prompt) for prompt, _ in batch)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in batch])
        limits = Limits([width + new for _, new in batch], clock)
        start, most = clock(), max(new for _, new in batch)
        made = model.generate(ids, attention_mask=mask, max_new_tokens=most, stopping_criteria=[limits])
        run.tokens += [row[width : width + new].tolist() for row, (_, new) in zip(made, batch, strict=True)]
        run.begins += [start] * len(batch)
        run.ends += limits.ends
        run.held += [clock()] * len(batch)
    return run


class _Notes:
    """A streamer that records when a request starts and ends."""

    def __init__(self, clock: Any) -> None:
        self._clock, self.begin, self.last = clock, 0.0, 0.0

    def put(self, value: Any) -> None:
        self.last = self._clock()
        self.begin = self.begin or self.last

    def end(self) -> None:
        self.last = self._clock()


def slots(model: Any, given: list[tuple[list[int], int]], arrivals: list[float]) -> Run:
    """Runs the engine, with as many slots as there are rows."""
    run, begin, futures = Run(arrivals), time.perf_counter(), []
    notes = [_Notes(lambda: time.perf_counter() - begin) for _ in given]
    with fastgen.Engine(model, slots=ROWS) as engine:
        for (prompt, new), note, when in zip(given, notes, arrivals, strict=True):
            time.sleep(max(when - (time.perf_counter() - begin), 0.0))
            futures.append(engine.submit(prompt, max_new_tokens=new, streamer=note))
        rows = [future.result()[0].tolist() for future in futures]
    run.tokens = [row[len(prompt) :] for row, (prompt, _) in zip(rows, given, strict=True)]
    run.begins, run.ends = [note.begin for note in notes], [note.last for note in notes]
    run.held = run.ends
    return run


def places(run: Run) -> list[int]:
    """Returns the row of each request: the first one that is free when it starts."""
    free, found = [0.0] * ROWS, [0] * len(run.begins)
    for number in sorted(range(len(found)), key=run.begins.__getitem__):
        row = min(range(ROWS), key=lambda row: (free[row] > run.begins[number] + 1e-3, free[row]))
        found[number], free[row] = row, run.held[number]
    return found


def picture(runs: dict[str, Run], path: Path) -> None:
    """Draws the rows of both ways over time: dark while generating a request, light while waiting for others."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    panels = figure.subplots(len(runs), 1, sharex=True)
    for panel, (name, run) in zip(panels, runs.items(), strict=True):
        for number, row in enumerate(places(run)):
            begin, end, held = run.begins[number], run.ends[number], run.held[number]
            panel.barh(row, end - begin, left=begin, height=0.8, color="#2b6cb0", edgecolor="white", linewidth=0.6)
            panel.barh(row, held - end, left=end, height=0.8, color="#d8dee6")
        median = run.waits[len(run.waits) // 2]
        panel.set_title(f"{WAYS[name]}: half of the results within {median:.2f} s", loc="left", fontsize=10)
        panel.set_yticks(range(ROWS), [str(row + 1) for row in range(ROWS)])
        panel.set_ylabel("row")
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("seconds")
    figure.savefig(path, dpi=110)


def shown(runs: dict[str, Run]) -> Table:
    """Returns a table of both ways side by side."""
    table = Table(title=f"{len(runs['slots'].tokens)} requests of {SHORTEST} to {LONGEST} tokens, {ROWS} rows",
                  title_justify="left")  # fmt: skip
    table.add_column("")
    for name in runs:
        table.add_column(WAYS[name], justify="right")
    for title, part in (("half of them", 0.5), ("nine of ten", 0.9)):
        waits = (run.waits[int(part * len(run.waits))] for run in runs.values())
        table.add_row(f"{title} have their result within", *(f"{wait:.2f} s" for wait in waits))
    table.add_row(
        "of the time that rows are taken, they generate", *(f"{100 * run.busy:.0f} %" for run in runs.values())
    )
    return table


def side_by_side(count: int, path: Path | None, console: Console) -> bool:
    """Runs both ways, and prints them; returns whether their tokens are equal."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL).eval()
    options = {"num_beams": 1, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    model.generation_config.update(**options)
    given, runs = requests(count, tokenizer), {}
    for way in (static, slots):  # captures the steps before the clock runs
        seconds = way(model, given[: 3 * ROWS], [0.0] * (3 * ROWS)).seconds
    # The arrival rate is 70 % of the measured capacity.
    gap, draw = 1.4 * seconds / (3 * ROWS), random.Random(2)
    arrivals = list(itertools.accumulate(draw.expovariate(1 / gap) for _ in given))
    for name, way in (("static", static), ("slots", slots)):
        runs[name] = way(model, given, arrivals)
    console.print(shown(runs))
    if path is not None:
        picture(runs, path)
        console.print(f"The rows over time: {path}")
    return runs["static"].tokens == runs["slots"].tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=REQUESTS, help=f"how many (default: {REQUESTS})")
    parser.add_argument("--picture", type=Path, help="draw the rows over time into this file")
    arguments = parser.parse_args()
    is_same = side_by_side(arguments.requests, arguments.picture, Console())
    if not is_same:
        print("slots: the tokens differ between the ways", file=sys.stderr)
    return int(not is_same)


if __name__ == "__main__":
    sys.exit(main())
