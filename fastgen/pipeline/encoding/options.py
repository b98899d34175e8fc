"""The options of `fastgen-embed` and `fastgen-classify`, each set as one value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from fastgen.pipeline.errors import SetupError
from fastgen.pipeline.settings import STANDARD_STREAM, DataOptions, among, check_types, option

POOLINGS = ("mean", "cls", "max", "lasttoken", "weightedmean", "mean_sqrt_len_tokens")
"""How the vectors of tokens become one, by their names in sentence-transformers."""
SCORES = ("auto", "softmax", "sigmoid", "raw")
OUTPUT_DTYPES = ("float32", "float16")


@dataclass(frozen=True)
class EncodeOptions(DataOptions):
    """The options that both commands have. Inputs that are longer than the model takes are cut, and counted."""

    OTHERWISE: ClassVar[str] = "jsonl"

    max_length: int | None = option(
        None, "cut inputs to N tokens (default: what the model takes)", "--max-seq-length", group="model", least=1
    )
    batch_size: int | Literal["auto"] = option(
        64,
        "inputs in a batch at most, or auto for as many as fit into free memory (default: 64)",
        "--bs",
        "--per-device-eval-batch-size",
        least=1,
    )
    max_tokens: int | None = option(
        4096, "at most N tokens in a batch, padding included (default: 4096)", "--batch-tokens", least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        named = Path(self.output).suffix.lower().lstrip(".") in (*self.OUTPUTS, "ndjson")
        if not (named or self.to_stdout or self.output_format != "auto"):
            formats = ", ".join(f".{name}" for name in self.OUTPUTS)
            raise SetupError(f"{self.output} has no format: choose one of {formats}, or give --output-format")


@dataclass(frozen=True)
class EmbedOptions(EncodeOptions):
    """Every option of `fastgen-embed`."""

    OUTPUTS: ClassVar[tuple[str, ...]] = ("npy", "jsonl", "parquet")

    output_format: str = option("auto", "npy, jsonl or parquet (default: by the name; jsonl on standard output)")
    output_dtype: str = option("float32", "float32 or float16 (default: float32)", group="data")
    pooling: str | None = option(
        None,
        f"how tokens' vectors become one: {', '.join(POOLINGS)} (default: as the model's files say, or mean)",
        group="model",
    )
    normalize: bool = option(False, "scale every vector to length 1, also if the model's files do not say so")
    prompt: str | None = option(None, "text put before every input", "--prefix")
    prompt_name: str | None = option(None, "name of a prompt that comes with the model, such as query")

    def __post_init__(self) -> None:
        check_types(self)
        among("pooling", self.pooling or POOLINGS[0], POOLINGS)
        among("output_dtype", self.output_dtype, OUTPUT_DTYPES)
        if self.prompt is not None and self.prompt_name is not None:
            raise SetupError("give either a prompt or the name of one, not both")
        super().__post_init__()


@dataclass(frozen=True)
class ClassifyOptions(EncodeOptions):
    """Every option of `fastgen-classify`."""

    OUTPUTS: ClassVar[tuple[str, ...]] = ("jsonl", "csv", "parquet")

    output_format: str = option("auto", "jsonl, csv or parquet (default: by the name; jsonl on standard output)")
    pair_column: str | None = option(
        None, "column of a second text, for models of two texts", "--pair-field", group="data", free=True
    )
    top_k: int = option(
        1, "how many labels are written of each record, best first (default: 1)", group="model", least=1
    )
    scores: str = option(
        "auto",
        "softmax, sigmoid, or raw for the model's numbers as they are (default: sigmoid if a text may have several "
        "labels, raw if the model has one number, softmax otherwise)",
    )

    def __post_init__(self) -> None:
        check_types(self)
        among("scores", self.scores, SCORES)
        if self.pair_column and self.input == STANDARD_STREAM and self.input_format != "jsonl":
            raise SetupError("lines of text have no pair column: standard input needs --input-format jsonl")
        super().__post_init__()
