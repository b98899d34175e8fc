"""`python -m benchmarks`: runs the workloads and writes the results after each.

Exit status: 0 all done; 1 a result was not identical, or a workload failed (everything still ran and was written);
2 wrong options; 130 interrupted.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

import fastgen
from benchmarks import ROOT, backends, machine, smollm2
from benchmarks.measure import format_seconds
from benchmarks.record import Record
from benchmarks.results import Results
from benchmarks.workload import Context, Workload
from benchmarks.workloads import all_workloads

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Compares unpatched and patched generation."
    )
    add = parser.add_argument
    add("--only", nargs="+", metavar="NAME", help="run these workloads; NAME may have wildcards (gpt2-*)")
    add("--quick", action="store_true", help="a selection with fewer repetitions, in under five minutes")
    add("--list", action="store_true", help="print the names of the workloads and stop")
    names = ", ".join(backends.ALL)
    add("--backends", nargs="+", choices=backends.ALL, metavar="NAME", help=f"default: by the workload; {names}")
    add("--repetitions", type=_positive, metavar="N", help="runs of each backend (default: by the workload)")
    add("--seed", type=int, metavar="N", help="of sizes and inputs that are drawn (default: 0)")
    add("--threads", type=_positive, metavar="N", help="threads of torch (default: torch's)")
    add("--device", type=torch.device, default=torch.device("cpu"), help="cpu (default), cuda, cuda:1, ...")
    out = ROOT / "benchmarks" / "results"
    add("--out", type=Path, default=out, metavar="DIR", help="gets the machine's folder (default: benchmarks/results)")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def select(workloads: Sequence[Workload], only: Sequence[str] | None, quick: bool) -> list[Workload]:
    """Returns the workloads that the options select. Names override --quick, which then only sets the repetitions.

    Raises:
        LookupError: a name matches none.
    """
    if not only:
        return [workload for workload in workloads if workload.quick or not quick]
    found = {pattern: {w.name for w in workloads if fnmatch.fnmatchcase(w.name, pattern)} for pattern in only}
    for pattern, names in found.items():
        if not names:
            raise LookupError(f"no workload is called {pattern}; --list prints the names")
    return [workload for workload in workloads if workload.name in set.union(*found.values())]


def run_workload(workload: Workload, context: Context) -> Record:
    """Runs a workload. The record has its errors, together with all measurements before them."""
    record = workload.new_record()
    record.date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    record.commit = machine.commit()
    start, load = time.perf_counter(), machine.OtherLoad()
    try:
        if workload.needs_smollm2 and smollm2.folder() is None:
            record.skipped["the model"] = smollm2.MISSING
            context.log(f"{workload.name} is not measured: {smollm2.MISSING}")
        else:
            workload.run(context, record)
    except Exception as error:
        context.log(traceback.format_exc())
        record.errors.append(f"{type(error).__name__}: {error}")
    record.wall_seconds = time.perf_counter() - start
    record.other_load = load.cores()
    gc.collect()
    if is_usable(context.device):
        torch.cuda.empty_cache()
    return record


def is_usable(device: torch.device) -> bool:
    """Returns whether the device still works: an invalid memory access, for example, makes all later calls fail."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def run_all(workloads: Sequence[Workload], context: Context, results: Results) -> list[Record]:
    """Runs the workloads one after another; writes the results after each."""
    records = []
    for number, workload in enumerate(workloads):
        _log(f"[{number + 1}/{len(workloads)}] {workload.name}: {workload.title}")
        records.append(run_workload(workload, context))
        results.add(records[-1])
        for line in _outcome(records[-1]):
            context.log(line)
        if not is_usable(context.device):
            _log(f"{context.device} cannot be used any more in this process; what follows is left out")
            break
    return records


def _outcome(record: Record) -> Iterator[str]:
    for pair, found in record.ratios.items():
        times = (f"{name} {format_seconds(record.backends[name]['median'])}" for name in pair.split("/"))
        yield f"{', '.join(times)}: {found['ratio']:.2f} times as fast"
    if record.identical is not None:
        yield "identical" if record.identical else "NOT IDENTICAL"
    if record.accelerated is False:
        yield f"NOT ACCELERATED {record.fallbacks or ''}".rstrip()
    yield from record.notes
    yield from (f"FAILED: {error}" for error in record.errors)


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    options = build_parser().parse_args(arguments)
    available = all_workloads()
    if options.list:
        for workload in available:
            mark = "GPU" if workload.needs_gpu else "quick" if workload.quick else ""
            print(f"{workload.name:28} {mark:6} {workload.title}")
        return DONE
    try:
        chosen = select(available, options.only, options.quick)
    except LookupError as error:
        _log(f"python -m benchmarks: {error.args[0]}")
        return USAGE
    if options.device.type == "cuda" and not torch.cuda.is_available():
        _log(f"python -m benchmarks: {options.device}: torch {torch.__version__} sees no CUDA device")
        return USAGE
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    # Random weights need no downloads.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    fastgen.enable()
    left_out = [workload for workload in chosen if workload.needs_gpu and options.device.type != "cuda"]
    for workload in left_out:
        _log(f"{workload.name} is skipped: it needs an NVIDIA GPU, and this is a run on {options.device}")
    chosen = [workload for workload in chosen if workload not in left_out]
    if options.seed is not None:
        chosen = [replace(each, seed=options.seed) if hasattr(each, "seed") else each for each in chosen]
    # SIGTERM must also end the processes that a workload has started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    about = machine.about(options.device)
    about["settings"]["quick"] = options.quick
    # Keeps quick runs apart, because their fewer repetitions must not replace full results.
    folder = options.out / machine.slug(about["machine"]) / ("quick" if options.quick else "")
    results = Results(folder, about, [workload.name for workload in available])
    context = Context(
        device=options.device,
        threads=options.threads,
        repetitions=options.repetitions,
        quick=options.quick,
        backends=None if options.backends is None else tuple(options.backends),
        log=lambda line: _log("    " + line.rstrip().replace("\n", "\n    ")),
    )
    try:
        records = run_all(chosen, context, results)
    except KeyboardInterrupt:
        _log(f"interrupted; what was done is in {results.folder}")
        return INTERRUPTED
    _log(f"results are in {results.folder}")
    bad = [record.name for record in records if record.status != "ok"]
    if bad:
        _log(f"not identical or failed: {', '.join(bad)}")
    return FAILED if bad else DONE


if __name__ == "__main__":
    sys.exit(main())
