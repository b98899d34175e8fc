"""The options of `fastgen-quantize`, as one value."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from fastgen.pipeline.errors import SetupError
from fastgen.pipeline.generation.options import RunOptions
from fastgen.pipeline.settings import DTYPES, STANDARD_STREAM, among, check_bounds, check_types, dtype_named, option

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
