"""Memory that is planned ahead: where buffers lie in chunks, and how long the chunks live."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as of_hypothesis
from hypothesis import strategies as st
from torch import nn

from fastgen.decoding import program_memory
from fastgen.decoding.captured.recording import record
from fastgen.decoding.program_memory import ALIGNMENT, LEAST_CHUNK, Arena, Buffer, Chunk, lifetimes, plan
from fastgen.decoding.recorded_graph import TensorRef


def aligned(size: int) -> int:
    return max(size + -size % ALIGNMENT, ALIGNMENT)


def needed_at_once(buffers: dict[int, Buffer]) -> int:
    """Bytes: no plan can do with less."""
    moments = range(max((buffer.last for buffer in buffers.values()), default=0) + 1)
    return max(sum(aligned(x.size) for x in buffers.values() if x.first <= moment <= x.last) for moment in moments)


BUFFERS = st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 12), st.integers(0, 6)), max_size=25).map(
    lambda found: {7 * i: Buffer(size, first, first + more) for i, (size, first, more) in enumerate(found)}
)


@given(buffers=BUFFERS, chunks=st.lists(st.integers(0, 6000), max_size=4))
@example(buffers={}, chunks=[])
@example(buffers={0: Buffer(0, 0, 0), 1: Buffer(0, 0, 3)}, chunks=[64])
@example(buffers={i: Buffer(100, 0, 9) for i in range(9)}, chunks=[128, 130, 1024])
@of_hypothesis(max_examples=150)
def test_buffers_in_use_do_not_overlap(buffers: dict[int, Buffer], chunks: list[int]) -> None:
    spots, further = plan(buffers, chunks)
    assert spots.keys() == buffers.keys()
    sizes = [*chunks, further]
    for number, spot in spots.items():
        assert spot.begin % ALIGNMENT == 0 and spot.begin >= 0
        assert spot.begin + buffers[number].size <= sizes[spot.chunk]
        for other, its in spots.items():
            a, b = buffers[number], buffers[other]
            if number < other and spot.chunk == its.chunk and a.first <= b.last and b.first <= a.last:
                # Not even in one cache line.
                assert spot.begin + aligned(a.size) <= its.begin or its.begin + aligned(b.size) <= spot.begin
    ends = [spot.begin + aligned(buffers[number].size) for number, spot in spots.items() if spot.chunk == len(chunks)]
    assert further == max(ends, default=0)  # no more than is needed
    if not chunks:
        assert needed_at_once(buffers) <= further <= sum(aligned(buffer.size) for buffer in buffers.values())


def test_lifetimes() -> None:
    moments = [[(4, 10)], [], [(4, 30), (5, 7)], [(4, 20)], [(6, 0), (6, 0)]]
    assert lifetimes(moments) == {4: Buffer(30, 0, 3), 5: Buffer(7, 2, 2), 6: Buffer(0, 4, 4)}


@pytest.mark.parametrize("length", [1, 17, 100])
def test_an_encoder_takes_about_what_it_needs_at_once(length: int) -> None:
    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 128, 0.0, batch_first=True), 3).eval()
    with torch.inference_mode():
        x = torch.randn(2, length, 32)
        recording, _ = record(lambda: layers(x))
    places = ([p for p in (*each.args, *each.outputs) if isinstance(p, TensorRef)] for each in recording.operations)
    buffers = lifetimes([(p.storage, p.end) for p in some if p.storage in recording.made] for some in places)
    assert len(buffers) > 20
    _, size = plan(buffers)
    assert size <= 1.1 * needed_at_once(buffers)


# ---- chunks


def test_chunks_are_used_again() -> None:
    """A program that fits takes no memory; of one that does not, only what does not fit is in a new chunk."""
    memory, size = Arena(), LEAST_CHUNK // 2
    first = memory.place({0: Buffer(size, 0, 1), 1: Buffer(size, 1, 2)})
    assert (memory.allocations, memory.nbytes) == (1, LEAST_CHUNK)
    second = memory.place({0: Buffer(LEAST_CHUNK, 0, 0), 1: Buffer(5, 1, 1)})
    assert {chunk for chunk, _ in second.values()} == {first[0][0]} and memory.allocations == 1
    third = memory.place({0: Buffer(3 * size, 0, 1), 1: Buffer(2 * size, 1, 2), 2: Buffer(3 * size, 2, 3)})
    assert (memory.allocations, memory.nbytes) == (2, LEAST_CHUNK + 3 * size)
    assert third[1] == (first[0][0], 0) and third[0] == third[2] and third[0][1] == 0
    assert memory.place({}) == {} and memory.allocations == 2


def test_a_chunk_goes_with_the_last_program_in_it() -> None:
    memory = Arena()
    small = memory.place({0: Buffer(100, 0, 0)})
    large = memory.place({0: Buffer(5 * LEAST_CHUNK, 0, 0), 1: Buffer(100, 0, 0)})
    assert memory.nbytes == 6 * LEAST_CHUNK
    del small
    gc.collect()
    assert memory.nbytes == 6 * LEAST_CHUNK  # the large one has something in it
    del large
    gc.collect()
    assert memory.nbytes == 0
    again = memory.place({0: Buffer(1, 0, 0)})
    assert (memory.allocations, memory.nbytes) == (3, LEAST_CHUNK) and again[0][1] == 0


def test_what_lies_in_a_chunk_outlives_the_arena() -> None:
    place = Arena().place({0: Buffer(4000, 0, 0)})
    gc.collect()
    (chunk, begin) = place[0]
    x = torch.empty(0).set_(chunk.storage, begin // 4, (1000,)).fill_(3.0)
    assert x.sum() == 3000 and chunk.storage.data_ptr() % ALIGNMENT == 0


def test_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Arena()
    kept = memory.place({0: Buffer(10, 0, 0)})

    def fail(size: int) -> Chunk:
        raise RuntimeError("not enough memory")

    with monkeypatch.context() as patch:
        patch.setattr(program_memory, "Chunk", fail)
        with pytest.raises(RuntimeError, match="not enough memory"):
            memory.place({0: Buffer(2 * LEAST_CHUNK, 0, 0)})
    assert (memory.allocations, memory.nbytes) == (1, LEAST_CHUNK)
    assert memory.place({0: Buffer(10, 0, 0)}) == kept


def test_planning_in_threads() -> None:
    """Each gets a chunk that nobody else takes for free."""
    memory = Arena()
    found: list[dict[int, tuple[Chunk, int]]] = []
    sizes = [LEAST_CHUNK * n for n in range(1, 9)]
    work = [threading.Thread(target=lambda s=s: found.append(memory.place({0: Buffer(s, 0, 0)}))) for s in sizes]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    chunks = {chunk for places in found for chunk, _ in places.values()}
    assert len(found) == 8 and memory.allocations >= len(chunks)
    assert memory.nbytes == sum(chunk.storage.nbytes() for chunk in chunks)
