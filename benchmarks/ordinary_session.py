"""An ordinary session, call by call (the workloads `ordinary-session-*`), without writing results:

    python -m benchmarks.ordinary_session MODEL [--seed N] [--calls N] [--repetitions N] [--sides NAME ...]
                                                [--json FILE] [--quiet] [--threads N] [--help]

MODEL is smollm2, smollm2-bfloat16, opus-mt or bart-base. The table has, for each call, the seconds of every side as
medians over its processes, how many times as fast as the library FastGen is, and whether it had a captured step. A call
is marked (!) if other processes kept a core busy whenever it was made: its times are worth little.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import backends
from benchmarks.__main__ import DONE, FAILED, INTERRUPTED, run_workload
from benchmarks.backends import SUBJECT
from benchmarks.record import Record
from benchmarks.workload import Context
from benchmarks.workloads.ordinary_session import WORKLOADS

_MODELS = {workload.work.name: workload for workload in WORKLOADS}


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ordinary_session",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", choices=_MODELS)
    parser.add_argument("--seed", type=int, default=0, help="of sizes and inputs (default: 0)")
    parser.add_argument("--calls", type=int, default=24, help="calls of a process (default: 24)")
    parser.add_argument("--repetitions", type=int, default=1, help="processes of each side (default: 1)")
    parser.add_argument(
        "--sides",
        nargs="+",
        choices=backends.ALL,
        help="default: transformers, fastgen, and another library if it is here",
    )
    parser.add_argument("--threads", type=int, help="of torch (default: torch's)")
    parser.add_argument("--json", type=Path, help="write the record to this file")
    parser.add_argument("--quiet", action="store_true", help="the table alone, no progress")
    return parser


def table(record: Record) -> Iterator[str]:
    """The record of a session as lines of text."""
    names = list(record.backends)
    yield "call  inputs         new  " + "".join(f"{name:>18}" for name in names) + "   ratio  captured"
    for number, call in enumerate(record.parameters.get("calls", ()), 1):
        sizes = f"{len(call['lengths'])} x {max(call['lengths'])}"
        seconds = "".join(f"{call['seconds'][name]:16.3f} s" for name in names)
        ratio = f"{call['ratio']:.2f}  {'yes' if call['captured'] else '   '}" if "ratio" in call else ""
        busy = "  (!)" if call["disturbed"] else ""
        yield f"{number:4}  {sizes:<12} {call['new_tokens']:5}  {seconds}    {ratio}{busy}".rstrip()
    yield "all".ljust(27) + "".join(f"{record.backends[name]['median']:16.2f} s" for name in names)
    memory = [record.memory.get(name, {}).get("peak_bytes", 0) / 2**20 for name in names]
    yield "peak memory".ljust(27) + "".join(f"{size:14.0f} MiB" for size in memory)


def conclusions(record: Record) -> Iterator[str]:
    """What the session as a whole says, a line each."""
    metrics = record.metrics
    if "ratio" in metrics:
        spread = f"{metrics['ratio_min']:.2f} to {metrics['ratio_max']:.2f}"
        yield f"{record.subject}: {metrics['ratio']:.2f} times as fast as {record.baseline} ({spread})"
    for pair, found in record.ratios.items():
        other, _, subject = pair.partition("/")
        if (other, subject) != (record.baseline, record.subject):
            yield f"{subject}: {found['ratio']:.2f} times as fast as {other} ({found['min']:.2f} to {found['max']:.2f})"
    if "peak_ratio" in metrics:
        yield f"peak memory of {SUBJECT}'s process: {metrics['peak_ratio']:.2f} of the library's"
    if record.identical is not None:
        yield "tokens: " + ("identical" if record.identical else "NOT IDENTICAL")
    yield from (f"same sequences, {name}: {100 * share:.0f} %" for name, share in record.same.items())
    if record.accelerated is False:
        yield "NOT ACCELERATED in every call"
    for entry_point, reasons in record.fallbacks.items():
        yield from (f"{entry_point}: {calls} calls: {reason}" for reason, calls in reasons.items())
    yield from record.notes
    yield from (f"{name} is not measured: {reason}" for name, reason in record.skipped.items())
    yield from (f"FAILED: {error}" for error in record.errors)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: that of `python -m benchmarks`."""
    options = build_parser().parse_args(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Being told to end must not leave the processes behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    context = Context(
        threads=options.threads,
        repetitions=options.repetitions,
        backends=None if options.sides is None else tuple(options.sides),
        log=lambda line: None if options.quiet else print(line, file=sys.stderr, flush=True),
    )
    try:
        record = run_workload(replace(_MODELS[options.model], seed=options.seed, calls=options.calls), context)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    if options.json is not None:
        options.json.write_text(json.dumps(record.to_json(), indent=1) + "\n", encoding="utf-8")
    print(f"{record.title}; seed {options.seed}, {options.repetitions} processes of each side")
    print(*table(record), *conclusions(record), sep="\n")
    return FAILED if record.status != "ok" else DONE


if __name__ == "__main__":
    sys.exit(main())
