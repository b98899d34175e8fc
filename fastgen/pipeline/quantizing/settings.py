"""The options of `fastgen-quantize`, as one value, and OUT.partial, which makes a run resumable, and lets OUT appear at
once.

    OUT.partial/run.json              the run's identity, and earlier measurements
    OUT.partial/block-0003.safetensors  the quantised layers of a block, written under another name and renamed
    OUT.partial/model/                what OUT will be; its rename is the end of the run

A directory without such a run.json, or an OUT without a FastGen report, belongs to another program: it is not replaced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastgen.pipeline.errors import RESUMABLE, PipelineError, SetupError, one_line, writing
from fastgen.pipeline.generation.options import RunOptions
from fastgen.pipeline.journal import check_same, lock, sync
from fastgen.pipeline.layouts import read_back
from fastgen.pipeline.settings import DTYPES, STANDARD_STREAM, among, check_bounds, check_types, dtype_named, option
from fastgen.pipeline.writers import check_absent, check_writable, placed

METHODS = ("gptq", "rtn", "autoround")
_LEAST_GROUP = 8  # this many values of 4 bits fill an int32


@dataclass(frozen=True)
class QuantizeOptions:
    """What to quantise, and how. `model`, `output` and `calibration` are required; `rtn` needs no `calibration`.

    Raises `SetupError` for a value that an option cannot have, and for options that do not fit together.
    """

    model: str
    """A directory written by `save_pretrained`, a hub name, or a GGUF file, whose weights are unpacked first."""
    output: str
    """The directory to write."""

    bits: int = option(4, "bits of a weight, 4 or 8 (default: 4)")
    group_size: int = option(
        64, "inputs that share a scale; halved for layers whose inputs it does not divide (default: 64)"
    )
    method: str = option(
        "gptq", "gptq; rtn, which rounds to nearest; or autoround, with the package auto-round (default: gptq)"
    )
    asymmetric: bool = option(False, "store a zero point for each group")
    damping: float = option(0.01, "gptq: part of the mean activation that is added to each (default: 0.01)")
    iterations: int = option(
        200, "autoround: steps of tuning for each block, of 8 samples each (default: 200)", least=1
    )
    max_error: float | None = option(
        None, "keep 8 bits for layers whose output would change by more than this part, such as 0.05"
    )
    bits_per_weight: float | None = option(
        None, "give 8 bits to the layers that gain most by them, up to this average, such as 5; scales count"
    )
    output_layer: bool = option(False, "quantise the output layer too, and embeddings with the same weight")

    calibration: str = option(
        "",
        "text that the model should do well on: .txt, .jsonl, .csv, .tsv, .parquet or a data set; rtn needs none",
        group="text",
    )
    calibration_reference: str | None = option(
        None, "encoder-decoder: file of targets, a line each; otherwise they follow the sources after a TAB, or the "
        "model writes them"
    )  # fmt: skip
    samples: int = option(128, "how many samples of the text are used (default: 128)", least=1)
    sample_length: int = option(512, "tokens of a sample at most (default: 512)", least=1)
    evaluate: str | None = option(
        None, "other text, for the perplexity of a decoder-only model, or the BLEU of an encoder-decoder", free=True
    )
    reference: str | None = option(
        None, "file of references for --evaluate, a line each; otherwise they follow the sources after a TAB", free=True
    )
    input_column: str | None = option(None, "column of CALIBRATION and EVALUATE", "--text-column")
    reference_column: str | None = option(None, "column of CALIBRATION and EVALUATE with the targets")
    task: str = option("auto", "as for fastgen-generate")
    prefix: str | None = option(None, "text put before every source", "--source-prefix")
    src_lang: str | None = option(None, "source language, for multilingual models")
    tgt_lang: str | None = option(None, "target language, for multilingual models")

    device: str | None = option(None, "torch device (default: cuda where there is one, otherwise cpu)", group="running")
    dtype: str = option("auto", "fp32, fp16 or bf16 (default: that of the model)")
    overwrite: bool = option(
        False, "replace OUT, if fastgen-quantize wrote it, and drop what an interrupted run has left", free=True
    )
    resume: bool = option(False, "continue the interrupted run for this OUT", free=True)
    trust_remote_code: bool = option(False, "run code that comes with the model", free=True)
    quiet: bool = option(False, "no progress and no report on the terminal", free=True)

    def __post_init__(self) -> None:
        check_types(self)
        object.__setattr__(self, "dtype", dtype_named(self.dtype))
        among("bits", self.bits, (4, 8))
        among("method", self.method, METHODS)
        among("dtype", self.dtype, tuple(DTYPES))
        if self.group_size < _LEAST_GROUP or self.group_size % _LEAST_GROUP:
            raise SetupError(f"group-size is {self.group_size}: it must be a multiple of {_LEAST_GROUP}")
        check_bounds(self)
        numbers = {"damping": self.damping, "max-error": self.max_error, "bits-per-weight": self.bits_per_weight}
        for name, value in numbers.items():
            if value is not None and not (math.isfinite(value) and value > 0):
                raise SetupError(f"{name} is {value}: it must be more than 0")
        mixed = next((name for name in ("max-error", "bits-per-weight") if numbers[name] is not None), None)
        if mixed and self.bits == 8:
            raise SetupError(f"{mixed} gives layers 8 bits, which they have already: use it with 4 bits")
        if mixed and self.asymmetric:
            raise SetupError(f"{mixed} needs symmetric weights: Transformers cannot load a mixture of asymmetric ones")
        if self.max_error is not None and self.bits_per_weight is not None:
            raise SetupError("max-error and bits-per-weight both say which layers have 8 bits: give one of them")
        if self.method == "autoround" and self.bits == 8 and self.asymmetric:
            raise SetupError("autoround has no zero points with 8 bits: use gptq, or leave asymmetric out")
        if self.method == "autoround" and self.max_error is not None:
            raise SetupError("max-error is for gptq and rtn: with autoround, use bits-per-weight")
        if not self.calibration and mixed:
            raise SetupError(f"{mixed} measures layers on calibration text: --calibration FILE")
        if not self.calibration and self.method != "rtn":
            raise SetupError("give a file of calibration text: --calibration FILE (--method rtn needs none)")
        if STANDARD_STREAM in (self.calibration, self.evaluate, self.output):
            raise SetupError("standard input and output cannot be used: give files and a directory")
        if self.reference and not self.evaluate:
            raise SetupError("references need --evaluate FILE")

    @property
    def partial(self) -> Path:
        """Where the work so far is kept until OUT is complete."""
        return Path(self.output.rstrip("/") + ".partial")

    def reading(self, name: str, reference: str | None) -> RunOptions:
        """Returns the options of a run of `fastgen-generate` with the same model over a file."""
        shared = ("model", "task", "prefix", "src_lang", "tgt_lang", "device", "trust_remote_code", "input_column")
        column = None if reference else self.reference_column
        return RunOptions(
            input=name, output=STANDARD_STREAM, reference=reference, reference_column=column, quiet=True,
            **{field: getattr(self, field) for field in shared},
        )  # fmt: skip

    def decisive(self) -> dict[str, object]:
        """Returns the options that decide what the quantised layers are."""
        fields = (field for field in dataclasses.fields(self) if field.metadata and not field.metadata["free"])
        return {field.name: getattr(self, field.name) for field in fields} | {"model": None, "calibration": None}


REPORT = "report.json"
_RUN = "run.json"
_FIRST = ("lock", f".{_RUN}.unfinished")  # what a directory holds before it has a run.json
_KEY = "fastgen-quantize"  # in both files: the format, and the mark of FastGen
_VERSION = 1


def check_output(options: QuantizeOptions) -> None:
    """Raises `SetupError` if OUT cannot be written, or something would be replaced without being asked."""
    out, partial = Path(options.output), options.partial
    check_writable(partial / _RUN if partial.is_dir() else partial)
    if os.path.lexists(out) and _read(out / REPORT) is None:
        raise SetupError(f"{out} exists and was not written by fastgen-quantize: move it away, or choose another OUT")
    left = _read(partial / _RUN)
    if left is None and partial.is_dir() and any(path.name not in _FIRST for path in partial.iterdir()):
        raise SetupError(f"{partial} was not written by fastgen-quantize: move it away, or choose another OUT")
    if options.resume or options.overwrite:
        return
    if left is not None:
        raise SetupError(f"{partial} is left from an interrupted run (--resume continues it, --overwrite drops it)")
    check_absent(out)


def own_text(values: Mapping[str, Any]) -> str:
    """Returns the text of a report, or of a run.json, with the mark of FastGen."""
    return json.dumps({_KEY: _VERSION, **values}, indent=2, ensure_ascii=False) + "\n"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) and _KEY in values else None


class Work:
    """The directory of one run, locked against a second one with the same OUT.

    Args:
        identity: everything that decides what the quantised layers are. A run with another identity is not resumed.

    Raises:
        SetupError: another run writes it, or it belongs to other settings.
    """

    def __init__(self, options: QuantizeOptions, identity: Mapping[str, Any]) -> None:
        self.path = options.partial
        self._out = Path(options.output)
        self.identity = read_back(identity)
        self._lock = contextlib.ExitStack()
        self.measured: dict[str, Any] = {}
        """The measurements of the model before it was changed."""
        self.complete = False
        """Whether OUT is already the result of this run, which is only to be resumed."""
        with writing(self.path):
            self.path.mkdir(exist_ok=True)
            handle = self._lock.enter_context((self.path / "lock").open("ab"))
        try:
            lock(handle, self.path / "lock")
            check_output(options)
            if options.resume and self._is_in_place():
                self.complete = True
                self._drop()
                return
            before = _read(self.path / _RUN) if options.resume else None
            if before is not None:
                self._take_over(before)
            elif os.path.lexists(self._out) and not options.overwrite:
                self._drop()  # it is empty: nothing of this run is left
                raise SetupError(f"{self._out} is not of this model, text and options (--overwrite replaces it)")
            else:
                self._clear()
                self.keep({})
        except BaseException:
            self._lock.close()
            raise

    def _is_in_place(self) -> bool:
        return (_read(self._out / REPORT) or {}).get("identity") == self.identity

    def _clear(self) -> None:
        with writing(self.path):
            # The file that identifies the directory goes last: after a kill, it can still be replaced.
            for path in sorted(self.path.iterdir(), key=lambda path: path.name == _RUN):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name != "lock":
                    path.unlink()

    def _take_over(self, before: Mapping[str, Any]) -> None:
        if before[_KEY] != _VERSION:
            raise SetupError(f"cannot resume: {self.path} was written by another version of fastgen")
        if not isinstance(before.get("identity"), dict) or not isinstance(before.get("measured"), dict):
            raise SetupError(f"cannot resume: {self.path / _RUN} is damaged (--overwrite starts over)")
        check_same(before["identity"], self.identity)
        self.measured = before["measured"]

    def keep(self, measured: Mapping[str, Any]) -> None:
        """Writes measurements of the original model, with the identity of the run."""
        self.measured = dict(measured)
        with self.placed(_RUN) as path:
            path.write_text(own_text({"identity": self.identity, "measured": self.measured}), encoding="utf-8")

    def block(self, number: int) -> Path:
        """Returns where the layers of a block are kept, once it is finished."""
        return self.path / f"block-{number:04d}.safetensors"

    @contextlib.contextmanager
    def placed(self, name: str) -> Iterator[Path]:
        """Yields a path to write to; the file takes its name when the block ends without an error."""
        path = self.path / name
        with saving(path), placed(path, remedy=RESUMABLE) as unfinished:
            yield unfinished

    @property
    def model(self) -> Path:
        """Where OUT is built."""
        return self.path / "model"

    def finish(self) -> None:
        """Puts OUT in place and drops the rest."""
        with writing(self._out, RESUMABLE):
            for path in self.model.rglob("*"):
                if path.is_file():
                    sync(path)
            if os.path.lexists(self._out):
                os.rename(self._out, self.path / "replaced")
            os.rename(self.model, self._out)
        self._drop()

    def _drop(self) -> None:
        # While it is locked: unlocked, it may belong to another run.
        with contextlib.suppress(OSError, PipelineError):
            self._clear()
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def close(self) -> None:
        """Releases the lock; finished work stays."""
        self._lock.close()


@contextlib.contextmanager
def saving(path: Path) -> Iterator[None]:
    """Turns an error of the system, or of safetensors, in this block into a PipelineError on one line."""
    from safetensors import SafetensorError

    try:
        with writing(path, RESUMABLE):
            yield
    except SafetensorError as error:
        raise PipelineError(f"cannot write {path}: {one_line(error)} ({RESUMABLE})") from error
