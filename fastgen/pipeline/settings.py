"""The options of every command that works on a data set, as one value, and the files of its run."""

from __future__ import annotations

import dataclasses
import functools
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Union, cast

from fastgen import settings as process_settings
from fastgen.pipeline.errors import SetupError

TEXT_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}
INPUT_FORMATS = ("auto", "txt", "jsonl", "csv", "tsv", "parquet", "dataset")
_OUTPUT_SUFFIXES = TEXT_SUFFIXES | {".npy": "npy"}
_NOT_STREAMED = ("npy", "parquet")  # formats that are not written from front to back
# The types of weights, and their names in torch and Transformers.
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "auto": "auto"}
_DTYPES_ELSEWHERE = {"float": "fp32", "half": "fp16"} | {name: own for own, name in DTYPES.items()}
STANDARD_STREAM = "-"
# Libraries keep numbers in 64 bits. A limit for texts may be any number: a larger one means no limit.
_LARGEST = 2**63 - 1
_UNBOUNDED = ("max_length",)
_CALLED = {bool: "True or False", int: "a whole number", float: "a number", str: "a string", type(None): "None"}


def option(
    default: Any,
    help: str,
    *aliases: str,
    group: str = "",
    free: bool = False,
    rare: bool = False,
    least: int | None = None,
    most: int | None = None,
) -> Any:
    """Returns a field that is also a command-line option.

    Args:
        default: the default value, or a function that returns it.
        help: one sentence about it.
        aliases: other names of the option; its own is that of the field.
        group: title of the group of options that begins with this one.
        free: it cannot change the output, so an interrupted run may be resumed with another value.
        rare: the short help page leaves it out.
        least, most: the bounds of a number.
    """
    about = {"help": help, "aliases": aliases, "group": group, "free": free, "rare": rare, "least": least, "most": most}
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
    """The format if the name of OUTPUT shows none."""

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
        None,
        "do only the first N records",
        "--n-obs",
        "--max-eval-samples",
        "--max-predict-samples",
        free=True,
        least=1,
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
    dtype: str = option("fp32", "fp32, fp16, bf16, or auto: as the checkpoint says (default: fp32)")
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
        least=1,
    )
    max_tokens: int | None = option(None, "at most N input tokens in a batch, padding included", rare=True, least=1)
    trust_remote_code: bool = option(False, "run code that comes with the model", free=True, rare=True)
    allow_missing_weights: bool = option(
        False,
        "run a model whose files lack weights, which are random then, or hold weights that it has no place for",
        rare=True,
    )
    quiet: bool = option(False, "no progress and no summary", free=True)
    report: str | None = option(None, "write timing, memory and counts to this JSON file", free=True, rare=True)

    # Options that only some commands have, which declare them as fields.
    src_lang = reference = reference_column = pair_column = cast("str | None", None)
    keep = cast("tuple[str, ...]", ())
    chat = False

    def __post_init__(self) -> None:
        check_types(self)
        object.__setattr__(self, "dtype", dtype_named(self.dtype))
        among("input_format", self.input_format, INPUT_FORMATS)
        among("output_format", self.output_format, ("auto", *self.OUTPUTS))
        among("dtype", self.dtype, tuple(DTYPES))
        try:
            dataclasses.replace(process_settings.current(), **self.weights)
        except ValueError as error:
            raise SetupError(str(error)) from error
        check_bounds(self)
        if self.resume and self.to_stdout:
            raise SetupError("resume needs an output file: standard output cannot be continued")
        if self.to_stdout and self.resolved_output_format in _NOT_STREAMED:
            raise SetupError(f"{self.resolved_output_format} cannot be written to standard output")
        self._check_distinct()

    def read(self) -> dict[str, str | None]:
        """Returns the files that are read, by their names in messages."""
        return {"INPUT": None if self.from_stdin or not os.path.exists(self.input) else self.input}

    def written_beside(self) -> dict[str, str | None]:
        """Returns the files that are written when the run is complete, beside OUTPUT and its errors."""
        return {"the report": self.report}

    def _check_distinct(self) -> None:
        """Raises `SetupError` if a file that is written is also read, or is written twice."""
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
        """The output format asked for, or the one that the file's name shows."""
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


def unfinished_path(path: Path) -> Path:
    """Returns where a file is written before it takes its name. The suffix stays last, as formats depend on it."""
    path = followed(path)
    return path.with_name(f".{path.name}.unfinished")


def followed(path: Path) -> Path:
    """Returns the target of a link: the file is replaced, not the link."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def is_special(path: Path) -> bool:
    """Whether a path is a device, a pipe or the like, which can be written to, but not replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


def same_file(one: Path, other: Path) -> bool:
    """Whether two paths lead to one file, which need not exist yet."""
    if is_special(one) or is_special(other):
        return False
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    return one.exists() and other.exists() and one.samefile(other)


def among(name: str, value: str | int, allowed: Sequence[str | int]) -> None:
    """Raises `SetupError` for a value of an option that is not one of these."""
    if value not in allowed:
        raise SetupError(f"{name.replace('_', '-')} is {value!r}: choose from {', '.join(map(str, allowed))}")


def dtype_named(name: str) -> str:
    """Returns FastGen's name of a weight type that torch, Transformers or vLLM name differently."""
    return _DTYPES_ELSEWHERE.get(name, name)


def check_types(options: Any) -> None:
    """Raises `SetupError` for a field of a dataclass whose value is not of its type, or a number beyond 64 bits."""
    kind: Any = type(options)
    hints = _hints(kind)
    for each in dataclasses.fields(options):
        value, name = getattr(options, each.name), each.name.replace("_", "-")
        must = must_be(value, hints[each.name])
        if must is not None:
            raise SetupError(f"{name} is {value!r}: it must be {must}")
        if type(value) is int and each.name not in _UNBOUNDED and not -_LARGEST <= value <= _LARGEST:
            raise SetupError(f"{name} is {value}: it must be of 64 bits")


def must_be(value: Any, hint: Any) -> str | None:
    """Returns a description of the type that a value should have; None if it has it."""
    kinds = _kinds(hint)
    return None if any(_is(value, kind) for kind in kinds) else " or ".join(map(_called, kinds))


def check_bounds(options: Any) -> None:
    """Raises `SetupError` for a number outside the bounds of its option."""
    for each in dataclasses.fields(options):
        value, least, most = getattr(options, each.name), each.metadata.get("least"), each.metadata.get("most")
        if isinstance(value, int):
            said = f"{each.name.replace('_', '-')} is {value}: it must be"
            if least is not None and value < least:
                raise SetupError(f"{said} at least {least}")
            if most is not None and value > most:
                raise SetupError(f"{said} at most {most}")


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _kinds(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def _is(value: Any, kind: Any) -> bool:
    origin = typing.get_origin(kind)
    if origin is Literal:
        return isinstance(value, str) and value in typing.get_args(kind)
    if origin is tuple:
        return isinstance(value, Sequence) and not isinstance(value, str) and all(type(each) is str for each in value)
    if origin is not None:
        return isinstance(value, Mapping)
    if kind is float:
        return type(value) in (int, float)
    if kind is bool:
        return type(value) is bool
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _called(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    if kind in _CALLED:
        return _CALLED[kind]
    return "a sequence of strings" if typing.get_origin(kind) is tuple else "a mapping"


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
