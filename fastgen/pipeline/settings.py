"""The options of a run over a data set, as one value, and the files of the run.

`DataOptions` are those of every command that works on a data set, `RunOptions` those of `fastgen-generate` and
`generate_dataset`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from fastgen import settings as process_settings
from fastgen.pipeline.errors import SetupError
from fastgen.pipeline.option_types import check_types

TEXT_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}
INPUT_FORMATS = ("auto", "txt", "jsonl", "csv", "tsv", "parquet", "dataset")
_OUTPUT_SUFFIXES = TEXT_SUFFIXES | {".npy": "npy"}
_NOT_STREAMED = ("npy", "parquet")  # formats that are not written from front to back
METRICS = ("bleu", "rouge", "chrf", "exact")
DTYPES = ("fp32", "fp16", "bf16")
STANDARD_STREAM = "-"
_MOST_WORKERS = 1024  # processes


def option(default: Any, help: str, *aliases: str, group: str = "", free: bool = False, rare: bool = False) -> Any:
    """A field that is an option of the command line as well.

    Args:
        default: what it is where it is not given, or a function that says so.
        help: one sentence about it.
        aliases: other names of the option; its own is that of the field.
        group: title of the group of options that begins with this one.
        free: it cannot change the output, so an interrupted run may be resumed with another value.
        rare: the short page of help leaves it out.
    """
    about = {"help": help, "aliases": aliases, "group": group, "free": free, "rare": rare}
    if callable(default):
        return field(default_factory=default, metadata=about)
    return field(default=default, metadata=about)


@dataclass(frozen=True)
class DataOptions:
    """The options of every run over a data set.

    Raises `SetupError` for a value that an option cannot have, and for options that do not fit together.
    """

    OUTPUTS: ClassVar[tuple[str, ...]] = ()
    """The formats of OUTPUT."""
    OTHERWISE: ClassVar[str]
    """That of a name which says nothing."""

    model: str
    """A directory written by `save_pretrained`, a GGUF file, or a hub name."""
    input: str
    """A .txt, .jsonl, .csv, .tsv or .parquet file, a `datasets` name or saved data set, or `-` (standard input)."""
    output: str
    """A file in one of the formats that the command writes, or `-` (standard output)."""

    input_column: str | None = option(
        None, "column to read; a.b is field b of column a", "--text-column", group="data", free=True
    )
    id_column: str | None = option(
        None, "column that names the records in the output (default: 0, 1, 2, ...)", free=True
    )
    input_format: str = option("auto", "txt, jsonl, csv, tsv, parquet or dataset (default: by the name)", rare=True)
    output_format: str = option("auto", "format of OUTPUT (default: by the name)", rare=True)
    dataset_config: str | None = option(
        None, "configuration of the data set INPUT names", "--dataset-config-name", rare=True
    )
    split: str | None = option(None, "split of the data set (default: test, validation, or the only one)")
    limit: int | None = option(
        None, "do only the first N records", "--n-obs", "--max-eval-samples", "--max-predict-samples", free=True
    )
    overwrite: bool = option(
        False,
        "replace OUTPUT and all that is written beside it when the run is complete, and drop what an interrupted run "
        "has left",
        free=True,
    )
    resume: bool = option(False, "continue the interrupted run for this OUTPUT", free=True)
    strict: bool = option(False, "stop at the first bad record", free=True, rare=True)

    device: str | None = option(
        None, "torch device (default: cuda where there is one, otherwise cpu)", group="running", free=True
    )
    dtype: str = option("fp32", "fp32, fp16 or bf16 (default: fp32)")
    weight_dtype: str = option(
        lambda: process_settings.current().weight_dtype,
        "int8, int4 or bf16: faster on a CPU that has the instructions, with other results (default: fp32)",
        rare=True,
    )
    weight_group_size: int = option(
        lambda: process_settings.current().weight_group_size,
        "inputs that share a scale in int8 and int4: 32, 64 or 128 (default: 64)",
        rare=True,
    )
    keep_bits: bool = option(
        lambda: process_settings.current().keep_bits,
        "keep weights in GGUF, GPTQ, AWQ and compressed-tensors in their bits, also where Transformers unpacks them",
        rare=True,
    )
    activations: str = option(
        lambda: process_settings.current().activations,
        "int8: round what such weights are multiplied with on a CPU, which is faster, with other results "
        "(default: float)",
        rare=True,
    )
    batch_size: int | Literal["auto"] = option(
        16,
        "rows in a batch, or auto for as many as fit into free memory (default: 16)",
        "--bs",
        "--per-device-eval-batch-size",
    )
    max_tokens: int | None = option(None, "at most N input tokens in a batch, padding included", rare=True)
    trust_remote_code: bool = option(False, "run code that comes with the model", free=True, rare=True)
    allow_missing_weights: bool = option(
        False,
        "run a model whose files lack weights, which are random then, or hold weights that it has no place for",
        rare=True,
    )
    quiet: bool = option(False, "no progress and no summary", free=True)
    report: str | None = option(None, "write timing, memory and counts to this JSON file", free=True, rare=True)

    @property
    def src_lang(self) -> str | None:
        """The language of the texts, where a command asks for it."""
        return None

    @property
    def reference(self) -> str | None:
        """The file of what the outputs are compared with, for a command that compares."""
        return None

    @property
    def reference_column(self) -> str | None:
        """The column of the same."""
        return None

    @property
    def pair_column(self) -> str | None:
        """The column of the second text, for a command that takes two."""
        return None

    @property
    def keep(self) -> tuple[str, ...]:
        """Columns of INPUT that the output has, too, for a command that keeps some."""
        return ()

    @property
    def chat(self) -> bool:
        """Whether an input may be a list of messages."""
        return False

    def __post_init__(self) -> None:
        check_types(self)
        _among("input_format", self.input_format, INPUT_FORMATS)
        _among("output_format", self.output_format, ("auto", *self.OUTPUTS))
        _among("dtype", self.dtype, DTYPES)
        try:
            dataclasses.replace(process_settings.current(), **self.weights)
        except ValueError as error:
            raise SetupError(str(error)) from error
        for name, smallest in self._least().items():
            value = getattr(self, name)
            if isinstance(value, int) and value < smallest:
                raise SetupError(f"{name.replace('_', '-')} is {value}: it must be at least {smallest}")
        for name, largest in self._most().items():
            value = getattr(self, name)
            if value is not None and value > largest:
                raise SetupError(f"{name.replace('_', '-')} is {value}: it must be at most {largest}")
        if self.resume and self.to_stdout:
            raise SetupError("resume needs an output file: standard output cannot be continued")
        if self.to_stdout and self.resolved_output_format in _NOT_STREAMED:
            raise SetupError(f"{self.resolved_output_format} cannot be written to standard output")
        self._check_distinct()

    def _least(self) -> dict[str, int]:
        """The smallest value of each option that is a number."""
        return {"batch_size": 1, "max_tokens": 1, "limit": 1}

    def _most(self) -> dict[str, int]:
        """The largest value of each option whose number takes more than memory for what there is."""
        return {}

    def read(self) -> dict[str, str | None]:
        """The files that are read, by what they are called in messages."""
        return {"INPUT": None if self.from_stdin or not os.path.exists(self.input) else self.input}

    def written_beside(self) -> dict[str, str | None]:
        """The files that are written when the run is complete, beside OUTPUT and its errors."""
        return {"the report": self.report}

    def _check_distinct(self) -> None:
        """Raises `SetupError` where a file that is written is one that is read, or is written twice."""
        written: dict[str, Any] = self.written_beside()
        if not self.to_stdout:
            own = {
                "OUTPUT": self.output,
                "the work file of OUTPUT": self.partial_path,
                "the unfinished OUTPUT": unfinished_path(Path(self.output)),
                "the error file of OUTPUT": self.errors_path,
                "the unfinished error file of OUTPUT": self.errors_partial_path,
            }
            written = own | written
        taken = {what: Path(name) for what, name in self.read().items() if name}
        for what, name in written.items():
            for other, there in taken.items() if name else ():
                if same_file(Path(name), there):
                    raise SetupError(f"{other} and {what} are the same file: {name}")
            taken |= {what: Path(name)} if name else {}

    @property
    def weights(self) -> dict[str, Any]:
        """FastGen's settings for the weights of linear layers."""
        names = ("weight_dtype", "weight_group_size", "keep_bits", "activations")
        return {name: getattr(self, name) for name in names}

    @property
    def from_stdin(self) -> bool:
        return self.input == STANDARD_STREAM

    @property
    def to_stdout(self) -> bool:
        return self.output == STANDARD_STREAM

    @property
    def resolved_output_format(self) -> str:
        """The output format asked for, or the one that the file's name says."""
        if self.output_format != "auto":
            return self.output_format
        named = _OUTPUT_SUFFIXES.get(Path(self.output).suffix.lower())
        return named if named in self.OUTPUTS else self.OTHERWISE

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


