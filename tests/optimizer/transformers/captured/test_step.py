"""What the parts of a captured step hold for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastgen.decoding.captured.capturable import SymbolicLength, capturable
from fastgen.optimizer.transformers.captured.buffers import StepBuffers
from fastgen.optimizer.transformers.captured.step import Parts
from tests.equivalence.captured import need_programs

TABLE = 100  # positions that a model has


def test_each_part_holds_as_long_as_what_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verify of eight positions needs more of the model's table than a plain step, which is captured behind it."""
    need_programs(torch.device("cpu"), monkeypatch)
    length, out = torch.tensor(60), torch.zeros(())
    bounds = SymbolicLength.of(length, 60, 80)
    buffers: Any = SimpleNamespace(device=length.device, growing=None, bounds=bounds)
    buffers.begin_capture = lambda **given: StepBuffers.begin_capture(buffers, **given)
    parts = Parts(SimpleNamespace(draft=object()), buffers, SimpleNamespace(is_watched=True))  # type: ignore[arg-type]

    def run(width: int) -> None:
        def forward() -> None:
            assert not bounds + width > TABLE
            out.fill_(width)

        parts.run(width, lambda: [(capturable(forward), None)], None)

    for width in (8, 1):
        run(width)
    assert parts.is_complete
    assert bounds.move(60, 92) and not bounds.move(60, 95)
