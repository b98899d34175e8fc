"""What a backend is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Unsupported(Exception):
    """A backend cannot do this work here; the message is the reason, for the reader of the results."""


class Task(Protocol):
    """What a workload says of the generation that its backends do."""

    new_tokens: int
    options: Mapping[str, Any]
    exact: bool
    entry_point: str

    def build(self, device: torch.device) -> tuple[Any, dict[str, Tensor]]:
        """The model and its inputs."""

    def smallest(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The shortest useful part of the inputs, for a warm-up."""

    def generate(self, model: Any, inputs: dict[str, Tensor], new_tokens: int | None = None, **more: Any) -> Tensor:
        """One run of the model's own `generate`; returns the tokens."""


@dataclass(frozen=True)
class Job:
    """What a backend has to do.

    Attributes:
        workload: says how much to generate, and with which options.
        model: the model in Transformers. A backend that converts it leaves it as it is.
        inputs: "input_ids" and "attention_mask".
        threads: to use.
    """

    workload: Task
    model: Any
    inputs: dict[str, Tensor]
    threads: int

    def shape(self) -> tuple[int, int]:
        """Of the tokens to make, with the prompt or the decoder's start token before them."""
        rows, length = self.inputs["input_ids"].shape
        rows *= self.workload.options.get("num_return_sequences", 1)
        return rows, self.workload.new_tokens + (1 if self.model.config.is_encoder_decoder else length)


class Backend(ABC):
    """One way to do the work. It is set up once, run a few times interleaved with the others, and closed.

    Attributes:
        name: how the options and the results call it.
        fastgen: it is FastGen that is measured, not what FastGen is compared with.
        must_equal: the backend whose tokens it must make; None where other arithmetic may lead to others.
        rival: the backend of FastGen that it is held against.
        version: of what does the work, where that is not in the versions of the whole run.
        warm_up_seconds: set by the harness.
    """

    fastgen = False
    must_equal: str | None = None
    version: str | None = None
    warm_up_seconds: float

    def __init__(self, name: str, rival: str = "fastgen") -> None:
        self.name = name
        self.rival = rival

    def setup(self, job: Job) -> None:
        """Gets ready; not timed.

        Raises:
            Unsupported: this backend cannot do the job.
        """
        self.job = job

    def warm_up(self) -> None:
        """Makes whatever happens only once happen before the timing."""
        # A few steps touch all code and weights, and give caches of prepared weights the time to fill.
        self.run(min(3, self.job.workload.new_tokens))

    @abstractmethod
    def run(self, new_tokens: int) -> Tensor:
        """One timed run; returns the tokens as `generate` does: with the prompt, or with the decoder's start token."""

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Gives back what `setup` took. Called in every case, also where that failed."""
