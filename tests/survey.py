"""What the installed release of Transformers has accelerated: every model of the grid, encoders, and commands.

Each call runs with the original code and with FastGen, by default and with captured steps, and results are compared.
What a cell of a table says is what `fastgen.stats()` counted. docs/support.md and the report of `make test-newest` are
made of this.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import re
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import fastgen
from fastgen import counters, patching, settings
from fastgen.decoding.kv import growing as kv
from fastgen.optimizer.transformers.captured import graph_cache
from tests.equivalence import encoder_models
from tests.equivalence.cases import DECODING
from tests.equivalence.check import run
from tests.equivalence.models import Family
from tests.equivalence.test_fallbacks import WITHOUT_BEAMS
from tests.models import tiny_unilm
from tests.near_ties import check
from tests.ops.instructions import threads
from tests.pipeline import tiny

ROOT = Path(__file__).parents[1]
_PACKAGE = Path(fastgen.__file__).parent
ACCELERATED, CAPTURED = "accelerated", "captured"
# Columns of the tables of models, and the cases of the grid that each stands for.
WAYS = {
    "beam search": ["beam", "beam, 3 returned", "beam sampling"],
    "several samples": ["sampling, 4 returned"],
    "one sequence": ["greedy", "sampling"],
}
CAPTURED_STEP = "captured step"
# Long enough for a step to be worth capturing.
_LONGER = {"max_new_tokens": 24, "min_new_tokens": 12}
# Encoders with a head that reads padding.
_READS_PADDING = {"EuroBert"}


@dataclass
class Cell:
    """What became of the calls that a cell of a table stands for.

    Attributes:
        outcomes: in words.
        problems: the cases with an outcome that must not be, and that outcome.
    """

    outcomes: list[str] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)

    def add(self, case: str, expected: list[str], make: Callable[[], str]) -> None:
        """Adds an outcome, and a problem if it is none of the expected ones."""
        try:
            found = make()
        except AssertionError as error:
            found = f"other results: {_one_line(error)}"
        except Exception as error:
            found = f"{type(error).__name__}: {_one_line(error)}"
        self.outcomes.append(found)
        if found not in expected:
            self.problems.append((case, found))

    def __str__(self) -> str:
        order = sorted(set(self.outcomes), key=lambda text: (text not in (ACCELERATED, CAPTURED), text))
        return "; ".join(order)


Row = tuple[str, dict[str, Cell]]
"""A model, and a cell for each column."""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


@contextlib.contextmanager
def surveying() -> Iterator[None]:
    """Inside this block tiny models are treated as large ones are, on one thread: several would wait for each other."""
    with threads(1), mock.patch.object(kv, "MIN_SHARED_BYTES", 0):
        yield


# ---- models that generate


def outcome(model: Any, inputs: dict[str, Any], options: Any) -> str:
    """ACCELERATED, or "original" and the reason. Raises AssertionError if the results differ."""
    fastgen.reset_stats()
    check(lambda: run(model, inputs, options))
    found = counters.Outcome.of(fastgen.stats(), counters.GENERATE)
    return ACCELERATED if found.accelerated else f"original: {next(iter(found.reasons), 'FastGen was not called')}"


def captured_outcome(
    model: Any, inputs: dict[str, Any], options: dict[str, Any], longer: dict[str, Any] = _LONGER
) -> str:
    """CAPTURED, or why not. Raises AssertionError if the results differ."""
    with settings.changed(captured_step="always"):
        found = outcome(model, inputs, {**options, **longer})
    steps = fastgen.stats().get(counters.CAPTURED_STEP, {})
    if found != ACCELERATED or steps.get("accelerated"):
        return CAPTURED if found == ACCELERATED else found
    return f"not captured: {next(iter(steps.get('not used', {})), 'the decoding loop is not hooked')}"


def rows(families: Iterable[Family]) -> list[Row]:
    """A row per model class."""
    found: dict[str, dict[str, Cell]] = {}
    for family in families:
        row = found.setdefault(family.model_class, {column: Cell() for column in (*WAYS, CAPTURED_STEP)})
        model, inputs = copy.deepcopy(family.build()), family.make_inputs()
        for column, name in _cases():
            options = DECODING[name]
            if family.name in WITHOUT_BEAMS and "num_beams" in options:
                row[column].outcomes.append("refused by Transformers")
                continue
            usual = ["original: more positions than the sliding window"] if family.exceeds_window(options) else []
            row[column].add(name, [ACCELERATED, *usual], partial(outcome, model, inputs, options))
            row[CAPTURED_STEP].add(name, [CAPTURED, *usual], partial(captured_outcome, model, inputs, options))
        graph_cache.drop(model)
    return list(found.items())


def unilm() -> list[Row]:
    """FastGen's own model."""
    model = tiny_unilm.tiny_model(end=3.0)
    inputs = tiny_unilm.batch(tiny_unilm.sources(44, 12, 37), "left")
    row = {column: Cell() for column in (*WAYS, CAPTURED_STEP)}
    for column, name in _cases():
        options = {**DECODING[name], "max_new_tokens": 24}
        row[column].add(name, [ACCELERATED], partial(outcome, model, inputs, options))
        row[CAPTURED_STEP].add(name, [CAPTURED], partial(captured_outcome, model, inputs, options))
    return [(f"{type(model).__name__} (of FastGen)", row)]


