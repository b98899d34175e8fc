"""`model.generate` as it is, and with FastGen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

import fastgen
from benchmarks.backends.base import Backend, Job, Unsupported
from fastgen import settings as fastgen_settings
from fastgen.ops import quantized_linear

CAPTURED_STEP = "transformers.captured_step"  # as `fastgen.stats()` calls it
_NOT_YET = "too few steps so far"  # why a call has none, and a later one will
_SHORT_CALL = 8  # new tokens of the shortest call that may have one


class Unpatched(Backend):
    """The library alone: the baseline."""

    must_equal: str | None = "transformers"

    def active(self) -> AbstractContextManager[Any]:
        """Inside this, `generate` works in the way of this backend."""
        return fastgen.disabled()

    def run(self, new_tokens: int) -> Tensor:
        with self.active():
            return self.job.workload.generate(self.job.model, self.job.inputs, new_tokens)


class Patched(Unpatched):
    """FastGen, with other settings than its own where some are given; those may change the tokens.

    Args:
        name: of the backend.
        settings: for `fastgen.enable`.
    """

    fastgen = True

    def __init__(self, name: str, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(name)
        self.settings = dict(settings or {})
        if self.settings:
            self.must_equal = None

    def setup(self, job: Job) -> None:
        super().setup(job)
        unknown = [name for name in self.settings if not hasattr(fastgen_settings.current(), name)]
        if unknown:
            raise Unsupported(f"FastGen {fastgen.__version__} has no setting {', '.join(unknown)}")
        precision = self.settings.get("weight_dtype", "fp32")
        if precision != "fp32":
            reason = "it is for the CPU" if job.model.device.type != "cpu" else quantized_linear.unavailable(precision)
            if reason is not None:
                raise Unsupported(f"FastGen stays in float32: {reason}")

    def warm_up(self) -> None:
        on_gpu = any(value.device.type == "cuda" for value in self.job.inputs.values())
        if on_gpu and self.settings.get("captured_step") != "never":
            # Graphs are made for the size of a whole run.
            self.run(self.job.workload.new_tokens)
            return
        super().warm_up()
        # On the CPU a step is recorded when calls have asked for enough of them; later calls gain by it.
        steps = min(_SHORT_CALL, self.job.workload.new_tokens)
        while self._waits_for_a_step(steps):
            steps = self.job.workload.new_tokens

    def _waits_for_a_step(self, steps: int) -> bool:
        """Makes a call; says whether it had no captured step, and one of the next calls may have one."""
        before = self._calls_that_wait()
        self.run(steps)
        return self._calls_that_wait() > before

    @staticmethod
    def _calls_that_wait() -> int:
        reasons = fastgen.stats().get(CAPTURED_STEP, {}).get("not used", {})
        return sum(calls for reason, calls in reasons.items() if reason.startswith(_NOT_YET))

    @contextmanager
    def active(self) -> Iterator[None]:
        before = {name: getattr(fastgen_settings.current(), name) for name in self.settings}
        if self.settings:
            fastgen.enable(**self.settings)
        try:
            yield
        finally:
            if before:
                fastgen.enable(**before)
