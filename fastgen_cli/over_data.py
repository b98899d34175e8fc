"""What the commands over a data set have in common: an interrupt, the summary, the last lines."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fastgen.counters import Drafts
from fastgen_cli.shared import (
    DONE,
    INTERRUPTED,
    SKIPPED,
    Ended,
    acceleration,
    check_stream,
    model_of_its_own,
    timing_line,
)

if TYPE_CHECKING:
    from fastgen.pipeline import RunReport
    from fastgen.pipeline.settings import DataOptions


def run_over_data(program: str, words: Sequence[str], settings: DataOptions, run: Callable[[], RunReport]) -> RunReport:
    """Runs, and says on standard error how it went. Raises `Ended` after an interrupt that leaves work behind.

    Args:
        words: the command line, with which the run is continued.
    """
    check_stream("stdin", settings.from_stdin)
    check_stream("stdout", settings.to_stdout)
    try:
        with model_of_its_own():
            report = run()
    except KeyboardInterrupt:
        if settings.to_stdout or not settings.partial_path.exists():
            raise
        again = shlex.join(["--resume", *(word for word in words if word != "--resume")])
        raise Ended(f"interrupted; to continue: {program} {again}", INTERRUPTED) from None
    if report.resumed_samples and not report.batches:
        print(f"{program}: all records were done before: the output is complete", file=sys.stderr)
    elif not settings.quiet:
        print(_summary(report), file=sys.stderr)
    return report


def ended(program: str, report: RunReport, settings: DataOptions, entry_point: str) -> int:
    """Says how many records were skipped, and in the last line what was done, and whether FastGen accelerated it.

    Returns:
        the exit status.

    Args:
        entry_point: what the calls of the model are counted under.
    """
    if report.skipped:
        where = f": see {report.errors_file}" if report.errors_file else ""
        of = report.skipped + report.samples
        print(f"{program}: {report.skipped} of {of} records skipped{where}", file=sys.stderr)
    if report.batches and not settings.quiet:
        where = "standard output" if settings.to_stdout else settings.output
        skipped = f", {report.skipped} skipped" if report.skipped else ""
        print(
            f"{where}: {report.samples} records{skipped} in {report.seconds['generate']:.1f} s, "
            f"{report.tokens_per_second:.1f} tokens/s; {acceleration(report.fastgen['stats'], entry_point)}",
            file=sys.stderr,
        )
    return SKIPPED if report.skipped else DONE


def _summary(report: RunReport) -> str:
    seconds = report.seconds
    resumed = f", {report.resumed_samples} of them from before" if report.resumed_samples else ""
    memory = f", peak memory {report.peak_memory_bytes / 2**30:.2f} GiB" if report.peak_memory_bytes else ""
    drafts = Drafts.between({}, report.fastgen.get("stats", {}))
    return (
        f"{report.samples} samples{resumed} in {seconds['generate']:.1f} s: {report.samples_per_second:.2f} samples/s, "
        f"{report.tokens_per_second:.1f} tokens/s (and {seconds['load']:.1f} s to load){memory}\n"
        + timing_line(report.waiting_for_input_share, report.waiting_for_output_share, seconds["finish"])
        + (f"\n{drafts}" if drafts else "")
    )
