"""`fastgen-generate MODEL INPUT OUTPUT`: run a model over a data set.

Exit status: 0 all records done, 1 some were skipped (or the first bad one stopped a --strict run), 2 the run could not
be set up, 130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from fastgen_cli import fairseq
from fastgen_cli.shared import DONE, INTERRUPTED, SKIPPED, UsageError, model_of_its_own, reported, timing_line

PROGRAM = "fastgen-generate"

_EPILOG = """\
inputs:   .txt (or any other name): a sample a line; .jsonl, .csv, .tsv, .parquet: --input-column; the name of a data
          set or the directory of a saved one; - is standard input (lines of text)
outputs:  .txt (or any other name): the best output of each record on the line of the same number, line breaks within
          it replaced by spaces, an empty line for a skipped record; .jsonl and .parquet: id, input, text, sequences,
          scores, input_tokens, output_tokens, without the skipped records; - is standard output (lines of text)
errors:   records that cannot be done (empty, too long, no string, invalid UTF-8, missing column, refused by the model)
          are reported with their line number in OUTPUT.errors.jsonl (until the run is complete, in
          OUTPUT.errors.jsonl.partial) and skipped, unless --strict
resuming: work is kept in OUTPUT.partial until the output is complete; after an interrupt or a kill the same command
          with --resume continues, and ends in the same file as a run that was not interrupted
replacing: OUTPUT, OUTPUT.errors.jsonl and the files of --score-path and --report are replaced only with --overwrite,
          and only when the run is complete; a run that is resumed may rewrite its own OUTPUT.errors.jsonl. A file
          that is read, or written already, is never replaced
repeating: batches depend on the input and the options alone, and every batch has a seed of its own from --seed: the
          same command gives the same output, sampled or not. --batch-size auto depends on the free memory as well;
          give a number where sampled output must be repeatable
FairSeq:  MODEL may be a checkpoint of FairSeq's (.pt, several separated by :) and INPUT a directory of
          fairseq-preprocess, or a text where the dictionaries are beside the checkpoint; options are those of
          fairseq-generate then, and OUTPUT is .txt or .jsonl. DATA --path MODEL ... prints what fairseq-generate does
status:   0 all records done, 1 some were skipped, 2 the run could not be set up, 130 interrupted

