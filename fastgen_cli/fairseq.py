"""`fastgen-generate-for-fairseq`, `fastgen-interactive-for-fairseq` and `fastgen-eval-lm`: FairSeq's commands, faster.

Every option of FairSeq's own command keeps its meaning, and standard output is the same.

Exit status: 0 done, 1 the reader of the output has gone away, 2 the run could not be done, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fastgen.counters import OF_FAIRSEQ
from fastgen_cli.command import (
    DONE,
    SETUP,
    UsageError,
    acceleration,
    allow_interrupts,
    check_stream,
    command,
    fail,
    model_of_its_own,
    renamed,
    run_named,
    speed,
)

if TYPE_CHECKING:
    from fastgen.pipeline import RunReport

GENERATE, INTERACTIVE, EVAL_LM = "fastgen-generate-for-fairseq", "fastgen-interactive-for-fairseq", "fastgen-eval-lm"
GENERATE_ANY = "fastgen-generate"


def generate(arguments: Sequence[str] | None = None) -> int:
    return _command(GENERATE, arguments, "generation", _generate)


def interactive(arguments: Sequence[str] | None = None) -> int:
    return _command(INTERACTIVE, arguments, "interactive_generation", _interact)


def eval_lm(arguments: Sequence[str] | None = None) -> int:
    return _command(EVAL_LM, arguments, "eval_lm", _evaluate)


def recognised(words: Sequence[str]) -> Callable[[], int] | None:
    """Returns a function that runs `fastgen-generate` if its command line names FairSeq's files; otherwise None.

    DATA --path MODEL ... runs `fastgen-generate-for-fairseq`. MODEL INPUT OUTPUT ... writes a record for each source of
    a data directory or a text, with FairSeq's options.
    """
    if any(word.partition("=")[0] == "--path" for word in words):
        return lambda: generate(words)
    if len(words) < 3 or any(word.startswith("--") for word in words[:3]) or not _is_checkpoint(words[0]):
        return None
    model, source, output, *options = words
    overwrite = "--overwrite" in options
    options = [option for option in options if option != "--overwrite"]
    is_data = _is_data(source)

    def run(cfg: Any, own: argparse.Namespace) -> None:
        from fastgen.pipeline import fairseq

        if not is_data:
            check_stream("stdin", source == "-")
            cfg.task.data = _dictionaries_of(model)
        _write_records(fairseq.generate if is_data else fairseq.interact, cfg, own, output, overwrite)

    if is_data:
        # Keeps the last batch, which fairseq-fixed would drop: every source needs an output.
        all_sources = () if "--required-batch-size-multiple" in options else ("--required-batch-size-multiple", "1")
        kind, line = "generation", [source, "--path", model, *all_sources, *options]
    else:
        # FairSeq's default is one line at a time. `run` fills in DATA.
        batch = () if {"--batch-size", "--max-sentences", "--max-tokens"} & set(options) else ("--batch-size", "16")
        buffer = () if "--buffer-size" in options else ("--buffer-size", "1024")
        kind = "interactive_generation"
        line = [".", "--path", model, "--input", source, *batch, *buffer, *options]
    return lambda: _command(GENERATE_ANY, line, kind, run)


def _is_checkpoint(name: str) -> bool:
    """Returns whether this names checkpoints, separated as in a search path: files that torch has saved."""
    paths = [Path(part) for part in name.split(os.pathsep)]
    if not all(path.suffix in (".pt", ".pth", ".ckpt") and path.is_file() for path in paths):
        return False
    from fastgen.pipeline.fairseq.files import saved_by_torch

    return all(map(saved_by_torch, paths))


def _is_data(name: str) -> bool:
    """Returns whether this is a directory that `fairseq-preprocess` has written: dictionaries, and data beside them."""
    path = Path(name)
    return path.is_dir() and any(path.glob("dict.*txt")) and any(any(path.glob(f"*.{end}")) for end in ("idx", "bin"))


def _dictionaries_of(checkpoint: str) -> str:
    """Returns the directory of a checkpoint's dictionaries. Raises SetupError if there are none beside it."""
    from fastgen.pipeline.errors import SetupError

    folder = Path(checkpoint.split(os.pathsep)[0]).resolve().parent
    if not any(folder.glob("dict.*txt")):
        raise SetupError(
            f"there is no dict.*.txt beside {checkpoint}: fastgen-interactive-for-fairseq DATA --path {checkpoint} "
            "takes the directory of the dictionaries"
        )
    return str(folder)


def _write_records(run: Callable[..., Any], cfg: Any, own: argparse.Namespace, output: str, overwrite: bool) -> None:
    """Runs a FairSeq command with its lines in a work file, and makes the output from what it printed."""
    from fastgen.pipeline.fairseq.files import Records, log_to

    check_stream("stdout", output == "-")
    allow_interrupts()
    log_to(sys.stderr)
    records = Records(output, overwrite)
    try:
        report = run(cfg, own.postprocess_workers, records.lines, records.keep)
        records.finish(report.samples + report.skipped)
    finally:
        if records.close():
            print(f"{GENERATE_ANY}: what was finished is in {records.partial}", file=sys.stderr)
    _summary(cfg, report, report.notes)


