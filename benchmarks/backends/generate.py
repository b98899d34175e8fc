"""`model.generate` unpatched, and with FastGen."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import Tensor

import fastgen
from benchmarks import smollm2
from benchmarks.backends import Backend, Job, Unsupported
from fastgen import settings as fastgen_settings
from fastgen.ops.linear import choose

CAPTURED_STEP = "transformers.captured_step"  # its name in `fastgen.stats()`
_NOT_YET = "too few steps so far"  # reason of a call without a captured step that a later call will have
_SHORT_CALL = 8  # new tokens of the shortest call that may have one


class Unpatched(Backend):
    """The library alone: the baseline."""

    exact = True
    options: Mapping[str, Any] = {}

    def active(self) -> AbstractContextManager[Any]:
        """Makes `generate` work in this backend's way inside the block."""
        return fastgen.disabled()

    def run(self, new_tokens: int) -> Tensor:
        with self.active():
            return self.job.workload.generate(self.job.model, self.job.inputs, new_tokens, **self.options)


class Patched(Unpatched):
    """FastGen, optionally with other settings than its defaults; lower precisions may change the tokens.

    Args:
        name, rivals: of the backend.
        settings: for `fastgen.enable`.
        options: for `generate`, besides those of the workload.
    """

    fastgen = True

    def __init__(
        self,
        name: str,
        settings: Mapping[str, Any] = {},
        options: Mapping[str, Any] = {},
        rivals: tuple[str, ...] = (),
    ) -> None:
        super().__init__(name, rivals)
        self.settings, self.options = settings, options
        self.exact = "weight_dtype" not in settings

    def setup(self, job: Job) -> None:
        super().setup(job)
        precision = self.settings.get("weight_dtype", "fp32")
        if precision != "fp32":
            reason = "it is for the CPU" if job.model.device.type != "cpu" else choose.unavailable(precision)
            if reason is not None:
                raise Unsupported(f"FastGen stays in float32: {reason}")

    def warm_up(self) -> None:
        on_gpu = any(value.device.type == "cuda" for value in self.job.inputs.values())
        if on_gpu and self.settings.get("captured_step") != "never":
            # Graphs are captured for the size of a whole run.
            self.run(self.job.workload.new_tokens)
            return
        super().warm_up()
        # On the CPU a step is captured after calls have taken enough steps; later calls profit.
        steps = min(_SHORT_CALL, self.job.workload.new_tokens)
        while self._waits_for_a_step(steps):
            steps = self.job.workload.new_tokens

    def _waits_for_a_step(self, steps: int) -> bool:
        """Makes a call; returns whether it had no captured step, and a later call may have one."""
        before = self._calls_that_wait()
        self.run(steps)
        return self._calls_that_wait() > before

    @staticmethod
    def _calls_that_wait() -> int:
        reasons = fastgen.stats().get(CAPTURED_STEP, {}).get("not used", {})
        return sum(calls for reason, calls in reasons.items() if reason.startswith(_NOT_YET))

    def active(self) -> AbstractContextManager[Any]:
        return fastgen_settings.changed(**self.settings)


class Drafted(Patched):
    """FastGen with drafts, which change no token of greedy search in float32."""

    _CALLS = 6  # until drafting is prepared, and the draft lengths have settled

    def __init__(self, name: str, **arguments: Any) -> None:
        super().__init__(name, rivals=("fastgen-captured",), **arguments)

    def setup(self, job: Job) -> None:
        super().setup(job)
        self.exact = not job.workload.options.get("do_sample")

    def warm_up(self) -> None:
        for _ in range(self._CALLS):
            self.run(self.job.workload.new_tokens)


class KeptBits(Patched):
    """The GGUF file beside the model, in its own bits, with captured steps.

    Args:
        name: of the backend.
        activations: "float", or "int8", as in other libraries.
    """

    def __init__(self, name: str, activations: str) -> None:
        super().__init__(name, {"captured_step": "always"}, rivals=("fastgen",))
        self.exact = False
        self._activations = activations

    def setup(self, job: Job) -> None:
        from transformers import AutoModelForCausalLM

        file = smollm2.gguf_of(job.model)
        if not file.is_file():
            raise Unsupported(f"there is no {smollm2.GGUF} beside the model")
        keep = fastgen.KeepBits(activations=self._activations)
        kept = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, quantization_config=keep, dtype=job.model.dtype
        )
        kept.generation_config = job.model.generation_config
        super().setup(replace(job, model=kept.eval()))