def _cases() -> Iterator[tuple[str, str]]:
    """Columns, and the cases that each stands for, one after the other."""
    return ((column, name) for column, names in WAYS.items() for name in names)


# ---- encoders


def encoders() -> list[Row]:
    """A row for each architecture whose padding is left out."""
    found = []
    for architecture in (*encoder_models.WITHOUT_PADDING, *encoder_models.OF_SEQ2SEQ):
        if encoder_models.class_of(architecture) is None:
            continue  # this release does not have it
        row = {"states": Cell(), "classes": Cell()}
        row["states"].add("padding=zero", [ACCELERATED], partial(_encoded, architecture, "", "zero"))
        if architecture in encoder_models.WITHOUT_PADDING and architecture not in _READS_PADDING:
            head = "SequenceClassification"
            if encoder_models.class_of(architecture, head) is not None:
                row["classes"].add("padding=exact", [ACCELERATED], partial(_encoded, architecture, head, "exact"))
        found.append((architecture, row))
    return found


def _encoded(architecture: str, head: str, padding: str) -> str:
    """ACCELERATED, or "original" and the reason. Raises AssertionError if the results differ at tokens."""
    model, given = encoder_models.build(architecture, head), encoder_models.inputs([7, 40, 20, 6, 21])
    fastgen.reset_stats()
    with settings.changed(padding=padding):
        result, expected = encoder_models.both(model, given)
    encoder_models.assert_close(result[0], expected[0], at=None if head else given["attention_mask"])
    found = counters.Outcome.of(fastgen.stats(), counters.ENCODER)
    return ACCELERATED if found.accelerated else f"original: {next(iter(found.reasons), 'FastGen was not called')}"


# ---- commands


def commands() -> list[Row]:
    """A row for each command over a data set, and for `python -m fastgen`."""
    cell = Cell()
    cell.add("first line", [ACCELERATED], _installation)
    found = [("python -m fastgen", {"outcome": cell})]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "in.txt")
        source.write_text("\n".join(tiny.sentences(40)) + "\n")
        makers = {"bart": tiny.bart, "bert": tiny.bert, "labels": partial(tiny.bert, labels=3)}
        models = {name: make(Path(folder, name)) for name, make in makers.items()}
        for program, model, form, more in (
            ("generate", "bart", "jsonl", ["--num-beams", "2", "--max-new-tokens", "8"]),
            ("embed", "bert", "npy", ["--max-tokens", "100000", "--batch-size", "64"]),
            ("classify", "labels", "csv", ["--max-tokens", "100000", "--batch-size", "64"]),
        ):
            words = [str(models[model]), str(source), "--device", "cpu", *more]
            cell = Cell()
            cell.add("a run", [ACCELERATED], partial(_command, program, words, Path(folder), form))
            found.append((f"fastgen-{program}", {"outcome": cell}))
    return found


