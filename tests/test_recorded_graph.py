"""The simulated CUDA graph: replays compute what the function would, on memory, and refuse what a GPU would refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastgen.decoding.kv.view import KVView
from tests.recorded_graph import RecordedGraph


@pytest.fixture(autouse=True)
def grad_mode(request: pytest.FixtureRequest) -> Any:
    with getattr(request, "param", torch.inference_mode)():
        yield


both_modes = pytest.mark.parametrize(
    "grad_mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"], indirect=True
)


def captured(function: Callable[[], Any]) -> tuple[RecordedGraph, Any]:
    graph = RecordedGraph()
    return graph, graph.capture(function)


def agrees(function: Callable[[], Any], buffers: list[Tensor], refill: Callable[[], None]) -> None:
    """Asserts that replays give what calls give, from the same contents of the buffers, result and side effects."""
    graph, result = captured(function)
    for _ in range(3):
        refill()
        before = [buffer.clone() for buffer in buffers]
        expected = function()
        after = [buffer.clone() for buffer in buffers]
        for buffer, contents in zip(buffers, before, strict=True):
            buffer.copy_(contents)
        graph.replay()
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(buffers, after, rtol=0, atol=0, equal_nan=True)


def test_replay_reads_buffers_as_they_are_then() -> None:
    x = torch.randn(3, 5)
    agrees(lambda: (x * 2).softmax(-1) @ x.T, [x], lambda: x.normal_())


def test_host_values_are_frozen() -> None:
    x = torch.ones(2)
    step = [1]
    graph, result = captured(lambda: x * step[0])
    step[0] = 5
    graph.replay()
    assert result.tolist() == [1, 1]


def test_a_counter_counts() -> None:
    position, written = torch.zeros(1, dtype=torch.long), torch.zeros(6)

    def step() -> None:
        written.index_copy_(0, position, position + 10.0)
        position.add_(1)

    graph, _ = captured(step)
    for _ in range(4):
        graph.replay()
    assert position.item() == 4
    assert written.tolist() == [10, 11, 12, 13, 0, 0]


@both_modes
def test_capture_changes_nothing_but_host_state() -> None:
    x, calls = torch.arange(6.0), []
    state = torch.get_rng_state()
    generator = torch.Generator().manual_seed(3)
    own_state = generator.get_state()

    def step() -> Tensor:
        calls.append(1)
        x[2:].mul_(5)
        torch.add(x, 1, out=x)
        torch.rand(3)
        torch.rand(3, generator=generator)
        return x.cumsum(0)

    graph, _ = captured(step)
    assert x.tolist() == [0, 1, 2, 3, 4, 5]
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(generator.get_state(), own_state)
    graph.replay()
    assert x.tolist() == [1, 2, 11, 16, 21, 26]
    assert len(calls) == 1


def test_results_are_poisoned_until_the_first_replay() -> None:
    x = torch.ones(3)
    graph, (float_, long, flag, view) = captured(
        lambda: (x + 1, x.long() + 1, x > 5, torch.zeros(2, 3, dtype=torch.int32)[:, 1])
    )
    assert float_.isnan().all() and flag.all()
    assert long.tolist() == [2**63 - 1] * 3 and view.tolist() == [2**31 - 1] * 2
    graph.replay()
    assert (float_ == 2).all() and (long == 2).all() and not flag.any() and not view.any()


def test_empty_memory_is_poisoned_at_every_replay() -> None:
    x = torch.ones(2)

    def step() -> Tensor:
        out = torch.empty(4)
        out[:2] = x
        return out

    graph, result = captured(step)
    graph.replay()
    result[2:] = 7
    graph.replay()
    assert result[:2].tolist() == [1, 1] and result[2:].isnan().all()


@both_modes
def test_views_alias() -> None:
    x = torch.zeros(2, 3, 4)

    def step() -> tuple[Tensor, ...]:
        view = x.transpose(0, 1)[:, :, 1:].unsqueeze(0)
        view.add_(1)
        copy = x.reshape(6, 4).t().contiguous()
        part = copy[1]
        part.mul_(2)
        return copy, part, view.expand(2, -1, -1, -1)

    agrees(step, [x], lambda: x.normal_())


@both_modes
def test_in_place_out_and_writes_by_index() -> None:
    x, tokens, out = torch.randn(3, 5), torch.tensor([[1], [3], [0]]), torch.zeros(3, 5)
    rows = torch.tensor([2, 0, 1])

    def step() -> Tensor:
        x.clamp_(-1, 1)
        torch.mul(x, 3, out=out)
        out.scatter_(1, tokens, -math.inf)
        out.index_copy_(0, rows, out.flip(0))
        out[rows, rows] = x[:, 0]
        out.masked_fill_(x > 0.9, 4.0)
        out[x < -0.9] = 5.0
        x[1] = 3.0
        tokens.copy_((tokens + 1) % 5)
        torch._foreach_add_([x, out], 1.0)
        return torch.where(x > 0, x, out) + torch.where(out > 0, out, x)

    agrees(step, [x, tokens, out], lambda: x.normal_())


def test_several_results() -> None:
    x = torch.randn(2, 9)

    def step() -> tuple[Any, ...]:
        scores, tokens = x.log_softmax(-1).topk(4)
        left, right = x.chunk(2, dim=1)
        order = x.sort(dim=1, stable=True)
        return scores, tokens, tokens // 3, left + 1, right, *order, *x.max(dim=1)

    agrees(step, [x], lambda: x.normal_())


def test_random_numbers_are_drawn_anew_and_from_the_given_generator() -> None:
    x = torch.zeros(50)
    generator = torch.Generator()

    def step() -> tuple[Tensor, ...]:
        return torch.rand(50), x.bernoulli_(0.5, generator=generator), torch.empty(50).exponential_(generator=generator)

    graph, results = captured(step)
    seen = []
    for _ in range(2):
        graph.replay()
        seen.append([result.clone() for result in results])
    assert all(not torch.equal(first, second) for first, second in zip(*seen, strict=True))
    generator.manual_seed(5)
    expected = [torch.empty(50).bernoulli_(0.5, generator=generator), torch.empty(50).exponential_(generator=generator)]
    generator.manual_seed(5)
    graph.replay()
    torch.testing.assert_close(list(results[1:]), expected, rtol=0, atol=0)


@both_modes
def test_a_decoder_layer_and_its_weights() -> None:
    layer = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True)  # training: one way to compute it
    x, memory = torch.randn(2, 3, 16), torch.randn(2, 7, 16)

    def refill() -> None:
        x.normal_()
        layer.linear1.weight.normal_()

    agrees(lambda: layer(x, memory), [x, memory], refill)


@both_modes
def test_a_subclass_that_unwraps_itself() -> None:
    prefix, suffix, query = torch.randn(2, 2, 5, 4), torch.randn(4, 2, 3, 4), torch.randn(4, 2, 1, 4)

    def step() -> tuple[Tensor, ...]:
        keys, values = KVView.of(prefix, suffix, 2), KVView.of(prefix, suffix, 2)
        attended = nn.functional.scaled_dot_product_attention(query, keys, values)
        return attended, keys.transpose(2, 3) + 1, torch.cat([keys, query], dim=2)

    agrees(step, [prefix, suffix, query], lambda: prefix.normal_())


def test_torch_says_that_it_captures_to_the_thread_that_does() -> None:
    def step() -> None:
        ask = torch.cuda.is_current_stream_capturing
        with ThreadPoolExecutor(1) as other:
            assert (ask(), other.submit(ask).result()) == (True, False)

    before = torch.cuda.is_current_stream_capturing
    captured(step)
    assert torch.cuda.is_current_stream_capturing is before


def test_freed_memory_is_noticed() -> None:
    x = torch.ones(3)
    masks = [torch.ones(3)]
    graph, result = captured(lambda: x * masks[0])
    graph.replay()
    assert result.tolist() == [1, 1, 1]
    masks.clear()
    with pytest.raises(RuntimeError, match="memory that has been freed"):
        graph.replay()


def test_memory_of_the_graph_lives_as_long_as_it() -> None:
    x = torch.ones(3)
    graph, result = captured(lambda: ((x + 1) * 2).sum())
    graph.replay()
    assert result.item() == 12


X = torch.tensor([[0.5, -1.0, 2.0], [1.0, 0.0, 2.0]])
INDEX = torch.tensor([1, 0])
MASK = X > 0
META = torch.empty(2, 3, device="meta")

WAITS: dict[str, Callable[[], Any]] = {
    "item": lambda: X.sum().item(),
    "int": lambda: int(X[0, 0]),
    "if": lambda: 1 if (X > 0).all() else 2,
    "nonzero": lambda: X.nonzero(),
    "where with one argument": lambda: torch.where(MASK),
    "where with a number": lambda: torch.where(MASK, X, 0.0),
    "method where with a number": lambda: X.where(MASK, 0.0),
    "masked_select": lambda: X.masked_select(MASK),
    "unique": lambda: X.unique(),
    "unique_consecutive": lambda: torch.unique_consecutive(X),
    "unique by dimension": lambda: X.unique(dim=0),
    "equal": lambda: torch.equal(X, X + 1),
    "allclose": lambda: torch.allclose(X, X),
    "repeat_interleave by a tensor": lambda: X.repeat_interleave(INDEX, dim=0),
    "bincount": lambda: torch.bincount(INDEX),
    "mask as index": lambda: X[MASK],
    "mask as index of a write": lambda: X.clone().__setitem__(MASK, X[0, 0]),
    "mask of bytes": lambda: X[MASK.byte()],
    "range of a tensor": lambda: X[: INDEX[0]],
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
    "cpu": lambda: X.cpu(),
}
COPIES: dict[str, Callable[[], Any]] = {
    "torch.tensor of a number": lambda: torch.tensor(0.0),
    "torch.tensor of a list": lambda: torch.tensor([1, 2]),
    "as_tensor": lambda: torch.as_tensor([1, 2]),
    "new_tensor": lambda: X.new_tensor([1.0]),
    "list as index": lambda: X[[0, 1]],
    "another device": lambda: X.to("meta"),
    "another device without waiting": lambda: META.copy_(X, non_blocking=True),
}


@pytest.mark.parametrize("name", [*WAITS, *COPIES])
def test_refused(name: str) -> None:
    with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
        RecordedGraph().capture({**WAITS, **COPIES}[name])


@pytest.mark.parametrize("index", [(0, 1), INDEX], ids=["one element", "by index"])
def test_a_number_written_to_elements(index: Any) -> None:
    """torch 2.15 fills them. torch 2.13 copies the number from the host, which is refused."""
    x = X.clone()

    def write() -> Tensor:
        result = x.clone()
        result[index] = 3.0
        return result

    try:
        graph, result = captured(write)
    except RuntimeError as error:
        assert "copies from pageable host memory to the device" in str(error)
        return
    x.neg_()
    graph.replay()
    assert torch.equal(result, write())


@pytest.mark.parametrize(
    "function",
    [
        lambda: X.repeat_interleave(2, dim=0),
        lambda: X.repeat_interleave(INDEX, dim=0, output_size=1),
        lambda: X.clone().__setitem__(0, 3.0),
        lambda: X.clone().__setitem__(MASK, 3.0),
        lambda: X.clone().__setitem__((slice(None), slice(1, None)), 3.0),
        lambda: torch.where(MASK, X, X + 1),
        lambda: torch.full((2,), 3.0),
        lambda: torch.as_tensor(X),
        lambda: X.to("cpu"),
        lambda: X[INDEX],
        lambda: X.masked_fill(MASK, 1.0),
        lambda: torch.isin(INDEX, INDEX),
    ],
)
def test_permitted(function: Callable[[], Any]) -> None:
    graph, result = captured(function)
    graph.replay()
    torch.testing.assert_close(result, function())
