"""A CUDA graph: what a function starts on the device, captured once and started again with one call."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fastgen import settings
from fastgen.ops import triton as operators

# One call of `generate` at a time uses the graphs of a device: they share the memory of their intermediate results.
turn = threading.RLock()

_pools: dict[int, tuple[int, int]] = {}


def unavailable(device: torch.device) -> str | None:
    """Why steps on this device cannot be captured, or None when they can."""
    if device.type != "cuda":
        return f"the model is on {device.type}"
    if torch.version.hip is not None:
        return "the GPU is not NVIDIA's"
    if not operators.is_installed():
        return "Triton is not installed"
    return None


def backend() -> str:
    """What captures decoding steps in this process."""
    if settings.current().captured_step == "never":
        return "off (captured_step is never)"
    if not torch.cuda.is_available():
        return "no steps are captured: torch sees no CUDA device"
    reason = unavailable(torch.device("cuda"))
    return "CUDA graphs" if reason is None else f"no steps are captured: {reason}"


class Graph:
    """A CUDA graph, in the memory pool that all graphs of its device share.

    Sharing is safe because they are replayed one after another, and because nothing that a replay leaves for the next
    one is in the pool: that is in tensors which were there before the capture.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, function: Callable[[], None]) -> None:
        """Captures what `function` starts on the device. It is not executed.

        Raises:
            RuntimeError: it does something that cannot be captured: waits for the device, say.
        """
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        with torch.cuda.device(index):
            pool = _pools.get(index)
            if pool is None:
                pool = _pools[index] = torch.cuda.graph_pool_handle()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                # Other threads may go on allocating meanwhile.
                self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    function()
                except BaseException:
                    with contextlib.suppress(RuntimeError):  # it says once more that the capture has failed
                        self._graph.capture_end()
                    raise
                self._graph.capture_end()
            torch.cuda.current_stream().wait_stream(side)

    def replay(self) -> None:
        """Starts it on the current stream, with what is in its tensors now."""
        self._graph.replay()


def capturable(function: Callable[[], None]) -> Callable[[], None]:
    """The function, so that what can be captured in one way and not in another is done in the first."""

    def run() -> None:
        with _NumbersOnDevice():
            function()

    return run


class _NumbersOnDevice(TorchFunctionMode):
    """Numbers that become tensors: torch makes them on the host, and copies them to the device.

    Such a copy cannot be captured; filling a tensor on the device can. It concerns `torch.where` with a number, and
    `torch.tensor` of one.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.where and len(args) == 3:
            condition, x, y = args
            args = condition, _tensor(x, y, condition.device), _tensor(y, x, condition.device)
        elif func is torch.Tensor.where and len(args) == 3:
            x, condition, y = args
            args = x, condition, _tensor(y, x, condition.device)
        elif func is torch.tensor and _is_number_for_a_device(args, kwargs or {}):
            func, args = torch.full, ((), *args)
        return func(*args, **(kwargs or {}))


def _is_number_for_a_device(args: tuple, kwargs: dict) -> bool:
    is_number = len(args) == 1 and isinstance(args[0], (bool, int, float))
    return is_number and kwargs.get("device") is not None and kwargs.keys() <= {"device", "dtype"}


def _tensor(x: Any, other: Any, device: torch.device) -> Any:
    """A number as a tensor, which is filled on the device, of the type that it and `other` have together."""
    if isinstance(x, torch.Tensor):
        return x
    return torch.full((), x, dtype=torch.result_type(x, other), device=device)


class LateFlag:
    """A flag on the device that the host reads a few steps late, so that the device never waits for the host.

    The flag must not be taken back once it is set.
    """

    def __init__(self, device: torch.device, late: int) -> None:
        """
        Args:
            late: how many steps may be under way that the host does not know the outcome of.
        """
        self._is_cuda = device.type == "cuda"
        self._late = late
        self._flag = torch.zeros((), dtype=torch.bool, pin_memory=self._is_cuda)
        self._events: list[torch.cuda.Event] = []

    def reset(self) -> None:
        """Not set, and nothing under way."""
        for event in self._events[-1:]:
            event.synchronize()
        self._events = []
        self._flag.fill_(False)

    def send(self, flag: torch.Tensor) -> None:
        """Part of the step: copies the flag to the host, without waiting."""
        self._flag.copy_(flag, non_blocking=True)

    def is_set(self) -> bool:
        """To be called after each step has been started: whether the flag was set `late` steps ago, or since."""
        if self._is_cuda:
            event = torch.cuda.Event()
            event.record()
            self._events.append(event)
            if len(self._events) <= self._late:
                return False
            self._events.pop(0).synchronize()
        return bool(self._flag)
