"""Transformers with `torch.compile` and the static cache, as its documentation recommends for speed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fastgen
from benchmarks.backends.base import Backend, Job, Unsupported


class Compiled(Backend):
    """The forward pass of the model is compiled; the decoding loop and the encoder stay as they are.

    On a GPU only the steps are, in the mode "reduce-overhead", which replays them as CUDA graphs: a prompt keeps the
    GPU busy without, and would take a second compilation.
    """

    compiles = True
    _forward: Any = None

    def setup(self, job: Job) -> None:
        super().setup(job)
        if not getattr(job.model, "_can_compile_fullgraph", False):
            raise Unsupported(f"Transformers does not compile {type(job.model).__name__}")
        if job.model.device.type == "cuda":
            self._forward = _compile_steps(job.model)
        else:
            self._forward = torch.compile(job.model.forward)

    def warm_up(self) -> None:
        # The static cache is as long as the output, and its shape is compiled into the code: only a whole run will do.
        self.run(self.job.workload.new_tokens)

    def run(self, new_tokens: int) -> Tensor:
        model = self.job.model
        # The loops of beam search call the model itself, so it is the model's own attribute that has to be compiled.
        # It is there only while this backend runs: the others use the same model.
        model.forward = self._forward
        # Greedy search compiles by itself on a GPU, which would be the same again around this.
        options = {"disable_compile": True} if model.device.type == "cuda" else {}
        try:
            with fastgen.disabled():
                return self.job.workload.generate(
                    model, self.job.inputs, new_tokens, cache_implementation="static", **options
                )
        finally:
            del model.forward

    def close(self) -> None:
        if self._forward is not None:
            self._forward = None
            # The compiled code is kept by torch, not by what was compiled.
            torch.compiler.reset()


def _compile_steps(model: Any) -> Callable[..., Any]:
    """The model's forward pass, compiled where it gets one token per row."""
    plain = model.forward
    step = torch.compile(plain, mode="reduce-overhead")
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"

    def forward(*args: Any, **kwargs: Any) -> Any:
        tokens = kwargs.get(name)
        if args or tokens is None or tokens.shape[1] != 1:
            return plain(*args, **kwargs)
        torch.compiler.cudagraph_mark_step_begin()
        return step(**kwargs)

    return forward
