"""A CUDA graph: the kernels that a function launches, captured once and launched again with one call.

On a CPU, a `Program` replaces it.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import EllipsisType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastgen import settings
from fastgen.decoding.captured.program import Program, is_running
from fastgen.decoding.kv import row_lengths
from fastgen.decoding.kv.exchange import Growing
from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.decoding.weights import cache
from fastgen.interrupts import forkable_lock, undoing
from fastgen.memory import no_collection
from fastgen.ops import _library
from fastgen.ops import gpu as operators

# One call of `generate` at a time uses the graphs of a device, which share the memory of their intermediate results.
turn = forkable_lock()
# Threads that wait for their turn on the CPU.
_waiting: set[int] = set()
_turn_on_cpu = forkable_lock(undo=_waiting.clear)


@contextlib.contextmanager
def taken(device: torch.device, patience: float = 0.0) -> Iterator[None]:
    """Holds the turn for this thread. On a CPU, a call only waits for it if `captured_step` is "always".

    Args:
        patience: the most seconds to wait if the call would not wait otherwise.

    Raises:
        CannotBeCaptured: on a CPU, another thread has the turn, or this thread is inside a program, whose memory a
            call of a signal handler would overwrite.
    """
    lock = _turn_of(device)
    if lock._is_owned():  # a call inside another one
        if is_running():
            raise CannotBeCaptured("a call inside a captured step of another one, on the CPU")
        with cache.call():
            yield
        return
    with undoing(partial(_give_back, lock)):
        if not _acquired(lock, -1 if waits(device) else patience):
            raise CannotBeCaptured("a call in another thread has a captured step, on the CPU")
        with cache.call():
            yield


def _acquired(lock: Any, patience: float) -> bool:
    """Waits at most `patience` seconds for the turn, with -1 without limit. Returns whether this thread has it."""
    if lock.acquire(blocking=False):
        return True
    if lock is _turn_on_cpu and patience:
        _waiting.add(threading.get_ident())
    try:
        return bool(lock.acquire(timeout=patience))
    finally:
        _waiting.discard(threading.get_ident())


def is_wanted(device: torch.device) -> bool:
    """Whether other threads wait for the turn that this thread has. Only known on a CPU."""
    return device.type == "cpu" and bool(_waiting)


def _give_back(lock: Any) -> None:
    with contextlib.suppress(RuntimeError):  # raised if this thread does not have it
        lock.release()


def _turn_of(device: torch.device) -> Any:
    return _turn_on_cpu if device.type == "cpu" else turn


def waits(device: torch.device) -> bool:
    """Whether a call waits for the turn. On a CPU it can do without, unless `captured_step` is "always"."""
    return not is_recorded(device) or settings.current().captured_step == "always"


def is_recorded(device: torch.device) -> bool:
    """Whether steps on this device are recorded as programs, instead of being captured as CUDA graphs."""
    return device.type == "cpu"


@contextlib.contextmanager
def stepped_aside(device: torch.device) -> Iterator[None]:
    """Gives up the turn while third-party code runs between two graphs: it may wait for a thread that needs the turn.

    Between two of its graphs or programs, a call needs nothing from their memory. On a CPU, no thread waits for a call
    unless `captured_step` is "always".
    """
    cache.third_party_runs()
    if not waits(device):
        yield
        return
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    lock = _turn_of(device)
    with undoing(partial(_take, lock)):
        lock.release()
        yield


def _take(lock: Any) -> None:
    if not lock._is_owned():
        _acquired(lock, -1)


class _Shared(NamedTuple):
    """What all graphs of a device share. For each stream, the pool contains a cuBLAS workspace.

    Torch gives up a pool with its last graph, but not while memory of it is in use, as that workspace is, and it
    refuses to capture into the rest. So one graph is kept, which is never replayed.
    """

    pool: Any
    stream: Any
    stays: Any


_shared: dict[int, _Shared] = {}
# The most numbers of which a tensor is made on the device, with one call for each.
_MOST_NUMBERS = 256
# Graphs whose capture failed. In some releases, torch's allocators still ask them for their streams.
_abandoned: list[Any] = []


def unavailable(device: torch.device) -> str | None:
    """Returns why steps on this device cannot be captured, or None."""
    if device.type == "cpu":
        if operators.is_interpreted():
            return "Triton's kernels are interpreted, which is not seen by what records a step"
        return _library.load("CPU") or None
    return operators.unavailable(device)


def backend() -> str:
    """Returns what captures decoding steps in this process."""
    if settings.current().captured_step == "never":
        return "off (captured_step is never)"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reason = unavailable(device)
    if reason is not None:
        return f"no steps are captured: {reason}"
    return "CUDA graphs" if device.type == "cuda" else "recorded programs"


_made = itertools.count(1)
made = 0  # graphs and programs of this process; calls that make more are not in a steady state yet


def new(device: torch.device, growing: Growing | None = None) -> Graph | Program:
    """Returns an object that captures on this device.

    Args:
        growing: buffers with which a program may stay valid when they get other memory.
    """
    global made
    made = next(_made)
    return Program(growing=growing) if device.type == "cpu" else Graph(device)


class Graph:
    """A CUDA graph in the memory pool that all graphs of its device share.

    Sharing is safe because graphs are replayed one after another, and pass results to later replays only in tensors
    that existed before the capture, outside of the pool.
    """

    follows = False  # it contains the addresses of buffers

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, function: Callable[[], object]) -> None:
        """Captures the kernels that `function` launches, without executing them.

        Raises:
            RuntimeError: the function does something that cannot be captured, such as waiting for the device.
        """
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        with torch.cuda.device(index), no_collection():  # a collection might free another graph
            # During a capture, torch cannot move memory that it holds for other uses to the pool.
            torch.cuda.empty_cache()
            pool, stream, _ = _shared_by_graphs(index)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                try:
                    # Other threads may keep allocating meanwhile.
                    self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                    function()
                    self._graph.capture_end()
                except BaseException:
                    self._break_off(index, pool)
                    raise
            torch.cuda.current_stream().wait_stream(stream)

    def _break_off(self, index: int, pool: Any) -> None:
        """Ends a failed capture, and undoes what its beginning has changed in releases of torch up to 2.12.

        Otherwise no other graph could be captured into the pool, and the device's generator could not draw.
        """
        try:
            self._graph.capture_end()
            return  # the failure did not concern the device
        except RuntimeError:
            pass
        _shared.pop(index, None)
        self._graph.reset()
        _abandoned.append(self._graph)
        with contextlib.suppress(RuntimeError):  # raised if torch has done it already
            torch._C._cuda_endAllocateToPool(index, pool)
            torch._C._cuda_releasePool(index, pool)
        # The end of any other capture tells the generator that no capture is under way.
        with contextlib.suppress(RuntimeError), torch.cuda.stream(torch.cuda.Stream()):
            _capture_little(index)

    def replay(self) -> None:
        self._graph.replay()


def let_pools_go() -> None:
    """Lets the memory of freed graphs be returned. The next graph gets a new pool."""
    _shared.clear()


def _shared_by_graphs(index: int) -> _Shared:
    if index not in _shared:
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            _shared[index] = _Shared(pool, stream, _capture_little(index, pool=pool))
    return _shared[index]


def _capture_little(index: int, **options: Any) -> Any:
    """Captures a graph of one kernel on the current stream, because torch warns of an empty graph."""
    number = torch.zeros((), device=torch.device("cuda", index))
    little = torch.cuda.CUDAGraph()
    little.capture_begin(capture_error_mode="thread_local", **options)
    number.fill_(1)
    little.capture_end()
    return little


def capturable(function: Callable[[], object]) -> Callable[[], None]:
    """Returns the function with avoidable host copies and waits replaced (`Capturable`)."""

    def run() -> None:
        with Capturable():
            function()

    return run


class Capturable(TorchFunctionMode):
    """Makes tensors on the device from values that the host knows, where torch would copy or ask the device.

    One mode does all of it, because each mode adds a microsecond to every torch call of a model.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        func = _CAPTURABLE.get(func, func)
        return func(*args, **kwargs) if kwargs else func(*args)


