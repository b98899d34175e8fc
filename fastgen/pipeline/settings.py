"""What a run is asked to do, as one value."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fastgen import settings as switches
from fastgen.pipeline.errors import SetupError

TEXT_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}
INPUT_FORMATS = ("auto", "txt", "jsonl", "csv", "tsv", "parquet", "dataset")
OUTPUT_FORMATS = ("auto", "txt", "jsonl", "parquet")
METRICS = ("bleu", "rouge", "chrf", "exact")
DTYPES = ("fp32", "fp16", "bf16")
STANDARD_STREAM = "-"


@dataclass(frozen=True)
class Settings:
    """Every setting of a run. Only `model`, `input` and `output` are needed; the rest has the defaults shown."""

    model: str
    """A directory written by `save_pretrained`, or a hub name."""
    input: str
    """A .txt, .jsonl, .csv, .tsv or .parquet file, a `datasets` name or saved data set, or `-` (standard input)."""
    output: str
    """A .txt (or any other name: text), .jsonl or .parquet file, or `-` (standard output)."""

    generation: Mapping[str, Any] = field(default_factory=dict)
    """`GenerationConfig` fields that override the model's own."""
    generation_config: str | None = None
    """A JSON file (or a directory with generation_config.json) applied before `generation`."""

    input_format: str = "auto"
    output_format: str = "auto"
    input_column: str | None = None
    """The column to read; `a.b` reads field `b` of column `a`."""
    id_column: str | None = None
    """The column that names a record in the output; without it, the position of the record counted from 0."""
    reference_column: str | None = None
    dataset_config: str | None = None
    split: str | None = None

    task: str = "auto"
    prefix: str | None = None
    src_lang: str | None = None
    tgt_lang: str | None = None

    device: str | None = None
    """A torch device; by default cuda where there is one, otherwise cpu."""
    dtype: str = "fp32"
    cpu_weights: str = field(default_factory=lambda: switches.current().cpu_weights)
    """The precision of the packed weights of a model in fp32 on a CPU: fp32, int8 or bf16 (`fastgen.enable`)."""
    batch_size: int | Literal["auto"] = 16
    max_tokens: int | None = None
    """At most this many input tokens in a batch, padding included."""
    max_source_length: int | None = None
    """Inputs are truncated to this many tokens."""
    truncation: bool = False
    """Truncate inputs that have more tokens than the model has positions, instead of reporting them."""

    reference: str | None = None
    metrics: tuple[str, ...] = ()
    score_path: str | None = None
    report: str | None = None

    limit: int | None = None
    resume: bool = False
    """Continue the interrupted run for this output, whose own files beside the output are rewritten."""
    overwrite: bool = False
    """Replace what exists of OUTPUT, its error file, the score path and the report, when the run is complete."""
    strict: bool = False
    quiet: bool = False
    workers: int | None = None
    """Worker processes for detokenising and metrics; 0 does that work in a thread of this process."""
    detokenizer: str | None = None
    lang: str | None = None
    """The language of the detokenizer; by default `tgt_lang`, then `en`."""
    trust_remote_code: bool = False
    seed: int = 42
    include_prompt: bool = False
    token_ids: bool = False
    """Also write the generated token ids (.jsonl and .parquet)."""

    def __post_init__(self) -> None:
        _among("input_format", self.input_format, INPUT_FORMATS)
        _among("output_format", self.output_format, OUTPUT_FORMATS)
        _among("dtype", self.dtype, DTYPES)
        try:
            dataclasses.replace(switches.current(), cpu_weights=self.cpu_weights)
        except ValueError as error:
            raise SetupError(str(error)) from error
        if self.detokenizer not in (None, "none", "moses"):
            raise SetupError(f"detokenizer is {self.detokenizer!r}: it must be moses or none")
        unknown = [name for name in self.metrics if name not in METRICS]
        if unknown:
            raise SetupError(f"unknown metric {unknown[0]!r}: choose from {', '.join(METRICS)}")
        if self.metrics and not (self.reference or self.reference_column):
            raise SetupError("metrics need references: give a reference file or a reference column")
        if self.reference and self.reference_column:
            raise SetupError("give either a reference file or a reference column, not both")
        if self.score_path and not (self.reference or self.reference_column):
            raise SetupError("a score path needs references: give a reference file or a reference column")
        if self.batch_size != "auto" and self.batch_size < 1:
            raise SetupError(f"batch size is {self.batch_size}: it must be at least 1, or auto")
        for name in ("max_tokens", "max_source_length", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SetupError(f"{name.replace('_', '-')} is {value}: it must be at least 1")
        if self.workers is not None and self.workers < 0:
            raise SetupError(f"workers is {self.workers}: it must be 0 or more")
        if self.resume and self.output == STANDARD_STREAM:
            raise SetupError("resume needs an output file: standard output cannot be continued")
        if self.to_stdout and self.resolved_output_format == "parquet":
            raise SetupError("parquet cannot be written to standard output")
        self._check_distinct()

    def _check_distinct(self) -> None:
        """A SetupError where a file that is written is one that is read, or is written twice."""
        read: list[tuple[str, str | None]] = [
            ("INPUT", self.input if not self.from_stdin and Path(self.input).exists() else None),
            ("the reference", self.reference),
            ("the generation config", self.generation_config),
        ]
        written: list[tuple[str, str | os.PathLike[str] | None]] = []
        if not self.to_stdout:
            written = [
                ("OUTPUT", self.output),
                ("the work file of OUTPUT", self.partial_path),
                ("the unfinished OUTPUT", unfinished_path(Path(self.output))),
                ("the error file of OUTPUT", self.errors_path),
                ("the unfinished error file of OUTPUT", self.errors_partial_path),
            ]
        written += [("the score path", self.score_path), ("the report", self.report)]
        seen = [(what, Path(path)) for what, path in read if path]
        for what, name in written:
            if name is None:
                continue
            path = Path(name)
            for other, there in seen:
                if _same_file(path, there):
                    raise SetupError(f"{other} and {what} are the same file: {path}")
            seen.append((what, path))

    @property
    def from_stdin(self) -> bool:
        """Whether the input is standard input."""
        return self.input == STANDARD_STREAM

    @property
    def to_stdout(self) -> bool:
        """Whether the output is standard output."""
        return self.output == STANDARD_STREAM

    @property
    def resolved_output_format(self) -> str:
        """The output format asked for, or the one that the file's name says; text where it says nothing."""
        if self.output_format != "auto":
            return self.output_format
        named = TEXT_SUFFIXES.get(Path(self.output).suffix.lower())
        return named if named in ("jsonl", "parquet") else "txt"

    @property
    def to_text(self) -> bool:
        """Whether the output is lines of text, which have no room for scores."""
        return self.resolved_output_format == "txt"

    @property
    def partial_path(self) -> Path:
        """Where the work so far is kept until the output is complete."""
        return Path(self.output + ".partial")

    @property
    def errors_path(self) -> Path:
        """Where skipped records are reported."""
        return Path(self.output + ".errors.jsonl")

    @property
    def errors_partial_path(self) -> Path:
        """Where skipped records are reported until the output is complete."""
        return Path(self.output + ".errors.jsonl.partial")


def unfinished_path(path: Path) -> Path:
    """Where a file is written before it takes its name. The suffix stays last, for formats that are told by it."""
    path = followed(path)
    return path.with_name(f".{path.name}.unfinished")


def followed(path: Path) -> Path:
    """What a link leads to: the file is replaced, not the link."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def is_special(path: Path) -> bool:
    """Whether a path is a device, a pipe or the like, which is written to and cannot be replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _same_file(one: Path, other: Path) -> bool:
    if is_special(one) or is_special(other):
        return False
    # By name as well, for files that do not exist yet.
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    return one.exists() and other.exists() and one.samefile(other)


def _among(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise SetupError(f"{name.replace('_', '-')} is {value!r}: choose from {', '.join(allowed)}")