Names of the Transformers example scripts are understood (--num_beams, --source_prefix, --text_column, --bs, ...).
"""

# (names, settings field, keyword arguments of add_argument)
_Option = tuple[tuple[str, ...], str, dict[str, Any]]

_DATA: list[_Option] = [
    (("--input-column", "--text-column"), "input_column", {"help": "column to read; a.b is field b of column a"}),
    (("--id-column",), "id_column", {"help": "column that names the records in the output (default: 0, 1, 2, ...)"}),
    (("--input-format",), "input_format", {"help": "txt, jsonl, csv, tsv, parquet or dataset (default: by the name)"}),
    (("--output-format",), "output_format", {"help": "txt, jsonl or parquet (default: by the name)"}),
    (
        ("--dataset-config", "--dataset-config-name"),
        "dataset_config",
        {"help": "configuration of the data set INPUT names"},
    ),
    (("--split",), "split", {"help": "split of the data set (default: test, validation, or the only one)"}),
    (
        ("--limit", "--n-obs", "--max-eval-samples", "--max-predict-samples"),
        "limit",
        {"type": int, "help": "do only the first N records"},
    ),
    (
        ("--overwrite",),
        "overwrite",
        {
            "help": "replace OUTPUT, OUTPUT.errors.jsonl and the files of --score-path and --report when the run is "
            "complete, and drop what an interrupted run has left"
        },
    ),
    (("--resume",), "resume", {"help": "continue the interrupted run for this OUTPUT"}),
    (("--strict",), "strict", {"help": "stop at the first bad record"}),
    (("--token-ids",), "token_ids", {"help": "also write the generated token ids (.jsonl, .parquet)"}),
]
_TASK: list[_Option] = [
    (
        ("--task",),
        "task",
        {
            "help": "auto, text2text, text-generation, translation, summarization, or a name in the model's "
            "task_specific_params, whose prefix and options are then used (default: auto)"
        },
    ),
    (("--prefix", "--source-prefix"), "prefix", {"help": "text put before every input"}),
    (("--src-lang", "--source-lang"), "src_lang", {"help": "source language, for multilingual models"}),
    (("--tgt-lang", "--target-lang"), "tgt_lang", {"help": "target language, for multilingual models"}),
    (
        ("--max-source-length",),
        "max_source_length",
        {"type": int, "help": "truncate inputs to N tokens (prompts of decoder-only models keep their end)"},
    ),
    (("--truncation",), "truncation", {"help": "truncate inputs that are too long for the model instead of skipping"}),
    (("--include-prompt",), "include_prompt", {"help": "decoder-only models: put the prompt before the new text"}),
    (("--detokenizer",), "detokenizer", {"help": "moses: detokenise the outputs with sacremoses"}),
    (("--lang",), "lang", {"help": "language of the detokenizer (default: --tgt-lang, or en)"}),
]
_RUN: list[_Option] = [
    (("--device",), "device", {"help": "torch device (default: cuda where there is one, otherwise cpu)"}),
    (("--dtype",), "dtype", {"help": "fp32, fp16 or bf16 (default: fp32)"}),
    (
        ("--cpu-weights",),
        "cpu_weights",
        {"help": "int8 or bf16: faster on a CPU that has the instructions, with other results (default: fp32)"},
    ),
    (
        ("--batch-size", "--bs", "--per-device-eval-batch-size"),
        "batch_size",
        {"help": "rows in a batch, or auto for what the free memory has room for (default: 16)"},
    ),
    (
        ("--max-tokens",),
        "max_tokens",
        {"type": int, "help": "at most N input tokens in a batch, padding included"},
    ),
    (
        ("--workers",),
        "workers",
        {"type": int, "help": "processes for detokenising and metrics (default: a quarter of the cores, 1 to 4)"},
    ),
    (("--seed",), "seed", {"type": int, "help": "seed for sampling (default: 42)"}),
    (("--trust-remote-code",), "trust_remote_code", {"help": "run code that comes with the model"}),
    (("--quiet",), "quiet", {"help": "no progress and no summary"}),
]
_SCORES: list[_Option] = [
    (("--reference", "--reference-path"), "reference", {"help": "file of references, a line each"}),
    (("--reference-column", "--summary-column"), "reference_column", {"help": "column of INPUT with the references"}),
    (
        ("--metrics",),
        "metrics",
        {"help": "any of bleu,rouge,chrf,exact, over the records that were not skipped (default: by the task)"},
    ),
    (("--score-path",), "score_path", {"help": "write the metrics to this JSON file"}),
    (("--report",), "report", {"help": "write timing, memory and counts to this JSON file"}),
]
_GROUPS = [("data", _DATA), ("task", _TASK), ("running", _RUN), ("scores", _SCORES)]
_BOOLEAN = {
    "overwrite", "resume", "strict", "token_ids", "truncation", "include_prompt", "trust_remote_code", "quiet",
}  # fmt: skip
_WORDS = ("true", "false", "none", "null")


class _Parser(argparse.ArgumentParser):
    """Reports an error as one line, without a page of options above it."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def build_parser() -> tuple[argparse.ArgumentParser, dict[str, str]]:
    """The parser, and for each option of `GenerationConfig` the field that it sets."""
    from fastgen import __version__
    from fastgen.pipeline.generation_fields import generation_fields

    parser = _Parser(
        prog=PROGRAM,
        usage="%(prog)s MODEL INPUT OUTPUT [options]",
        description="Generate an output for every record of a data set, in input order.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="directory written by save_pretrained, or hub name")
    parser.add_argument("input", metavar="INPUT", help="file, data set, or - for standard input")
    parser.add_argument("output", metavar="OUTPUT", help="file, or - for standard output")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    taken: set[str] = {"--version", "--help"}
    for title, options in _GROUPS:
        group = parser.add_argument_group(title)
        for names, target, keywords in options:
            flag: dict[str, Any] = {"metavar": names[0].split("-")[-1].upper()}
            if target in _BOOLEAN:
                flag = {"action": "store_true"}
            group.add_argument(*names, dest=target, default=argparse.SUPPRESS, **flag, **keywords)
            taken.update(names)
    group = parser.add_argument_group("FastGen")
    group.add_argument("--no-fastgen", action="store_true", help="run the library's own code, for comparison")
    group.add_argument("--fp16", dest="dtype", action="store_const", const="fp16", default=argparse.SUPPRESS,
                       help="the same as --dtype fp16")  # fmt: skip
    group.add_argument("--bf16", dest="dtype", action="store_const", const="bf16", default=argparse.SUPPRESS,
                       help="the same as --dtype bf16")  # fmt: skip
    group.add_argument("--debug", action="store_true", help="show the traceback of an error")
    taken |= {"--no-fastgen", "--fp16", "--bf16", "--debug", "--generation-config"}

    group = parser.add_argument_group(
        "generation",
        "Every field of GenerationConfig; the model's own value applies where an option is not given. Lists and "
        "dictionaries are JSON, none unsets a value, and --no-X is --X false.",
    )
    group.add_argument("--generation-config", metavar="FILE", default=argparse.SUPPRESS,
                       help="JSON file of fields; options override it")  # fmt: skip
    fields: dict[str, str] = {}
    for field in generation_fields():
        option = "--" + field.name.replace("_", "-")
        if option in taken:
            option = "--generation-" + option[2:]
        group.add_argument(
            option,
            dest=option,
            type=_parsed_by(field.parse),
            default=argparse.SUPPRESS,
            metavar=_metavar(field.types),
            help=field.description.replace("%", "%%") or None,
        )
        fields[option] = field.name
        if field.is_flag:
            negated = "--no-" + option[2:]
            group.add_argument(
                negated,
                dest=option,
                action="store_const",
                const=False,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )
    return parser, fields


def _parsed_by(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def _metavar(types: frozenset[str]) -> str:
    names = {"bool": "true|false", "int": "N", "float": "X", "str": "TEXT", "json": "JSON"}
    return "|".join(names[name] for name in names if name in types) or "VALUE"


def normalise(arguments: Sequence[str], flags: set[str], values: Sequence[str] = ()) -> list[str]:
    """Options as the parser wants them: `-` for `_` in names, and flags with their value attached.

    A flag of `GenerationConfig` may stand alone or before `true` or `false`; which of the two cannot be left to the
    parser, which would take a following MODEL for its value.
    """
    result: list[str] = []
    words = list(arguments)
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if word == "--":
            result += ["--", *words[position:]]
            break
        if not word.startswith("--"):
            result.append(word)
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name in flags and not equals:
            value = "true"
            if position < len(words) and words[position].lower() in (*_WORDS, *values):
                value = words[position]
                position += 1
            result.append(f"{name}={value}")
        else:
            result.append(name + equals + value)
    return result


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The command line as a namespace and the generation options in it. Raises `UsageError`."""
    parser, fields = build_parser()
    flags = {option for option in fields if f"--no-{option[2:]}" in parser._option_string_actions}
    namespace, unknown = parser.parse_known_args(normalise(arguments, flags, values=("never",)))
    if unknown:
        word = unknown[0].partition("=")[0]
        if not word.startswith("-"):
            raise UsageError(f"unexpected argument {word!r}: MODEL INPUT OUTPUT are given already")
        near = difflib.get_close_matches(word, list(parser._option_string_actions), n=1)
        raise UsageError(f"unknown option {word}" + (f": did you mean {near[0]}?" if near else ""))
    generation = {field: vars(namespace).pop(option) for option, field in fields.items() if option in vars(namespace)}
    if "batch_size" in namespace and namespace.batch_size != "auto":
        try:
            namespace.batch_size = int(namespace.batch_size)
        except ValueError:
            raise UsageError(f"--batch-size is {namespace.batch_size!r}: give a number or auto") from None
    if "metrics" in namespace:
        namespace.metrics = tuple(name for name in namespace.metrics.replace(",", " ").split())
    return namespace, generation


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    of_fairseq = fairseq.recognised(words)
    if of_fairseq is not None:
        return of_fairseq()

    def work() -> int:
        namespace, generation = parse(words)
        return _run(namespace, generation, words)

    try:
        return reported(PROGRAM, work, debug="--debug" in words)
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _run(namespace: argparse.Namespace, generation: dict[str, Any], words: Sequence[str]) -> int:
    import fastgen
    from fastgen.pipeline import Settings, run

    given = vars(namespace).copy()
    given.pop("debug")
    if given.pop("no_fastgen"):
        fastgen.disable()
    settings = Settings(generation=generation, **given)
    try:
        with model_of_its_own():
            report = run(settings)
    except KeyboardInterrupt:
        if settings.to_stdout or not settings.partial_path.exists():
            raise
        again = [word for word in words if word not in ("--resume",)]
        print(f"{PROGRAM}: interrupted; to continue: {PROGRAM} {shlex.join([*again, '--resume'])}", file=sys.stderr)
        return INTERRUPTED
    if not settings.quiet:
        print(_summary(report), file=sys.stderr)
    if report.metrics and not (settings.quiet and settings.score_path):
        print("  ".join(f"{name} {score:.2f}" for name, score in report.metrics.items()), file=sys.stderr)
    if report.skipped:
        where = f": see {report.errors_file}" if report.errors_file else ""
        print(f"{PROGRAM}: {report.skipped} of {report.skipped + report.samples} records skipped{where}",
              file=sys.stderr)  # fmt: skip
    return SKIPPED if report.skipped else DONE


def _summary(report: Any) -> str:
    seconds = report.seconds
    resumed = f", {report.resumed_samples} of them from before" if report.resumed_samples else ""
    memory = f", peak memory {report.peak_memory_bytes / 2**30:.2f} GiB" if report.peak_memory_bytes else ""
    return (
        f"{report.samples} samples{resumed} in {seconds['generate']:.1f} s: {report.samples_per_second:.2f} samples/s, "
        f"{report.tokens_per_second:.1f} tokens/s (and {seconds['load']:.1f} s to load){memory}\n"
        + timing_line(report.waiting_for_input_share, report.waiting_for_output_share, seconds["finish"])
    )


if __name__ == "__main__":
    sys.exit(main())
