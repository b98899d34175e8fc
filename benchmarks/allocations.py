"""Memory of an encoder's intermediate results over batches of many lengths: torch's allocator, and plans in chunks.

    python -m benchmarks.allocations [--batches N] [--inputs N] [--shortest N] [--longest N] [--bucket N] [--help]

The encoder has the shape of BART's, with smaller layers. Each batch has a length of its own, as for TurboTransformers
(Fang et al., PPoPP 2021, section 6). Each way runs all batches, and its results are checked:

* torch's allocator: the encoder as it is.
* a plan for each length: programs on the same chunks, made anew where the length is another one. Chunks that the next
  program does not need are freed, as in the paper.
* a program for each bucket of lengths, kept, with inputs padded behind the mask: on shared chunks, and with memory of
  its own.

Allocations are those that torch's profiler sees while the batches run, and chunks. Peaks are bytes beyond inputs,
results, and the model. Seconds are those of the batches, without recording.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.workloads.shapes import bart_base
from fastgen.decoding.arena import Arena
from fastgen.decoding.captured.program import Program

MIB = 2**20


@dataclass
class Row:
    """What was found out about a way to run the batches.

    Attributes:
        chunks: allocations that plans made; `inside` those that operators made while batches ran.
        peak: the most bytes at once, of both together.
        kept: bytes that stay allocated from batch to batch, at the end.
        seconds: of the batches, without recording.
    """

    name: str
    chunks: int = 0
    inside: int = 0
    peak: int = 0
    kept: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        numbers = f"{self.chunks:,} | {self.inside:,} | {self.peak / MIB:.1f} | {self.kept / MIB:.1f}"
        return f"| {self.name} | {numbers} | {self.seconds:.1f} |"


@dataclass
class Batches:
    """An encoder and the lengths of its batches, with memory for the inputs and the result of any of them."""

    encoder: Any
    lengths: list[int]
    inputs: int
    width: int
    longest: int  # with padding
    tokens: Tensor = field(init=False)
    mask: Tensor = field(init=False)
    result: Tensor = field(init=False)

    def __post_init__(self) -> None:
        positions = self.inputs * self.longest
        self.tokens = torch.zeros(positions, dtype=torch.int64)
        self.mask = torch.zeros(positions, dtype=torch.int64)
        self.result = torch.zeros(positions * self.width)

    def fill(self, length: int, capacity: int) -> None:
        """Tokens of so many positions, and padding up to the capacity."""
        generator = torch.Generator().manual_seed(length)
        tokens, mask, _ = self.views(capacity)
        tokens.fill_(1)
        tokens[:, :length].random_(4, 100, generator=generator)
        mask.zero_()
        mask[:, :length] = 1

    def views(self, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, mask and result of batches of that length: where they begin is the same for all."""
        sizes = self.inputs, length, self.width
        tokens, mask = (buffer[: self.inputs * length].view(sizes[:2]) for buffer in (self.tokens, self.mask))
        return tokens, mask, self.result[: self.inputs * length * self.width].view(sizes)

    def encode(self, length: int) -> None:
        tokens, mask, result = self.views(length)
        result.copy_(self.encoder(input_ids=tokens, attention_mask=mask).last_hidden_state)

    def check(self, row: Row, length: int, capacity: int, expected: Tensor) -> None:
        """Raises RuntimeError if the result is not the expected one, but for rounding; and forgets it."""
        found = self.views(capacity)[2]
        if not torch.allclose(found[:, :length], expected, atol=1e-4, rtol=1e-4):
            raise RuntimeError(f"{row.name}: another result for {length} positions")
        found.fill_(torch.nan)

    def program(self, length: int, memory: Arena) -> Program:
        made = Program(memory)
        made.capture(lambda: self.encode(length))
        return made


def run(row: Row, work: Callable[[], object], held: int) -> None:
    """Runs a batch in a way that holds so many bytes in chunks meanwhile, and writes down what is allocated."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        start = time.perf_counter()
        work()
        row.seconds += time.perf_counter() - start
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = row.kept = held
    for event in sorted(events, key=lambda event: event.start_ns()):
        row.peak = max(row.peak, now)
        now += event.nbytes()
        row.inside += event.nbytes() > 0
    row.peak = max(row.peak, now)


def measure(batches: Batches, bucket: int) -> list[Row]:
    """All ways, batch after batch in turn.

    Raises:
        RuntimeError: a way gives another result than the encoder as it is.
    """
    plain, planned = Row("torch's allocator"), Row("a plan for each length")
    shared, own = Row(f"a program for each {bucket} lengths"), Row("the same, each with chunks of its own")
    memory, of_all = Arena(), Arena()
    kept: dict[int, tuple[Program, Program, Arena]] = {}
    program, before = None, 0
    for length in batches.lengths:
        if length != before:  # the chunks of the program before are there until it is replaced
            program, before = batches.program(length, memory), length
        room = -(-length // bucket) * bucket
        if room not in kept:
            kept[room] = batches.program(room, of_all), batches.program(room, alone := Arena()), alone
        batches.fill(length, length)
        run(plain, lambda length=length: batches.encode(length), 0)
        expected = batches.views(length)[2].clone()
        run(planned, program.replay, memory.nbytes)
        batches.check(planned, length, length, expected)
        for row, made, held in (
            (shared, kept[room][0], of_all.nbytes),
            (own, kept[room][1], sum(alone.nbytes for *_, alone in kept.values())),
        ):
            batches.fill(length, room)
            run(row, made.replay, held)
            batches.check(row, length, room, expected)
    planned.chunks, shared.chunks = memory.allocations, of_all.allocations
    own.chunks = sum(alone.allocations for *_, alone in kept.values())
    return [plain, planned, shared, own]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.allocations", description=__doc__.split("\n")[0])
    for name, number, what in (
        ("batches", 200, "how many"),
        ("inputs", 2, "inputs of a batch"),
        ("shortest", 5, "positions of the shortest input"),
        ("longest", 500, "positions of the longest one"),
        ("bucket", 64, "positions that the lengths of one program differ by at the most"),
        ("width", 128, "numbers of a hidden state"),
        ("layers", 6, "of the encoder"),
    ):
        parser.add_argument(f"--{name}", type=int, default=number, metavar="N", help=f"{what} (default: {number})")
    given = parser.parse_args(arguments)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler prints two lines for each batch
    draw = random.Random(0)
    lengths = [draw.randint(given.shortest, given.longest) for _ in range(given.batches)]
    rounded = -(-given.longest // given.bucket) * given.bucket
    torch.manual_seed(0)
    model = bart_base(
        vocab_size=100,
        d_model=given.width,
        encoder_layers=given.layers,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=4 * given.width,
        decoder_ffn_dim=4 * given.width,
        max_position_embeddings=rounded,
    ).eval()
    print("| | chunks | other allocations | peak MiB | kept MiB | seconds |\n| --- | --- | --- | --- | --- | --- |")
    with torch.inference_mode():
        batches = Batches(model.get_encoder(), lengths, given.inputs, given.width, rounded)
        for row in measure(batches, given.bucket):
            print(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
