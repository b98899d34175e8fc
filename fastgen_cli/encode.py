"""`fastgen-embed` and `fastgen-classify`, each with MODEL INPUT OUTPUT: write a vector, or labels and scores, for every
text of a data set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from fastgen.counters import ENCODER
from fastgen.pipeline.encoding import Classify, Embed
from fastgen.pipeline.run import DataRun
from fastgen_cli.command import Parser, command, data_parser, of_the_run, renamed, run_named, run_over_data

_EPILOG = """\
inputs:   .txt (or any other name): a text a line; .jsonl, .csv, .tsv, .parquet: --input-column; the name of a data set
          or the directory of a saved one; - is standard input (lines of text)
cutting:  inputs that are longer than the model takes are cut, and how many is said at the end
errors:   bad records (empty, no string, invalid UTF-8, a row of a damaged file, missing column, refused by the model)
          are reported with their line number in OUTPUT.errors.jsonl and skipped, unless --strict
resuming: work is kept in OUTPUT.partial until the output is complete; after an interrupt or a kill the same command
          with --resume continues, and ends in the same file as a run that was not interrupted
repeating: batches depend on the input and the options alone, and the same command gives the same output
status:   0 all records done, 1 some were skipped, 2 the run could not be done, 130 interrupted
"""


@dataclass(frozen=True)
class Command:
    program: str
    run: type[DataRun]
    description: str
    outputs: str
    """The outputs, for the help page."""


EMBED = Command(
    "fastgen-embed",
    Embed,
    """\
Write a vector for every text of a data set, in input order.

  fastgen-embed sentence-transformers/all-MiniLM-L6-v2 texts.txt vectors.npy
  fastgen-embed sentence-transformers/all-MiniLM-L6-v2 questions.csv vectors.parquet --input-column question
""",
    """\
outputs:  .npy: an array, whose row n is the vector of record n (NaN for a skipped one); .jsonl and .parquet: id, input,
          vector, input_tokens, truncated, without the skipped records; - is standard output (.jsonl)
vectors:  are made as the model's sentence-transformers files say (modules.json); without these, of the mean of the
          tokens' vectors
""",
)
CLASSIFY = Command(
    "fastgen-classify",
    Classify,
    """\
Write labels and scores for every text of a data set, in input order.

  fastgen-classify distilbert/distilbert-base-uncased-finetuned-sst-2-english reviews.csv labels.csv --input-column text
  fastgen-classify cross-encoder/ms-marco-MiniLM-L6-v2 pairs.tsv scores.jsonl --input-column query --pair-column passage
""",
    """\
outputs:  .jsonl and .parquet: id, input, label, score, labels, scores, input_tokens, truncated; .csv: id, input, label,
          score, and with --top-k label_2, score_2, ...; without the skipped records; - is standard output (.jsonl)
""",
)


def embed(arguments: Sequence[str] | None = None) -> int:
    return command(EMBED.program, arguments, partial(_run, EMBED))


def classify(arguments: Sequence[str] | None = None) -> int:
    return command(CLASSIFY.program, arguments, partial(_run, CLASSIFY))


def build_parser(of: Command) -> Parser:
    """Builds the parser. A destination is a field of the command's options."""
    return data_parser(of.program, of.description, of.outputs + _EPILOG, of.run.options)[0]


def _run(of: Command, words: Sequence[str]) -> int:
    given = vars(build_parser(of).parse_args(renamed(of.program, words)))
    settings = of.run.options(**of_the_run(given))
    return run_over_data(of.program, words, of.run(settings), ENCODER)


if __name__ == "__main__":
    run_named("fastgen_cli.encode", {"embed": embed, "classify": classify})
