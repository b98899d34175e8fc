"""The captured step on the CPU: a graph is simulated, and everything else is what runs on a GPU."""

from __future__ import annotations

import contextlib
from unittest import mock

import fastgen
from fastgen import settings
from fastgen.decoding.captured import graph
from fastgen.ops import triton as operators
from fastgen.optimizer.transformers.captured import kept, loop
from tests.recorded_graph import RecordedGraph

# Models whose steps can be captured in some releases of Transformers.
BY_RELEASE = {"bloom", "gpt-bigcode", "deepseek-v3"}


class Graph(RecordedGraph):
    """Transformers asks torch whether a capture is going on, and does not look at masks then."""

    made = 0

    def __init__(self, device):
        super().__init__()
        type(self).made += 1

    def capture(self, function):
        with mock.patch("torch.cuda.is_current_stream_capturing", return_value=True):
            super().capture(function)


class CalledGraph:
    """Calls the function again instead of replaying it: for kernels that a simulated graph does not see (Triton's)."""

    def __init__(self, device):
        pass

    def capture(self, function):
        self.replay = function


class LateFlag(graph.LateFlag):
    """The host knows of a step when `late` more have been started."""

    def reset(self):
        super().reset()
        self._known = []

    def is_set(self):
        self._known.append(bool(self._flag))
        return len(self._known) > self._late and self._known[-1 - self._late]


@contextlib.contextmanager
def on_the_cpu():
    """Steps are captured in this block, on whatever device.

    The kernels' references serve: a simulated graph does not see Triton's kernels. Weights are not packed, which is a
    matter of CPUs, and of one call: a graph cannot be replayed without them.
    """
    with (
        settings.changed(packed_weights="never"),
        mock.patch.object(operators, "is_interpreted", lambda: False),
        mock.patch.object(loop, "_is_for", lambda device: True),
        mock.patch.object(graph, "unavailable", lambda device: None),
        mock.patch.object(graph, "Graph", Graph),
        mock.patch.object(graph, "LateFlag", LateFlag),
    ):
        kept.drop_all()
        yield
        kept.drop_all()


def reasons():
    """Why calls did without a captured step."""
    return fastgen.stats().get(loop.ENTRY_POINT, {"fallback": {}})["fallback"]
