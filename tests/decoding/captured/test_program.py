"""A recorded program: replays compute what calls of the function do, in memory that was planned ahead."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import settings as of_hypothesis
from hypothesis import strategies as st
from torch import Tensor, nn, overrides
from torch.utils import _python_dispatch

from fastgen.decoding import host_memory
from fastgen.decoding.captured import program
from fastgen.decoding.captured.program import Program
from fastgen.decoding.captured.recording import record
from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.decoding.program_memory import LEAST_CHUNK, Arena
from fastgen.ops import elementwise
from fastgen.ops.linear import choose
from tests import test_recorded_graph as cases
from tests.decoding.captured.replayed import Replayed

aten = torch.ops.aten
SAME_BITS = [aten.neg.default, aten.relu.default, aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.cat.default]
SAME_BITS += [aten.pow.Tensor_Scalar, aten.clone.default, aten._to_copy.default]


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_looks_for_garbage_during_a_capture(collects: bool) -> None:
    """Afterwards Python does so again, also where the capture fails, unless the user has told it not to."""
    x, found = torch.ones(3), list[bool]()

    def fails() -> None:
        found.append(gc.isenabled())
        assert bool(x.add_(1).sum() > 0)

    if not collects:
        gc.disable()
    try:
        with pytest.raises(RuntimeError, match="waits for the device"):
            Program().capture(fails)
        assert found == [False] and gc.isenabled() == collects
        Program().capture(lambda: found.append(gc.isenabled()))
        assert found == [False, False] and gc.isenabled() == collects
    finally:
        gc.enable()


@pytest.mark.parametrize("position", [0, 3, 9, -1])
@pytest.mark.parametrize("others", ["", "before", "between", "behind"])
def test_what_a_capture_writes_to_keys_and_values_is_undone(position: int, others: str) -> None:
    """Also positions that are written twice, and among operators that write to all of it."""
    caches = [torch.randn(2, 3, 5, 4) for _ in range(2)]
    before = [cache.clone() for cache in caches]
    at = torch.tensor([position, 3])

    def other(when: str) -> None:
        if when == others:
            for cache in caches:
                cache.mul_(2)

    def writes() -> None:
        other("before")
        torch.ops.fastgen.kv_write(torch.ones(2, 3, 4), torch.ones(2, 3, 4), *caches, at)
        at.add_(1)
        other("between")
        torch.ops.fastgen.kv_write(torch.ones(2, 3, 4), torch.ones(2, 3, 4), *caches, at)
        torch.ops.fastgen.kv_write(torch.zeros(2, 3, 4), torch.ones(2, 3, 4), *caches, at)
        other("behind")

    made = Program()
    made.capture(writes)
    assert at.tolist() == [position, 3]
    assert all(torch.equal(*pair) for pair in zip(caches, before, strict=True))
    made.replay()
    found, caches, at = caches, before, torch.tensor([position, 3])
    writes()
    assert all(torch.equal(*pair) for pair in zip(caches, found, strict=True))


@pytest.mark.skipif(not host_memory._resident(), reason="what a process holds is not told")
def test_a_capture_copies_no_more_of_keys_and_values_than_it_writes() -> None:
    def held_by_a_capture(capacity: int) -> int:
        caches = [host_memory.zeros((1, 1, capacity, 256), torch.float32, torch.device("cpu")) for _ in range(2)]
        new, at, made = torch.ones(1, 1, 256), torch.tensor(7), Program()
        before = host_memory._resident()
        made.capture(lambda: torch.ops.fastgen.kv_write(new, new, *caches, at))
        return host_memory._resident() - before

    held_by_a_capture(16)  # the first one imports what torch needs
    assert held_by_a_capture(2**16) < 2**25  # of 2**26 bytes each; the system may have pages of 2**21


@pytest.fixture(autouse=True)
def as_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases of the simulated graph run with programs, which are torch's where the bits may be others."""
    monkeypatch.setattr(cases, "RecordedGraph", Replayed)
    monkeypatch.setattr(choose, "kernel_for", lambda *given: None)
    same_bits = {function: maker for function, maker in elementwise._MAKERS.items() if function in SAME_BITS}
    monkeypatch.setattr(elementwise, "_MAKERS", same_bits)


