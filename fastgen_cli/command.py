"""What the commands share: parsers, exit statuses, one-line errors, interrupts, closed streams, and summaries."""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import itertools
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import fastgen
from fastgen import __version__, patching
from fastgen.counters import ENCODER, Drafts, Outcome
from fastgen.report import unused_weights

if TYPE_CHECKING:
    from fastgen.pipeline import RunReport
    from fastgen.pipeline.run import DataRun

DONE, SKIPPED, SETUP, INTERRUPTED = 0, 1, 2, 130


class UsageError(Exception):
    """The command line is invalid."""


class Ended(Exception):
    """Ends the command with a message and an exit status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def command(program: str, arguments: Sequence[str] | None, work: Callable[[Sequence[str]], int]) -> int:
    """Runs a command with the words of its line, by default the process's, and returns its exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    with standard_streams(), interrupts_end(program):
        return reported(program, lambda: work(words), debug="--debug" in words)


def fail(program: str, message: str, status: int) -> int:
    """Reports an error; returns the exit status."""
    print(f"{program}: {message}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:
        # Otherwise Python would flush again at exit, print a traceback and change the status.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    return status


def renamed(program: str, words: Sequence[str]) -> list[str]:
    """Returns the words of a command line with the current names of options.

    Prints a line to standard error for each old name, also of an environment variable.
    """
    from fastgen.settings import RENAMED

    options = list(words)

    def tell(old: str, new: str) -> None:
        print(f"{program}: DeprecationWarning: {old} is now called {new}", file=sys.stderr)

    for old_name, new_name in RENAMED.items():
        variable, old, new = (f"FASTGEN_{old_name.upper()}", *(_option(name) for name in (old_name, new_name)))
        if os.environ.get(variable, "").strip():
            tell(variable, f"FASTGEN_{new_name.upper()}")
        for position, word in enumerate(itertools.takewhile(lambda word: word != "--", words)):
            name, equals, value = word.partition("=")
            if name == old:
                tell(old, new)
                options[position] = new + equals + value
    return options


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def reported(program: str, work: Callable[[], int], debug: bool) -> int:
    """Returns the status of `work`, or reports the error that ended it on one line and returns its status.

    Args:
        debug: lets unexpected errors through, with their traceback.
    """
    try:
        return work()
    except KeyboardInterrupt:
        return fail(program, "interrupted", INTERRUPTED)
    except Ended as error:
        return fail(program, str(error), error.status)
    except UsageError as error:
        return fail(program, f"{error} (--help lists the options)", SETUP)
    except Exception as error:
        if debug:
            raise
        from fastgen.pipeline import PipelineError
        from fastgen.pipeline.errors import one_line

        if isinstance(error, PipelineError):
            return fail(program, one_line(error), error.status)
        if isinstance(error, BrokenPipeError):
            return fail(program, "the reader of the output has gone away", SKIPPED)
        return fail(program, f"{type(error).__name__}: {one_line(error)} (--debug shows where)", SETUP)


@contextlib.contextmanager
def interrupts_end(program: str) -> Iterator[None]:
    """Makes Ctrl-C end the process with one line and status 130 inside this block, until `allow_interrupts` is called.

    Imports take seconds, and libraries catch a KeyboardInterrupt, or print it if it cannot be raised. Nothing is
    half-written then, so the process can end on the spot.
    """

    def end(*_: object) -> None:
        os.write(2, f"{program}: interrupted\n".encode())
        _give_semaphores_back()
        os._exit(INTERRUPTED)

    before = signal.getsignal(signal.SIGINT)
    # Does not replace a caller's own handler. Only the main thread can set one.
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    _interrupts_before.append(before)
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        allow_interrupts()


def _give_semaphores_back() -> None:
    """Releases the semaphores shared with worker processes: Python warns of each that is left at exit."""
    util, synchronize = (sys.modules.get(f"multiprocessing.{name}") for name in ("util", "synchronize"))
    with contextlib.suppress(Exception):  # none of this is public, and the process ends in any case
        for finalizer in list(util._finalizer_registry.values()):  # type: ignore[union-attr]
            if finalizer._callback == synchronize.SemLock._cleanup:  # type: ignore[union-attr]
                finalizer()


# The previous handler of Ctrl-C, while `interrupts_end` has its own.
_interrupts_before: list[Any] = []


def allow_interrupts() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt again; see `interrupts_end`."""
    if _interrupts_before:
        signal.signal(signal.SIGINT, _interrupts_before.pop())


_closed: set[str] = set()


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Replaces closed standard streams by the null device inside this block.

    Otherwise printing would fail, and a file that is opened later would get the descriptor of the closed stream.
    """
    streams = {
        name: mode for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")) if not getattr(sys, name)
    }
    for name, mode in streams.items():
        setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (closed below)
    _closed.update(streams)
    try:
        yield
    finally:
        for name in streams:
            getattr(sys, name).close()
            setattr(sys, name, None)
        _closed.clear()


def check_stream(name: str, needed: bool) -> None:
    """Raises `UsageError` if a needed standard stream was closed when the command began."""
    if needed and name in _closed:
        raise UsageError(f"{name} is closed: give a file")


@contextlib.contextmanager
def model_of_its_own() -> Iterator[None]:
    """Applies settings for a model that nobody else uses, so that its output is reproducible to the last digit.

    Packed weights live as long as the model, because nobody changes its weights between two batches. Fixed rules choose
    the kernels of linear layers. Settings that the user has made explicitly stay.
    """
    from fastgen import settings

    with settings.changed(**settings.unless_explicit(packed_weights="keep")):
        yield


_NOT_CALLED = "FastGen was not called (python -m fastgen says what it hooks)"
_NOT_COUNTED = {ENCODER: "FastGen does not know the layers of this model"}


def acceleration(stats: Mapping[str, Any], entry_point: str) -> str:
    """Returns the last line of a command: whether FastGen accelerated it, or why not.

    Args:
        stats: the counts of `fastgen.stats()` for the command.
        entry_point: under which the calls of its model are counted.
    """
    if not patching.is_active():
        return "not accelerated: FastGen is disabled (--no-fastgen or FASTGEN_DISABLE=1)"
    outcome = Outcome.of(stats, entry_point)
    if not (outcome.accelerated or outcome.reasons):
        return f"not accelerated: {_NOT_COUNTED.get(entry_point, _NOT_CALLED)}"
    return "; ".join([str(outcome), *unused_weights(stats)])


def speed(report: RunReport, unit: str, more: str = "", behind: str = "") -> str:
    """Returns the speed of a run, and the share of time that its model waited for other stages.

    Args:
        unit: what is counted, in the plural.
        more: text after the count.
        behind: text after the first line.
    """
    seconds = report.seconds
    return (
        f"{report.samples} {unit}{more} in {seconds['generate']:.1f} s: {report.samples_per_second:.2f} {unit}/s, "
        f"{report.tokens_per_second:.1f} tokens/s (and {seconds['load']:.1f} s to load){behind}\n"
        f"the model waited {100 * report.waiting_for_input_share:.2f} % of the time for input and "
        f"{100 * report.waiting_for_output_share:.2f} % for post-processing; "
        f"finishing took {seconds['finish']:.2f} s more"
    )


@contextlib.contextmanager
def resumable(program: str, words: Sequence[str], left: Path | None) -> Iterator[None]:
    """Reports how to continue after an interrupt that leaves unfinished work.

    Args:
        words: the command line.
        left: the path of unfinished work; None if none is kept.

    Raises:
        Ended: after such an interrupt.
    """
    try:
        yield
    except KeyboardInterrupt:
        if left is None or not left.exists():
            raise
        again = shlex.join(["--resume", *(word for word in words if word != "--resume")])
        raise Ended(f"interrupted; to continue: {program} {again}", INTERRUPTED) from None


def run_over_data(program: str, words: Sequence[str], run: DataRun, entry_point: str) -> int:
    """Runs, and reports on standard error: the speed, skipped records, and whether FastGen accelerated it.

    Args:
        words: the command line, with which an interrupted run is continued.
        entry_point: under which the calls of the model are counted.

    Returns:
        the exit status.

    Raises:
        Ended: after an interrupt that leaves unfinished work.
    """

    def say(line: str) -> None:
        print(line, file=sys.stderr)

    settings = run.settings
    check_stream("stdin", settings.from_stdin)
    check_stream("stdout", settings.to_stdout)
    with resumable(program, words, None if settings.to_stdout else settings.partial_path), model_of_its_own():
        report = run.run(begins=allow_interrupts)
    if report.resumed_samples and not report.batches:
        say(f"{program}: all records were done before: the output is complete")
    elif not settings.quiet:
        say(_summary(report))
    if report.metrics and not (settings.quiet and settings.written_beside().get("the score path")):
        say("  ".join(f"{name} {score:.2f}" for name, score in report.metrics.items()))
    if report.truncated:
        say(f"{program}: {report.truncated} of {report.samples} inputs were cut: see --max-length")
    if report.skipped:
        where = f": see {report.errors_file}" if report.errors_file else ""
        say(f"{program}: {report.skipped} of {report.skipped + report.samples} records skipped{where}")
    if report.batches and not settings.quiet:
        where = "standard output" if settings.to_stdout else settings.output
        skipped = f", {report.skipped} skipped" if report.skipped else ""
        say(
            f"{where}: {report.samples} records{skipped} in {report.seconds['generate']:.1f} s, "
            f"{report.tokens_per_second:.1f} tokens/s; {acceleration(report.fastgen['stats'], entry_point)}"
        )
    return SKIPPED if report.skipped else DONE


def _summary(report: RunReport) -> str:
    resumed = f", {report.resumed_samples} of them from before" if report.resumed_samples else ""
    memory = f", peak memory {report.peak_memory_bytes / 2**30:.2f} GiB" if report.peak_memory_bytes else ""
    drafts = Drafts.between({}, report.fastgen.get("stats", {}))
    return speed(report, "samples", resumed, memory) + (f"\n{drafts}" if drafts else "")


def run_named(module: str, commands: Mapping[str, Callable[[Sequence[str]], int]]) -> NoReturn:
    """Runs `python -m MODULE COMMAND ...`, for modules with several commands."""
    name, *words = sys.argv[1:] or [""]
    if name not in commands:
        sys.exit(fail(f"python -m {module}", f"give one of {', '.join(commands)}", SETUP))
    sys.exit(commands[name](words))


class Parser(argparse.ArgumentParser):
    """Reports an error as one line, without the list of options above it.

    Its help page omits rare options and the epilog, which `--help-all` shows. Has the options of every command.
    """

    def __init__(self, *, epilog: str, **options: Any) -> None:
        super().__init__(
            epilog="More options, and what the formats, errors and resuming are like: --help-all",
            formatter_class=_ShortPage,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            **options,
        )
        self.whole_epilog = epilog
        self.add_argument("--version", action="version", version=f"{self.prog} {__version__}")
        self.add_argument("--help-all", nargs=0, action=_HelpAll, help="this page, with all options")
        about = 'print what completes this command in a shell: eval "$(... --print-completion bash)"'
        self.add_argument("--print-completion", choices=("bash", "zsh", "tcsh"), action=_Completion, help=about)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def add_rare(group: argparse._ActionsContainer, *names: str, is_rare: bool = True, **options: Any) -> None:
    """Adds an option that the short help page omits if it is rare."""
    vars(group.add_argument(*names, **options))["is_rare"] = is_rare


def add_debug(group: argparse._ActionsContainer) -> None:
    add_rare(group, "--debug", action="store_true", help="show the traceback of an error")


class _Page(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=120)


class _ShortPage(_Page):
    def add_argument(self, action: argparse.Action) -> None:
        if not getattr(action, "is_rare", False):
            super().add_argument(action)


class _HelpAll(argparse.Action):
    def __call__(self, parser: Any, *rest: Any) -> None:
        parser.formatter_class, parser.epilog = _Page, parser.whole_epilog
        parser.print_help()
        parser.exit()


class _Completion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, shell: Any, *rest: Any) -> NoReturn:
        try:
            import shtab
        except ImportError:
            parser.error("--print-completion needs the package shtab, which is not installed: pip install shtab")
        print(shtab.complete(parser, shell=shell))
        parser.exit()