def _command(
    program: str, arguments: Sequence[str] | None, kind: str, run: Callable[[Any, argparse.Namespace], None]
) -> int:
    """Runs a command whose options are those of FairSeq's parser of this kind."""

    def work(words: Sequence[str]) -> int:
        import fastgen
        from fastgen import settings
        from fastgen.fairseq import missing, silence

        problem = missing()
        if problem is not None:
            return fail(program, problem, SETUP)
        silence()
        fastgen.enable()  # FairSeq cannot be imported without it, even with FASTGEN_DISABLE=1
        own, cfg = _parse(program, words, kind)
        with (
            _children_import_fairseq(),
            model_of_its_own(),
            settings.changed(weight_dtype=own.weight_dtype),
            fastgen.disabled() if own.no_fastgen else contextlib.nullcontext(),
        ):
            run(cfg, own)
        return DONE

    return command(program, arguments, work)


def _parse(program: str, words: Sequence[str], kind: str) -> tuple[argparse.Namespace, Any]:
    """Returns FastGen's own options, and the configuration that FairSeq makes of all others."""
    words = renamed(program, words)
    # FairSeq looks for --user-dir in sys.argv.
    sys.argv = [program, *words]
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    from fastgen import settings

    parser = _parser(kind)
    parser.prog = program
    group = parser.add_argument_group("FastGen")
    group.add_argument(
        "--postprocess-workers",
        type=_count,
        metavar="N",
        help="processes that put outputs into words; 0: a thread (default: a quarter of the cores, 1 to 4)",
    )
    group.add_argument(
        "--weight-dtype",
        choices=settings.CHOICES["weight_dtype"],
        default=settings.current().weight_dtype,
        help="int8, int4 or bf16: faster on a CPU that has the instructions, with other results (default: fp32)",
    )
    group.add_argument("--no-fastgen", action="store_true", help="run FairSeq's own generation, for comparison")
    group.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.error = _usage_error  # type: ignore[method-assign]
    args = options.parse_args_and_arch(parser, words)
    names = ("postprocess_workers", "weight_dtype", "no_fastgen", "debug")
    own = argparse.Namespace(**{name: vars(args).pop(name) for name in names})
    own.no_fastgen |= settings.current().disabled
    try:
        return own, convert_namespace_to_omegaconf(args)
    except Exception as error:
        missing = re.search(r"tokenizer\.(\w+)_lang=null", str(error))
        if missing is None:
            raise
        raise UsageError(f"this tokenizer needs --{missing[1]}-lang") from error


def _parser(kind: str) -> argparse.ArgumentParser:
    from fairseq import options

    parser = getattr(options, f"get_{kind}_parser")()
    if kind == "generation":
        # As in FairSeq's command: tasks of audio models read arguments of this architecture.
        parser.add_argument("--arch", "-a", metavar="ARCH", default="wav2vec2", help="for tasks that need to know it")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes")
    return int(text)


def _usage_error(message: str) -> NoReturn:
    """Reports the error on one line. FairSeq would print all of its options and, for a wrong name, all known ones."""
    choice = re.fullmatch(r"(argument \S+: invalid choice: '(.*)') \(choose from (.*)\)", message, re.DOTALL)
    if choice is not None:
        known = re.findall(r"[^',\s]+", choice.group(3))
        near = difflib.get_close_matches(choice.group(2), known, n=3)
        message = f"{choice.group(1)}; " + (f"did you mean {', '.join(near)}?" if near else f"{len(known)} are known")
    raise UsageError(message)


def _generate(cfg: Any, own: argparse.Namespace) -> None:
    from fastgen.pipeline import fairseq

    check_stream("stdout", cfg.common_eval.results_path is None)
    _summary(cfg, fairseq.generate(cfg, own.postprocess_workers, begins=allow_interrupts))


def _interact(cfg: Any, own: argparse.Namespace) -> None:
    check_stream("stdin", cfg.interactive.input == "-")
    check_stream("stdout", True)
    from fastgen.pipeline import fairseq

    _summary(cfg, fairseq.interact(cfg, own.postprocess_workers, begins=allow_interrupts))


@contextlib.contextmanager
def _children_import_fairseq() -> Iterator[None]:
    """Lets child processes import FairSeq for the duration of a block: with FASTGEN_DISABLE=1 they could not."""
    before = os.environ.pop("FASTGEN_DISABLE", None)
    try:
        yield
    finally:
        if before is not None:
            os.environ["FASTGEN_DISABLE"] = before


def _evaluate(cfg: Any, own: argparse.Namespace) -> None:
    from fastgen.pipeline import fairseq

    # The results go to the log: to standard output, unless a module of FairSeq's has set up a log on standard error.
    check_stream("stderr" if logging.getLogger().handlers else "stdout", True)
    fairseq.evaluate(cfg)


def _summary(cfg: Any, report: RunReport, notes: Sequence[str] = ()) -> None:
    """Reports how a run went; `notes` are messages that standard output does not have."""
    import fastgen

    if report.skipped > 0:
        print(
            f"{report.skipped} of {report.samples + report.skipped} sources were left out: too long, in another shard, "
            "or in a last batch that fairseq-fixed drops (--required-batch-size-multiple 1 keeps it)",
            file=sys.stderr,
        )
    if not cfg.common_eval.quiet:
        print(speed(report, "sentences", f", {report.tokens} tokens"), file=sys.stderr)
    for note in notes:
        print(note, file=sys.stderr)
    if not cfg.common_eval.quiet:
        print(acceleration(fastgen.stats(), OF_FAIRSEQ), file=sys.stderr)


if __name__ == "__main__":
    run_named("fastgen_cli.fairseq", {"generate": generate, "interactive": interactive, "eval-lm": eval_lm})