def _where(*args: Any, **options: Any) -> Any:
    """Replaces `torch.where`, and makes tensors of numbers."""
    if len(args) == 3:
        condition, x, y = args
        args = condition, _tensor(x, y, condition.device), _tensor(y, x, condition.device)
    return torch.where(*args, **options)


def _where_of(*args: Any, **options: Any) -> Any:
    """Replaces `Tensor.where`, whose first argument is the tensor."""
    if len(args) == 3:
        x, condition, y = args
        return _where(condition, x, y, **options)
    return Tensor.where(*args, **options)


def _tensor_of(*args: Any, **options: Any) -> Tensor:
    """Replaces `torch.tensor` of a number with a device, and of a few numbers.

    The numbers become arguments of recorded operators: they are frozen, and compared with sizes, like all others.
    """
    if len(args) != 1 or not options.keys() <= {"device", "dtype"}:
        return torch.tensor(*args, **options)
    numbers = args[0]
    if isinstance(numbers, (bool, int, float)) and options.get("device") is not None:
        return torch.full((), numbers, **options)
    kinds = set(map(type, numbers)) if isinstance(numbers, (list, tuple)) and len(numbers) <= _MOST_NUMBERS else ()
    if len(kinds) == 1 and kinds <= {bool, int, float}:
        return torch.stack([torch.full((), number, **options) for number in numbers])
    return torch.tensor(*args, **options)


