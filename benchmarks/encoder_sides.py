"""The sides of the benchmark of encoders: Transformers, FastGen, and libraries in processes of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

import fastgen
from benchmarks.backends import elsewhere
from fastgen.optimizer.transformers.captured import pays

Batch = dict[str, Tensor]
BASELINE, SUBJECT = "Transformers", "FastGen"
# What the others are called: their environment.
ELSEWHERE = {"OpenVINO": "openvino", "ONNX Runtime": "onnxruntime"}
SIDES = (BASELINE, *ELSEWHERE, SUBJECT)


def run(model: Any, some: list[Batch], side: str) -> list[Tensor]:
    """The states at real tokens, of each batch, by a model of this process."""
    with torch.inference_mode():
        if side == BASELINE:
            with fastgen.disabled():
                return [_states(model, batch) for batch in some]
        return [_states(model, batch) for batch in some]


def _states(model: Any, batch: Batch) -> Tensor:
    return model(**batch).last_hidden_state[batch["attention_mask"].bool()]


class Side(Protocol):
    """One way to run batches."""

    def run(self) -> None:
        """Runs all of them."""

    def states(self) -> list[Tensor]:
        """The states at real tokens, of each batch, as they were in the last run."""

    def close(self) -> None: ...


class Here:
    """A model in this process, with FastGen or without it."""

    def __init__(self, name: str, model: Any, some: list[Batch]) -> None:
        self._name, self._model, self._some = name, model, some
        if name == SUBJECT and len(some) > 1 and all(some[0] is each for each in some):
            for _ in range(-(-pays.PASSES // len(some))):  # as often as a pass must have come to be recorded
                self.run()

    def run(self) -> None:
        self._states = run(self._model, self._some, self._name)

    def states(self) -> list[Tensor]:
        return self._states

    def close(self) -> None:
        pass


class There:
    """The model in another library, which has exported it to its own form.

    Raises:
        Unsupported: its environment is not there.
        RuntimeError: it could not.
    """

    script = Path(elsewhere.__file__).with_name("encoder_process.py")

    def __init__(self, name: str, model: Any, some: list[Batch]) -> None:
        self._process = elsewhere.Process(name, elsewhere.python_of(ELSEWHERE[name], name), self.script)
        folder = self._process.folder
        question = {"library": ELSEWHERE[name], "folder": str(folder / "model"), "batches": str(folder / "batches")}
        try:
            model.save_pretrained(folder / "model")
            torch.save([(batch["input_ids"], batch["attention_mask"]) for batch in some], folder / "batches")
            self._process.ask({"threads": torch.get_num_threads(), **question})
        except BaseException:
            self.close()
            raise

    def run(self) -> None:
        self._process.ask(None)

    def states(self) -> list[Tensor]:
        self._process.ask(str(self._process.folder / "states"))
        return torch.load(self._process.folder / "states")

    def close(self) -> None:
        self._process.close()


def make(name: str, model: Any, some: list[Batch]) -> Side:
    """The side of this name."""
    return There(name, model, some) if name in ELSEWHERE else Here(name, model, some)
