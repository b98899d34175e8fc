"""The report of allocations, on a tiny encoder."""

from __future__ import annotations

import pytest
import torch

from benchmarks import allocations
from benchmarks.allocations import Batches, Row, main, measure, run
from fastgen.decoding.arena import LEAST_CHUNK
from fastgen.decoding.captured.program import Program

LENGTHS = [5, 40, 40, 17, 16, 5]
BUCKET = 16
TINY = ["--batches", "3", "--longest", "30", "--width", "16", "--layers", "1", "--bucket", "8"]


@pytest.fixture
def batches() -> Batches:
    class Output:
        def __init__(self, state: torch.Tensor) -> None:
            self.last_hidden_state = state

    def encoder(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Output:
        x = (input_ids * attention_mask).float().unsqueeze(-1).expand(-1, -1, 8) + 1
        return Output((x * 2 - x).cos())

    return Batches(encoder, LENGTHS, inputs=3, width=8, longest=48)


def test_each_way(batches: Batches) -> None:
    with torch.inference_mode():
        plain, planned, shared, own = measure(batches, BUCKET)
    assert (plain.chunks, planned.chunks, shared.chunks, own.chunks) == (0, 1, 1, 3)
    assert (plain.kept, planned.kept, shared.kept, own.kept) == (0, LEAST_CHUNK, LEAST_CHUNK, 3 * LEAST_CHUNK)
    assert plain.inside > shared.inside and plain.inside % len(LENGTHS) == 0  # batches are alike
    assert 3 * 40 * 8 * 4 * 2 <= plain.peak <= 3 * 40 * 8 * 4 * 4 and shared.peak >= LEAST_CHUNK
    assert all(row.seconds > 0 for row in (plain, planned, shared, own))


def test_another_result(batches: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = Program.replay
    monkeypatch.setattr(Program, "replay", lambda made: (replay(made), batches.result[:1].add_(1)))
    with torch.inference_mode(), pytest.raises(RuntimeError, match="a plan for each length: another result for 5"):
        measure(batches, BUCKET)


def test_what_is_counted() -> None:
    """What runs of a way allocate, and nothing else; chunks count as long as it runs."""
    row, kept = Row("a"), []
    run(row, lambda: kept.append(torch.ones(2000)), held=500)
    kept.append(torch.ones(100_000))
    assert (row.inside, row.peak, row.kept) == (1, 8500, 500)
    run(row, lambda: (torch.ones(1000), torch.ones(30)), held=0)
    assert (row.inside, row.peak, row.kept) == (3, 8500, 0)
    run(row, lambda: [torch.ones(250), torch.ones(250)][0] is None, held=7000)
    assert (row.inside, row.peak, row.kept) == (5, 9000, 7000)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(TINY) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and all(line.count("|") == lines[0].count("|") for line in lines)
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "(default: 200)" in capsys.readouterr().out and allocations.MIB == 2**20