grad_mode = cases.grad_mode
test_replay_reads_buffers_as_they_are_then = cases.test_replay_reads_buffers_as_they_are_then
test_host_values_are_frozen = cases.test_host_values_are_frozen
test_a_counter_counts = cases.test_a_counter_counts
test_capture_changes_nothing_but_host_state = cases.test_capture_changes_nothing_but_host_state
test_views_alias = cases.test_views_alias
test_in_place_out_and_writes_by_index = cases.test_in_place_out_and_writes_by_index
test_several_results = cases.test_several_results
test_random_numbers_are_drawn_anew = cases.test_random_numbers_are_drawn_anew_and_from_the_given_generator
test_a_subclass_that_unwraps_itself = cases.test_a_subclass_that_unwraps_itself
test_torch_says_that_it_captures = cases.test_torch_says_that_it_captures_to_the_thread_that_does
test_memory_of_the_graph_lives_as_long_as_it = cases.test_memory_of_the_graph_lives_as_long_as_it
test_refused = cases.test_refused
test_a_number_written_to_elements = cases.test_a_number_written_to_elements
test_permitted = cases.test_permitted


def test_a_decoder_layer_and_its_weights() -> None:
    with torch.inference_mode():  # as programs are recorded: torch has other attention where there are gradients
        cases.test_a_decoder_layer_and_its_weights()


def test_a_capture_that_raises_changes_nothing() -> None:
    x, state = torch.arange(4.0), torch.get_rng_state()

    def step() -> None:
        x.add_(torch.rand(4))
        x.sum().item()

    with pytest.raises(RuntimeError, match=r"stream is capturing: aten.* waits for the device"):
        Program().capture(step)
    assert x.tolist() == [0, 1, 2, 3] and torch.equal(torch.get_rng_state(), state)


def test_results_go_where_they_were_planned() -> None:
    """Operators write there themselves, changes of a type too; what has no such form, as those of lists, is copied."""
    x, out = torch.randn(2, 9), torch.zeros(2, 3)
    recorded = Replayed()

    def function() -> Tensor:
        return torch._foreach_neg([((x.abs()).exp() / x.sum(-1, keepdim=True)).topk(3)[0].to(torch.float64)])[0]

    recorded.capture(lambda: out.copy_(function()))
    outs = [aten.abs.out, aten.exp.out, aten.sum.IntList_out, aten.div.out, aten.topk.values]
    assert [function for function in recorded.functions if function in outs] == outs
    assert recorded.functions.count(program._execute) == 1
    x.normal_()
    recorded.replay()
    assert torch.equal(out, function().float())


def numbers_and_integers() -> tuple[Tensor, ...]:
    return L * 0.1, L / 3.0, L % 0.7, 1 - L * 0.3, L.half() + 1 / 3, (L > 0) + 2, torch.add(L, 0.1, alpha=0.3)


def changed_layouts() -> tuple[Tensor, ...]:
    squeezed, transposed, resized = (X + 1).unsqueeze(2).clone(), X * 2, torch.empty(0)
    squeezed.squeeze_(2)
    transposed.t_()
    transposed[1] = 4.0
    resized.resize_(3, 50).fill_(3)
    return squeezed + 1, transposed + 1, transposed.t().mm(transposed), resized * 2


def buffers_written_and_read() -> tuple[Tensor, ...]:
    B[1:].copy_(X[:2])
    later = B * 2
    B.t()[1:3].t().mul_(3)
    view = B.view(5, 3).t()[1:].unsqueeze(0)
    view.add_(1)
    return later, B + later, view.expand(2, -1, -1).clone()