@dataclass(frozen=True)
class RunOptions(DataOptions):
    """Every option of a run. Only `model`, `input` and `output` are needed; the rest has the defaults shown."""

    OUTPUTS: ClassVar[tuple[str, ...]] = ("txt", "jsonl", "csv", "tsv", "parquet")
    OTHERWISE: ClassVar[str] = "txt"

    generation: Mapping[str, Any] = field(default_factory=dict)
    """`GenerationConfig` fields that override the model's own."""
    generation_config: str | None = None
    """A JSON file of such fields (or a directory with generation_config.json) that is applied before `generation`."""

    output_format: str = option("auto", "txt, jsonl, csv, tsv or parquet (default: by the name)", rare=True)
    keep: tuple[str, ...] = option(
        (),
        "columns of INPUT that the output has, too, in place of id, input and reference: names with commas between, or "
        "all",
        group="data",
    )
    output_column: str = option("text", "column with the outputs (default: text)")
    token_ids: bool = option(False, "also write the generated token ids (not in .txt)", rare=True)

    task: str = option(
        "auto",
        "auto, text2text, text-generation, translation, summarization, or a name in the model's task_specific_params, "
        "whose prefix and options are then used (default: auto)",
        group="task",
    )
    chat: bool = option(
        False, "apply the model's chat template to every input, which is a prompt, or a list of messages"
    )
    system_prompt: str | None = option(None, "with --chat: the message that begins each conversation")
    prefix: str | None = option(None, "text put before every input", "--source-prefix")
    src_lang: str | None = option(None, "source language, for multilingual models", "--source-lang")
    tgt_lang: str | None = option(None, "target language, for multilingual models", "--target-lang")
    max_source_length: int | None = option(
        None, "truncate inputs to N tokens (prompts of decoder-only models keep their end)"
    )
    truncation: bool = option(False, "truncate inputs that are too long for the model instead of skipping them")
    include_prompt: bool = option(False, "decoder-only models: put the prompt before the new text", rare=True)
    detokenizer: str | None = option(None, "moses: detokenise the outputs with sacremoses", rare=True)
    lang: str | None = option(None, "language of the detokenizer (default: --tgt-lang, or en)", rare=True)

    workers: int | None = option(
        None,
        "processes for detokenising and metrics; 0: a thread (default: a quarter of the cores, 1 to 4)",
        group="running",
        free=True,
        rare=True,
    )
    seed: int = option(42, "seed for sampling (default: 42)", rare=True)
    self_speculation: str = option(
        lambda: process_settings.current().self_speculation,
        "int8 or int4: the model's own weights in 8 or 4 bits draft tokens, which the model checks (default: off); "
        "kernels are chosen by measurements then",
        rare=True,
    )

    reference: str | None = option(
        None, "file of references, a line each", "--reference-path", group="scores", free=True
    )
    reference_column: str | None = option(None, "column of INPUT with the references", "--summary-column", free=True)
    metrics: tuple[str, ...] = option(
        (), "any of bleu,rouge,chrf,exact, over the records that were not skipped (default: by the task)"
    )
    score_path: str | None = option(None, "write the metrics to this JSON file", free=True, rare=True)

    def __post_init__(self) -> None:
        check_types(self)
        _among("detokenizer", self.detokenizer or "none", ("moses", "none"))
        for metric in self.metrics:
            _among("metrics", metric, METRICS)
        if self.reference and self.reference_column:
            raise SetupError("give either a reference file or a reference column, not both")
        if (self.metrics or self.score_path) and not (self.reference or self.reference_column):
            what = "metrics need" if self.metrics else "a score path needs"
            raise SetupError(f"{what} references: give a reference file or a reference column")
        if self.chat and self.prefix:
            raise SetupError("prefix and chat do not go together: a chat template says what comes before an input")
        if self.system_prompt is not None and not self.chat:
            raise SetupError("a system prompt is part of a conversation: it needs --chat")
        super().__post_init__()
        if self.keep and self.to_text:
            raise SetupError("lines of text have no columns: to keep some, name OUTPUT .jsonl, .csv, .tsv or .parquet")

    def _least(self) -> dict[str, int]:
        return super()._least() | {"max_source_length": 1, "workers": 0}

    def _most(self) -> dict[str, int]:
        return super()._most() | {"workers": _MOST_WORKERS}

    def read(self) -> dict[str, str | None]:
        return super().read() | {"the reference": self.reference, "the generation config": self.generation_config}

    def written_beside(self) -> dict[str, str | None]:
        return {"the score path": self.score_path} | super().written_beside()

    @property
    def weights(self) -> dict[str, Any]:
        drafts = {"self_speculation": self.self_speculation}
        return super().weights | drafts | (captured_drafts() if self.to_text and self.self_speculation != "off" else {})

    @property
    def to_text(self) -> bool:
        """Whether the output is lines of text, which cannot hold scores."""
        return self.resolved_output_format == "txt"


def captured_drafts() -> dict[str, Any]:
    """The settings with which drafts are verified in captured steps, and drawn, unless the user asked for others.

    A batch of one text draws as the others do.
    """
    wanted = {"assisted_sampling": "fastgen"}
    return {name: value for name, value in wanted.items() if name not in process_settings.current().explicit}


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


def same_file(one: Path, other: Path) -> bool:
    """Whether two paths lead to one file, which need not exist yet."""
    if is_special(one) or is_special(other):
        return False
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    return one.exists() and other.exists() and one.samefile(other)


def _among(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise SetupError(f"{name.replace('_', '-')} is {value!r}: choose from {', '.join(allowed)}")
