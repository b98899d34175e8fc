"""`fastgen-quantize MODEL OUT`: quantises a model to 4 or 8 bits, and reports the effects."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from fastgen.counters import GENERATE
from fastgen.pipeline.quantizing import QuantizeOptions, quantize_model
from fastgen_cli.command import (
    DONE,
    Parser,
    acceleration,
    add_debug,
    add_options,
    allow_interrupts,
    command,
    of_the_run,
    resumable,
)

PROGRAM = "fastgen-quantize"

_EXAMPLES = """\
Quantise the linear layers of a model to 4 or 8 bits.

  fastgen-quantize HuggingFaceTB/SmolLM2-135M-Instruct smollm2-w4 --calibration prompts.txt
  fastgen-quantize llama.Q8_0.gguf llama-w4 --method rtn
"""
_EPILOG = """\
text:     CALIBRATION and EVALUATE are read as fastgen-generate reads its INPUT. For an encoder-decoder, a line is a
          source, or a source, a TAB and its target. EVALUATE should not be a part of CALIBRATION
OUT:      loads in Transformers, if compressed-tensors is installed, and in vLLM. It also holds report.json and
          report.png
resuming: finished blocks are kept in OUT.partial; after an interrupt or a kill the same command with --resume
          continues, and ends in the same weights as a run that was not interrupted
status:   0 done, 2 the run could not be done, 130 interrupted
"""


def build_parser() -> Parser:
    """Builds the parser. A destination is a field of `QuantizeOptions`."""
    parser = Parser(
        prog=PROGRAM,
        usage="%(prog)s MODEL OUT [--calibration FILE] [options]",
        description=_EXAMPLES,
        epilog=_EPILOG,
    )
    parser.add_argument("model", metavar="MODEL", help="directory written by save_pretrained, hub name, or GGUF file")
    parser.add_argument("output", metavar="OUT", help="directory to write")
    add_options(parser, QuantizeOptions)
    add_debug(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    return command(PROGRAM, arguments, _run)


def _run(words: Sequence[str]) -> int:
    options = QuantizeOptions(**of_the_run(vars(build_parser().parse_args(list(words)))))
    with resumable(PROGRAM, words, options.partial):
        report = quantize_model(options, begins=allow_interrupts)
    if report is None:
        print(f"{PROGRAM}: all blocks were done before: {options.output} is complete", file=sys.stderr)
    elif not options.quiet:
        from rich.console import Console

        import fastgen
        from fastgen.quantization.report import table

        Console().print(table(report))
        print(f"tokens per second: {acceleration(fastgen.stats(), GENERATE)}", file=sys.stderr)
        print(f"{PROGRAM}: written to {options.output}, load it with {_loads(options.output)}", file=sys.stderr)
    return DONE


def _loads(folder: str) -> str:
    """Returns the line of Python that loads the output."""
    config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    kind = "AutoModelForSeq2SeqLM" if config.get("is_encoder_decoder") else "AutoModelForCausalLM"
    return f"import fastgen; from transformers import {kind}; {kind}.from_pretrained({folder!r})"


if __name__ == "__main__":
    sys.exit(main())
