"""`python -m fastgen.fairseq COMMAND ...`: FairSeq's own commands, made to work on a current Python.

    python -m fastgen.fairseq preprocess --trainpref train --source-lang de --target-lang en ...
    python -m fastgen.fairseq train data-bin --arch transformer_iwslt_de_en ...

COMMAND is the name of the command without its `fairseq-`, and everything behind it is passed on. Generation is
accelerated as everywhere else, but for `--no-fastgen` before COMMAND or FASTGEN_DISABLE=1. The package `fairseq` is not
shadowed by this module: `import fairseq` stays FairSeq.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import fastgen
from fastgen import settings

COMMANDS = ("preprocess", "train", "hydra-train", "validate", "generate", "interactive", "eval-lm", "score")
INSTALL = 'pip install "fastgen-transformers[fairseq]" && pip install --no-deps fairseq==0.12.2'

_PROGRAM = "python -m fastgen.fairseq"
# Warnings of Hydra and torch about the way in which FairSeq calls them.
_WARNINGS = (
    r"hydra\.experimental\.|The version_base parameter|In 'config': Usage of|'config' is validated against|"
    r"The strict flag|'pin_memory' argument is set"
)


def missing() -> str | None:
    """Returns the message for a user without FairSeq; None if it is installed."""
    return None if importlib.util.find_spec("fairseq_cli") else f"FairSeq is not installed: {INSTALL}"


def silence() -> None:
    """Suppresses warnings about FairSeq's own code that its users cannot fix. For a command's process.

    Must be called before FairSeq is imported: the import of a speech task asks for tensorboardX, whatever the command
    does.
    """
    warnings.filterwarnings("ignore", rf"\s*({_WARNINGS})")
    logging.getLogger("fairseq.tasks.text_to_speech").addFilter(lambda record: "tensorboardX" not in str(record.msg))


@contextlib.contextmanager
def fast_layers(models: Iterable[Any]) -> Iterator[None]:
    """A context in which layers of models (torch modules) on the CPU have FastGen's faster form.

    For code that calls models without generating, such as `fairseq-eval-lm`. `generate` uses these layers anyway.
    """
    from fastgen.decoding.layers import FastLayers

    with contextlib.ExitStack() as layers:
        for model in models:
            layers.enter_context(FastLayers.of(model))
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0 when it is done, and 2 if the command does not exist or FairSeq is missing.

    Raises the errors of FairSeq's command.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    plain = settings.current().disabled or words[:1] == ["--no-fastgen"]
    if words[:1] == ["--no-fastgen"]:
        del words[0]
    if words[:1] in ([], ["-h"], ["--help"]):
        print(f"usage: {_PROGRAM} [--no-fastgen] {{{','.join(COMMANDS)}}} ...\n\n{__doc__}")
        return 0 if words else 2
    command = words[0].removeprefix("fairseq-").replace("_", "-")
    problem = missing()
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        problem = f"unknown command {words[0]!r}: " + (f"did you mean {near[0]}?" if near else ", ".join(COMMANDS))
    if problem is not None:
        print(f"{_PROGRAM}: {problem}", file=sys.stderr)
        return 2
    silence()
    fastgen.enable()  # even with FASTGEN_DISABLE=1, because FairSeq could not be imported otherwise
    sys.argv = [f"fairseq-{command}", *words[1:]]
    with fastgen.disabled() if plain else contextlib.nullcontext():
        importlib.import_module(f"fairseq_cli.{command.replace('-', '_')}").cli_main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