def _installation() -> str:
    first = _python("-m", "fastgen").stdout.splitlines()[0]
    return ACCELERATED if first.startswith("FastGen accelerates here") else first


def _command(program: str, words: list[str], folder: Path, form: str) -> str:
    """ACCELERATED, or what the command says in its last line. Raises AssertionError if the outputs differ."""
    outputs = [folder / f"{program}-{way}.{form}" for way in ("original", "fastgen")]
    for output, more in zip(outputs, (["--no-fastgen"], []), strict=True):
        model, source, *options = words
        script = Path(sys.executable).with_name(f"fastgen-{program}")  # it is Python, too
        done = _python(str(script), model, source, str(output), *options, *more)
    assert "deprecat" not in done.stderr, done.stderr
    if form == "npy":
        import numpy

        numpy.testing.assert_allclose(*map(numpy.load, outputs), rtol=1e-4, atol=1e-5)
    else:
        original, own = (_rounded(output.read_text()) for output in outputs)
        assert own == original, "the outputs differ"
    last = done.stderr.splitlines()[-1]
    return ACCELERATED if says_accelerated(last) else last


def says_accelerated(line: str) -> bool:
    """Whether the last line of a command says that FastGen accelerated calls."""
    return "; accelerated by FastGen: " in line


def _rounded(text: str) -> str:
    """Scores have the last digits that they are summed up with."""
    return re.sub(r"-?\d+\.\d+(e-?\d+)?", lambda number: f"{float(number[0]):.3f}", text)


def _python(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FASTGEN_CACHE": ""}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, *words], env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode and words[1] != "fastgen":
        raise RuntimeError(f"status {done.returncode}: {done.stderr.splitlines()[-1:]}")
    return done


# ---- warnings


class Deprecations(logging.Handler):
    """What the library says of names and arguments that it gives up, where only FastGen's calls have it say so."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[bool, dict[str, str]] = {True: {}, False: {}}  # with FastGen and without: texts and places

    @property
    def caused(self) -> list[str]:
        """With FastGen only, with the lines of FastGen's that the library was called from."""
        return [f"{text} ({place})" for text, place in self._said[True].items() if text not in self._said[False]]

    def emit(self, record: logging.LogRecord) -> None:
        self._note(record.getMessage(), is_deprecation="deprecat" in record.getMessage())

    def _note(self, text: str, is_deprecation: bool) -> None:
        if is_deprecation:
            # The innermost of them may be a hook that hands on what another one has called.
            lines = [
                f"{Path(frame.filename).relative_to(_PACKAGE)}:{frame.lineno}"
                for frame in traceback.extract_stack()
                if _PACKAGE in Path(frame.filename).parents and frame.filename != patching.__file__
            ]
            self._said[patching.is_active()].setdefault(" ".join(text.split()), " > ".join(lines[-3:]))

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Inside this block everything that the library warns of is looked at, also what it says but once."""

        def show(message: Any, category: type[Warning], *_: Any, **__: Any) -> None:
            kinds = (FutureWarning, DeprecationWarning, PendingDeprecationWarning)
            self._note(str(message), issubclass(category, kinds))

        with (
            warnings.catch_warnings(),
            mock.patch.object(warnings, "showwarning", show),
            mock.patch.object(logging.getLogger("transformers"), "handlers", [self]),
            mock.patch.object(logging.Logger, "warning_once", logging.Logger.warning),
        ):
            warnings.simplefilter("always")
            yield