def _getitem(tensor: Tensor, index: Any) -> Any:
    """Replaces `Tensor.__getitem__`, with a slice for a list of one index, of which torch would make a tensor."""
    parts = index if type(index) is tuple else (index,)
    lists = [at for at, part in enumerate(parts) if type(part) is list]
    if len(lists) != 1 or not all(type(part) in (list, slice, EllipsisType) for part in parts):
        return row_lengths.getitem(tensor, index)
    (at,) = lists
    if len(parts[at]) != 1 or type(parts[at][0]) is not int:
        return row_lengths.getitem(tensor, index)
    (place,) = parts[at]
    found = Tensor.__getitem__(tensor, (*parts[:at], slice(place, place + 1 or None), *parts[at + 1 :]))
    axis = at - len(parts) if any(part is Ellipsis for part in parts[:at]) else at
    if found.shape[axis] != 1:  # the index is out of range, for which a slice raises no error
        return row_lengths.getitem(tensor, index)
    return found.clone()  # indexing with a list gives no view


_CAPTURABLE: dict[Any, Callable[..., Any]] = {
    torch.where: _where,
    Tensor.where: _where_of,
    torch.tensor: _tensor_of,
    torch.arange: row_lengths.arange,
    Tensor.__getitem__: _getitem,
}


def _tensor(x: Any, other: Any, device: torch.device) -> Any:
    """Returns a number as a tensor, of the dtype that it and `other` promote to."""
    if isinstance(x, Tensor):
        return x
    return torch.full((), x, dtype=torch.result_type(x, other), device=device)


class LateFlag:
    """A flag on the device, set once, that the host reads `late` steps later, so that the device never waits for it."""

    def __init__(self, device: torch.device, late: int) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._late = late
        self._flag = torch.zeros((), dtype=torch.bool, pin_memory=self._is_cuda)
        self._events: list[torch.cuda.Event] = []  # of steps under way
        self._spare: list[torch.cuda.Event] = []
        self._end: Any = None

    def reset(self) -> None:
        _wait_for(self._events)
        self._spare += self._events
        self._events.clear()
        self._flag.fill_(False)

    def send(self, flag: Tensor) -> None:
        """Copies the flag to the host without waiting. A part of the step."""
        self._flag.copy_(flag, non_blocking=True)

    def is_set(self) -> bool:
        """Whether the flag was set `late` steps ago or later. To be called after each step has been started."""
        if self._is_cuda:
            if self._end is None:
                # Replays copy to this memory without torch's knowledge: it must not be reused before they end. Made
                # here, because an interrupt in a destructor is lost. A CPU needs none.
                self._end = weakref.finalize(self, _let_end, self._events, self._flag)
                self._end.atexit = False
            event = self._spare.pop() if self._spare else torch.cuda.Event()
            # The stream of this device, even if another device is current.
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)
            if len(self._events) <= self._late:
                return False
            first = self._events.pop(0)
            first.synchronize()
            self._spare.append(first)
        return bool(self._flag)


def _wait_for(events: list[torch.cuda.Event]) -> None:
    for event in events[-1:]:
        event.synchronize()


def _let_end(events: list[torch.cuda.Event], flag: Tensor) -> None:
    """Waits for the steps under way, which still write to the flag."""
    with contextlib.suppress(Exception):
        _wait_for(events)