L = torch.arange(-500, 1000)
X = torch.randn(3, 5)
B = torch.randn(3, 5)
FUNCTIONS: dict[str, Callable[[], Any]] = {
    "numbers and integers": numbers_and_integers,
    "changed layouts": changed_layouts,
    "buffers": buffers_written_and_read,
    "types": lambda: (X.to(torch.float64), X.half().float(), X.long(), X.t().bfloat16(), X.to(torch.bool)),
    "constants": lambda: (torch.zeros(3), torch.arange(7), torch.full((2, 2), 5), torch.ones_like(X), X.new_zeros(2)),
    "a list of tensors": lambda: (torch._foreach_add([X, B], 1), torch.unbind_copy(X), torch._foreach_neg([X])),
    "statistics": lambda: (*torch.var_mean(X, -1), X.std(), F.layer_norm(X, (5,)), X.logsumexp(-1), X.sort(dim=1)),
    "indices": lambda: (X[L[501:503]], X.gather(1, X.argsort(1)), X.index_add(0, (X[:, 0] > 9).long(), X), X.roll(1)),
    "nothing": lambda: (X[:0] + 1, X[:, :0].sum(1), X[:, :0] @ B.t()[:0], X @ B.t()[:, :0], X[:0] @ B.t()),
    "layouts of results": lambda: (X.t() + B.t(), X.t().exp(), torch.cat([X.t(), B.t()]), F.conv1d(X, B[:, :3, None])),
    "sums": lambda: (X.half().sum(), (X > 0).cumsum(0), (X > 0).sum(), X.mean(0), X.max(1), X.argmax(), X.amin(0)),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_like_calls(name: str) -> None:
    def refill() -> None:
        X.normal_()
        B.normal_()
        L.add_(1)

    cases.agrees(FUNCTIONS[name], [X, B, L], refill if name != "indices" else lambda: X.normal_())


def test_results_that_are_none() -> None:
    layer, x = nn.MultiheadAttention(8, 2).requires_grad_(False), torch.randn(2, 3, 8)

    def step() -> Tensor:
        weights = layer.in_proj_weight, layer.in_proj_bias, layer.out_proj.weight, layer.out_proj.bias
        inputs = [x.view_as(x) for _ in range(3)]  # if they were one object, the operator would compute otherwise
        attended, nothing = torch._native_multi_head_attention(*inputs, 8, 2, *weights, need_weights=False)
        assert nothing is None
        return attended

    with torch.inference_mode():
        cases.agrees(step, [x], lambda: x.normal_())


def test_an_interrupt_while_torch_takes_a_mode() -> None:
    """Or puts it back: that it cannot be put back is an error of its own, and nothing of the recording is left."""

    def interrupted_before() -> None:
        _python_dispatch._push_mode(_python_dispatch._get_current_dispatch_mode_stack()[-1])
        overrides._push_mode(overrides._get_current_function_mode_stack()[-1])
        raise KeyboardInterrupt

    def interrupted_behind() -> None:
        _python_dispatch._pop_mode()
        raise KeyboardInterrupt

    for function in (interrupted_before, interrupted_behind):
        with pytest.raises(KeyboardInterrupt):
            record(function)
        assert not _python_dispatch._get_current_dispatch_mode_stack()
        assert not overrides._get_current_function_mode_stack()

    def refused() -> None:
        raise CannotBeCaptured("it wants all keys")

    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:  # of the caller's: what is refused meanwhile is no interrupt
        with pytest.raises(CannotBeCaptured):
            record(refused)


KINDS = st.sampled_from(
    ["add", "cat", "sum", "view", "write", "topk", "empty", "copy", "constant", "like", "in place", "activation"]
)
SOME_STEPS = st.lists(st.tuples(KINDS, st.integers(0, 99), st.integers(0, 99)), max_size=25)


def run(steps: list[tuple[str, int, int]], x: Tensor) -> list[Tensor]:
    found = [x]
    for kind, i, j in steps:
        a, b = found[i % len(found)], found[j % len(found)]
        size = min(len(a), len(b))
        if kind == "add":
            found.append(a[:size] + b[-size:])
        elif kind == "cat" and len(a) + len(b) < 2000:
            found.append(torch.cat([a, b]))
        elif kind == "sum":
            found.append(a.sum(0, keepdim=True))
        elif kind == "view" and len(a) > 2:
            found.append(a[1::2])
        elif kind == "write":
            found.append(a.clone())
            found[-1][:size] = b[:size].flip(0)
        elif kind == "topk":
            values, order = a.topk(min(len(a), 1 + j % 7))
            found += [values, order.float()]
        elif kind == "copy":
            found.append(a.clone() if j % 2 else a.clone(memory_format=torch.contiguous_format)[j % 3 :])
        elif kind == "constant":
            found.append(torch.arange(1.0 + j))
        elif kind == "like":
            found.append(torch.full_like(a, j))
        elif kind == "in place":
            a[:size].add_(b[-size:].clone())
        elif kind == "activation":
            found.append(a.relu() if j % 2 else a * 0.5)
        elif kind == "empty":
            torch.empty(100 + j)  # used by nobody
            found.append(torch.empty(j + 1).fill_(i))
    return found[-1 - len(steps) % 3 :]


@given(steps=SOME_STEPS)
@example(steps=[("add", 0, 0)] * 20)
@example(steps=[("cat", n, n) for n in range(5)] + [("sum", n, n) for n in range(5)] + [("add", 3, 4)] * 4)
@example(steps=[("copy", 0, 1), ("in place", 0, 0), ("add", 0, 1)])
@example(steps=[("constant", 0, 9), ("copy", 1, 1), ("in place", 1, 1), ("add", 1, 2)])
@example(steps=[("copy", 0, 1), ("view", 1, 0), ("in place", 2, 0), ("add", 1, 0), ("copy", 1, 1), ("copy", 4, 1)])
@of_hypothesis(max_examples=100)
def test_any_function(steps: list[tuple[str, int, int]]) -> None:
    x = torch.randn(40)
    recorded = Replayed()
    results = recorded.capture(lambda: run(steps, x))
    for _ in range(2):
        before = x.normal_().clone()
        recorded.replay()
        after = x.clone()
        x.copy_(before)
        torch.testing.assert_close(results, run(steps, x), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(after, x, rtol=0, atol=0, equal_nan=True)


def test_programs_share_their_memory() -> None:
    """Whatever others have left there, each gives what it gives alone. The memory goes with the last of them."""
    memory, x = Arena(), torch.randn(300)
    functions: list[Callable[[], Any]] = [
        lambda: x.exp().cumsum(0),
        lambda: (x * 2).exp().cumsum(0) - x,
        lambda: x.topk(9)[0] + x[:9],
    ]
    programs = [Replayed(memory) for _ in functions]
    results = [made.capture(function) for made, function in zip(programs, functions, strict=True)]
    assert (memory.allocations, memory.nbytes) == (1, LEAST_CHUNK)
    for number in (0, 1, 2, 1, 0, 2):
        x.normal_()
        (chunk,) = programs[0]._chunks
        torch.empty(0, dtype=torch.uint8).set_(chunk.storage).fill_(255)
        programs[number].replay()
        assert torch.equal(results[number], functions[number]())
    del chunk, programs[1:]
    gc.collect()
    assert memory.nbytes == LEAST_CHUNK
    del programs[0]
    gc.collect()
    assert memory.nbytes == 0


@pytest.fixture(autouse=True)
def globals_are_put_back() -> Iterator[None]:
    before = [tensor.clone() for tensor in (X, B, L)]
    yield
    for tensor, contents in zip((X, B, L), before, strict=True):
        tensor.copy_(contents)
