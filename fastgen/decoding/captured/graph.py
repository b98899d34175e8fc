"""CUDA graphs, and what runs a part of a step eagerly, captures it and replays it, one call at a time.

A CUDA graph holds the kernels that a function launches, captured once and launched again with one call. On a CPU, a
`Program` replaces it.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen import settings
from fastgen.decoding import derived_weights
from fastgen.decoding.captured.capturable import capturable
from fastgen.decoding.captured.program import Program, is_running
from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.decoding.program_memory import Growing
from fastgen.decoding.retrying import BackOff
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
        with derived_weights.call():
            yield
        return
    with undoing(partial(_give_back, lock)):
        if not _acquired(lock, -1 if waits(device) else patience):
            raise CannotBeCaptured("a call in another thread has a captured step, on the CPU")
        with derived_weights.call():
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
    derived_weights.third_party_runs()
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


# ---- parts of a step

# What the host does after a piece, if anything; and a piece, with what the host does after it.
Then = Callable[..., None] | None
Piece = tuple[Callable[[], object], Then]
# Steps between running out of memory and the next attempt: half of the first wait, and the longest wait.
_PAUSES = 16, 512


class CapturedPart:
    """The state machine of a captured part: some eager runs, a capture, and replays.

    A part is split into pieces if the host does something in between. The pieces' functions are not kept, because they
    reference the model, which would never be freed.

    Args:
        warm_ups: runs before the capture, in which kernels are compiled and libraries prepare themselves.

    Attributes:
        made: the recordings of its pieces; empty until it is captured.
        declined: numbers of inputs for which there can be no programs.
        out_of_memory: numbers of inputs for which there was no memory, to be tried again after a back-off.
    """

    def __init__(self, device: torch.device, growing: Growing | None = None, warm_ups: int = 0) -> None:
        self._device, self._growing, self._warm_ups = device, growing, warm_ups
        self.made: list[tuple[Graph | Program, Then]] = []
        self._by_inputs: dict[int, list[tuple[Graph | Program, Then]]] = {}
        self.declined: set[int] = set()
        self.out_of_memory: dict[int, BackOff] = {}

    @property
    def is_captured(self) -> bool:
        return bool(self.made)

    @property
    def is_warm(self) -> bool:
        """Whether the next run may capture it."""
        return self._warm_ups <= 0

    @property
    def follows(self) -> bool:
        """Whether the recordings stay valid when the buffers get other memory."""
        return all(made.follows for pieces in (self.made, *self._by_inputs.values()) for made, _ in pieces)

    def drop(self) -> None:
        """Drops the recordings."""
        self.made = []
        self._by_inputs = {}
        self.declined = set()

    # ---- programs for numbers of inputs

    def is_declined(self, inputs: int) -> bool:
        """Whether programs for this many inputs are not to be made now. To be called once in each step."""
        back_off = self.out_of_memory.get(inputs)
        return inputs in self.declined or (back_off is not None and back_off.waits())

    def decline_for_now(self, inputs: int) -> None:
        """Notes that there was too little memory for programs for this many inputs. There may be more later."""
        self.out_of_memory.setdefault(inputs, BackOff(*_PAUSES)).fail()

    @property
    def is_specialized(self) -> bool:
        """Whether there are programs for fewer inputs than the batch."""
        return bool(self._by_inputs)

    def smallest(self, inputs: int) -> int | None:
        """Returns the smallest number of at least `inputs` inputs that there are programs for, or None."""
        return min((number for number in self._by_inputs if number >= inputs), default=None)

    def use(self, inputs: int) -> bool:
        """Has later replays use the programs for this many inputs. Returns whether there are any."""
        self.made = self._by_inputs.get(inputs, self.made)
        return inputs in self._by_inputs

    def specialize(self, inputs: int, batch: int, programs: Iterable[Program], pieces: Iterable[Piece]) -> None:
        """Uses programs of its pieces for the first `inputs` of the batch, instead of a capture."""
        if self.made and not self._by_inputs:  # it was captured
            self._by_inputs[batch] = self.made
        self._by_inputs[inputs] = [(program, then) for program, (_, then) in zip(programs, pieces, strict=True)]
        self.use(inputs)

    def run(self, pieces: Iterable[Piece], *given: Any) -> None:
        """Runs the part eagerly. What the host does after a piece gets `given`."""
        self._warm_ups -= 1
        as_captured = (lambda run: run) if is_recorded(self._device) else capturable
        run_pieces([(as_captured(run), then) for run, then in pieces], given)

    def capture(self, pieces: Iterable[Piece], *given: Any) -> None:
        """Captures the part, and runs the recordings. If these fail, the part does not count as captured.

        Raises:
            RuntimeError: the part does something that cannot be captured. Exceptions of the pieces are passed on.
        """
        made = [(self._captured(run), then) for run, then in pieces]
        run_pieces([(each.replay, then) for each, then in made], given)
        self.made = made

    def replay(self, *given: Any) -> None:
        """Replays the recordings."""
        run_pieces([(each.replay, then) for each, then in self.made], given)

    def _captured(self, run: Callable[[], object]) -> Graph | Program:
        made = new(self._device, self._growing)
        made.capture(capturable(run))
        return made


def run_pieces(pieces: Iterable[Piece], given: tuple[Any, ...]) -> None:
    """Runs pieces one after the other, each followed by what the host does after it, which gets `given`."""
    for run, then in pieces:
        run()
        if then is not None:
            then(*given)
