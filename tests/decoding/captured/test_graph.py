"""What makes a function capturable, the flag that is read late, and, on a GPU, the graph itself."""

from __future__ import annotations

import pytest
import torch

from fastgen.decoding.captured import graph
from tests.recorded_graph import RecordedGraph


@pytest.mark.parametrize(
    "function",
    [
        lambda x, mask: torch.where(mask, x, -1.5),
        lambda x, mask: torch.where(mask, 2, x),
        lambda x, mask: torch.where(mask, 1.0, 0.0),
        lambda x, mask: torch.where(mask, x.long(), 2.5),
        lambda x, mask: torch.where(mask, x.half(), -float("inf")),
        lambda x, mask: x.where(mask, -2),
        lambda x, mask: x + torch.tensor(1.5, device=x.device, dtype=x.dtype),
        lambda x, mask: x + torch.tensor(2, device=x.device),
        lambda x, mask: torch.where(mask, torch.tensor(0.0, device=x.device, dtype=x.dtype), -3.0),
    ],
)
def test_numbers_are_made_on_the_device(device, function):
    """With the same result, of the same type; as it stands, it cannot be captured."""
    x, out = torch.tensor([0.5, -1.0, 2.0], device=device), []
    mask = x > 0
    wanted = function(x, mask)
    made = RecordedGraph()
    if device.type == "cpu":
        with pytest.raises(RuntimeError, match="not permitted"):
            RecordedGraph().capture(lambda: function(x, mask))
    made.capture(graph.capturable(lambda: out.append(function(x, mask))))
    made.replay()
    assert out[0].dtype == wanted.dtype
    assert torch.equal(out[0], wanted)


def test_other_calls_are_left_alone():
    results = []
    graph.capturable(lambda: results.append((torch.tensor([1, 2]), torch.tensor(3), torch.where(torch.eye(2) > 0))))()
    assert results[0][0].tolist() == [1, 2] and results[0][1].item() == 3 and len(results[0][2]) == 2


def test_backend(monkeypatch):
    if not torch.cuda.is_available():
        assert "no CUDA device" in graph.backend()
        assert graph.unavailable(torch.device("cpu")) == "the model is on cpu"


def test_late_flag(device):
    flag, done = graph.LateFlag(device, late=2), torch.zeros((), dtype=torch.bool, device=device)
    flag.send(done)
    assert not flag.is_set()
    done.fill_(True)
    found = []
    for _ in range(3):
        flag.send(done)
        found.append(flag.is_set())
    assert found[-1]
    flag.reset()
    done.fill_(False)
    flag.send(done)
    assert not flag.is_set()


def test_a_graph(device):
    """Captured without being executed, replayed on what is there then; one that fails leaves the device usable."""
    if device.type != "cuda":
        pytest.skip("CUDA graphs need --device cuda")
    x = torch.ones(4, device=device)
    (x + 1).mul_(2)  # loads what it needs
    torch.cuda.synchronize()
    made = graph.Graph(device)
    made.capture(lambda: x.copy_((x + 1) * 2))
    assert x.tolist() == [1] * 4
    made.replay()
    made.replay()
    assert x.tolist() == [10] * 4
    with pytest.raises(RuntimeError):
        graph.Graph(device).capture(lambda: x.sum().item())
    assert x.sum().item() == 40
    again = graph.Graph(device)
    again.capture(lambda: x.zero_())
    again.replay()
    assert x.tolist() == [0] * 4
