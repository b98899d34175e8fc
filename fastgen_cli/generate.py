"""`fastgen-generate MODEL INPUT OUTPUT`: runs a model over a data set."""

from __future__ import annotations

import argparse
import difflib
import itertools
import sys
from collections.abc import Sequence
from typing import Any

from fastgen.counters import GENERATE
from fastgen.pipeline.generation import Generate, RunOptions
from fastgen.pipeline.generation import options as generation_options
from fastgen_cli import fairseq
from fastgen_cli.command import Parser, UsageError, add_rare, command, data_parser, of_the_run, renamed, run_over_data

PROGRAM = "fastgen-generate"

_EPILOG = """\
inputs:   .txt (or any other name): a sample a line; .jsonl, .csv, .tsv, .parquet: --input-column; the name of a data
          set or the directory of a saved one; - is standard input (lines of text)
outputs:  .txt (or any other name): the best output of each record on the line of the same number, line breaks within
          it replaced by spaces, an empty line for a skipped record; .jsonl and .parquet: id, input, text, sequences,
          scores, input_tokens, output_tokens, without the skipped records; .csv and .tsv: the same for the best output
          alone, with a score; - is standard output (lines of text)
errors:   bad records (empty, too long, no string, invalid UTF-8, a row of a damaged CSV or JSON file, missing column,
          refused by the model) are reported with their line number in OUTPUT.errors.jsonl (until the run is complete,
          in OUTPUT.errors.jsonl.partial) and skipped, unless --strict
resuming: work is kept in OUTPUT.partial until the output is complete; after an interrupt or a kill the same command
          with --resume continues, and ends in the same file as a run that was not interrupted
replacing: OUTPUT, OUTPUT.errors.jsonl and the files of --score-path and --report are replaced only with --overwrite,
          and only when the run is complete; a run that is resumed may rewrite its own OUTPUT.errors.jsonl. A file
          that is read, or written already, is never replaced
repeating: batches depend on the input and the options alone, and every batch has a seed of its own from --seed: the
          same command gives the same output, sampled or not. --batch-size auto depends on the free memory as well;
          give a number where sampled output must be repeatable
generation: lists and dictionaries are JSON, none unsets a value, and --no-X is --X false
FairSeq:  MODEL may be a checkpoint of FairSeq's (.pt, several separated by :) and INPUT a directory of
          fairseq-preprocess, or a text where the dictionaries are beside the checkpoint; options are those of
          fairseq-generate then, and OUTPUT is .txt or .jsonl. DATA --path MODEL ... prints what fairseq-generate does
status:   0 all records done, 1 some were skipped, 2 the run could not be done, 130 interrupted

Names of the Transformers example scripts are understood (--num_beams, --source_prefix, --text_column, --bs, ...).
"""


_EXAMPLES = """\
Generate an output for every record of a data set, in input order.

  fastgen-generate facebook/bart-large-cnn articles.csv summaries.csv --input-column article --keep all --num-beams 4
  fastgen-generate Helsinki-NLP/opus-mt-en-de sources.txt translations.txt --num-beams 4 --batch-size auto
"""
# The fields of GenerationConfig on the short help page.
_USUAL = (
    "max_new_tokens", "min_new_tokens", "num_beams", "num_return_sequences", "do_sample", "temperature", "top_k",
    "top_p", "repetition_penalty", "no_repeat_ngram_size", "length_penalty", "early_stopping",
    "prompt_lookup_num_tokens",
)  # fmt: skip
_METAVARS = {"bool": "true|false", "int": "N", "float": "X", "str": "TEXT", "json": "JSON"}
_WORDS = ("true", "false", "none", "null", "never")


def build_parser() -> Parser:
    """Builds the parser. A destination is a field of `RunOptions`, or with `--` before it one of `GenerationConfig`."""
    parser, group = data_parser(PROGRAM, _EXAMPLES, _EPILOG, RunOptions)
    for dtype in ("fp16", "bf16"):
        about = f"the same as --dtype {dtype}"
        add_rare(group, f"--{dtype}", dest="dtype", action="store_const", const=dtype, help=about)
    group = parser.add_argument_group(
        "generation",
        "Every field of GenerationConfig is an option. Where one is not given, the model's own value applies.",
    )
    about = "JSON file of fields; options override it"
    add_rare(group, "--generation-config", metavar="FILE", help=about)
    for name in generation_options.TYPES:
        _add_generation(group, name)
    return parser


def _add_generation(group: argparse._ActionsContainer, name: str) -> None:
    """Adds the option of a field of `GenerationConfig`."""

    def convert(text: str) -> Any:
        try:
            return generation_options.parse(name, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    option = "--" + name.replace("_", "-")
    types = generation_options.TYPES.get(name, ())
    metavar = "|".join(word for kind, word in _METAVARS.items() if kind in types) or "VALUE"
    add_rare(group, option, is_rare=name not in _USUAL, dest=option, type=convert, metavar=metavar, help="")
    if generation_options.is_flag(name):
        no = f"--no-{option[2:]}"
        group.add_argument(no, dest=option, action="store_const", const=False, help=argparse.SUPPRESS)


def normalise(arguments: Sequence[str], flags: set[str]) -> list[str]:
    """Rewrites options for the parser: `-` for `_` in names, and flags with their value attached.

    A flag of `GenerationConfig` may stand alone or before `true` or `false`. The parser cannot decide which, because it
    would take a following MODEL for the value.
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
            if position < len(words) and words[position].lower() in _WORDS:
                value = words[position]
                position += 1
            result.append(f"{name}={value}")
        else:
            result.append(name + equals + value)
    return result


def parse(arguments: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parses a command line into the settings and the generation options. Raises `UsageError`."""
    parser = build_parser()
    flags = {"--" + name.replace("_", "-") for name in generation_options.TYPES if generation_options.is_flag(name)}
    words = renamed(PROGRAM, normalise(arguments, flags))
    for word in itertools.takewhile(lambda word: word != "--", words):
        option = word.partition("=")[0]
        if option.startswith("--") and option not in parser._option_string_actions:
            name = option[2:].replace("-", "_")
            if not generation_options.is_field(name):
                near = difflib.get_close_matches(option, list(parser._option_string_actions), n=1)
                raise UsageError(f"unknown option {option}" + (f": did you mean {near[0]}?" if near else ""))
            _add_generation(parser, name)
    namespace, unknown = parser.parse_known_args(words)
    if unknown:
        what = "unknown option" if unknown[0].startswith("-") else "unexpected argument"
        raise UsageError(f"{what} {unknown[0]!r}: MODEL INPUT OUTPUT are given already")
    given = vars(namespace)
    generation = {name[2:].replace("-", "_"): given.pop(name) for name in list(given) if name.startswith("--")}
    return given, generation


def main(arguments: Sequence[str] | None = None) -> int:
    return command(PROGRAM, arguments, _run)


def _run(words: Sequence[str]) -> int:
    of_fairseq = fairseq.recognised(words)
    if of_fairseq is not None:
        return of_fairseq()
    given, generation = parse(words)
    run = Generate(RunOptions(generation=generation, **of_the_run(given)))
    return run_over_data(PROGRAM, words, run, GENERATE)


if __name__ == "__main__":
    sys.exit(main())