def data_parser(program: str, description: str, epilog: str, options: type) -> tuple[Parser, argparse._ArgumentGroup]:
    """Builds the parser of a command over a data set. A destination is the name of a field of the options.

    Returns:
        The parser, and its last group of options.
    """
    parser = Parser(prog=program, usage="%(prog)s MODEL INPUT OUTPUT [options]", description=description, epilog=epilog)
    parser.add_argument("model", metavar="MODEL", help="directory written by save_pretrained, GGUF file, or hub name")
    parser.add_argument("input", metavar="INPUT", help="file, data set, or - for standard input")
    parser.add_argument("output", metavar="OUTPUT", help="file, or - for standard output")
    add_options(parser, options)
    group = parser.add_argument_group("FastGen")
    group.add_argument("--no-fastgen", action="store_true", help="run the library's own code, for comparison")
    add_debug(group)
    return parser, group


def of_the_run(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the run's options of `data_parser`'s command line. Disables FastGen if that asks for it."""
    given.pop("debug", None)
    if given.pop("no_fastgen", False):
        fastgen.disable()
    return given


def add_options(parser: Parser, declared: type) -> None:
    """Adds the options that the fields of a class declare. A destination is the name of a field."""
    groups: dict[str, Any] = {}
    group: Any = parser
    for field in dataclasses.fields(declared):
        about = field.metadata
        if not about:
            continue
        if title := about["group"]:
            group = groups.get(title) or parser.add_argument_group(title)
            groups[title] = group
        names = ["--" + field.name.replace("_", "-"), *about["aliases"]]
        given: dict[str, Any] = {"action": "store_true"}
        if field.type != "bool":
            kind = _kind(field.name, str(field.type))
            metavar = {int: "N", float: "X"}.get(kind, field.name.split("_")[-1].upper())  # type: ignore[call-overload]
            given = {"type": kind, "metavar": metavar}
        add_rare(group, *names, is_rare=about["rare"], dest=field.name, help=about["help"], **given)


def _kind(name: str, annotation: str) -> Callable[[str], Any]:
    """Returns the function that converts a command-line word to a field's value."""
    if name == "batch_size":
        return _number_or_word
    if name == "keep":
        return _names
    if annotation.startswith("tuple"):
        return _listed
    return {"int": int, "float": float}.get(annotation.partition(" ")[0], str)


def _number_or_word(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdecimal() else text


def _names(text: str) -> tuple[str, ...]:
    """Parses names of columns, which may contain spaces; a name with a comma is quoted, as in a CSV file."""
    return tuple(name for name in next(csv.reader([text], skipinitialspace=True), []) if name)


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.replace(",", " ").split())
