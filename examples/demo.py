"""The main job on real text with trained models, unpatched and patched: `make demo`.

Two runs of `fastgen-generate` over the same inputs with the same options, each in a process of its own so that its
peak memory is its own: once with --no-fastgen, once without. First the encoder-decoder that restores punctuation and
capitals, over 500 held-out passages with 4 beams; then the language model, continuing the first words of some of
them. Times are generation alone: imports and loading the model are not in them. At the end, static and continuous
batching side by side (`slots.py`). The exit status is 1 where a single token differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "data" / "heldout.src.txt"
REFERENCES = HERE / "data" / "heldout.ref.txt"
RESTORE = HERE / "models" / "kjv-bart"
CONTINUE = HERE / "models" / "kjv-gpt2"
WAYS = {"unpatched": ["--no-fastgen"], "patched": []}
NAMES = {"unpatched": "Transformers", "patched": "with FastGen"}
NEXT = """Next, your own model (a folder, or a name of the hub):  .venv/bin/fastgen-generate MODEL in.txt out.txt
or one line in your own script:  import fastgen   (docs/recipes.md has more)"""
PROMPT_WORDS = 8
_SECONDS_TO_END = 20.0
INTERRUPTED = 130
EXAMPLES = 3


def generate(model: Path, source: Path, folder: Path, name: str, options: list[str]) -> dict[str, Any]:
    """Runs both ways over one input; returns each run's report and rows."""
    results = {}
    for way, flag in WAYS.items():
        output = folder / f"{name}.{way}.jsonl"
        report = folder / f"{name}.{way}.report.json"
        command = [sys.executable, "-m", "fastgen_cli.generate", str(model), str(source), str(output), "--overwrite",
                   "--token-ids", "--report", str(report), *options, *flag]  # fmt: skip
        print(f"{name}, {NAMES[way]} ...", file=sys.stderr)
        status = run(command)
        if status != 0:
            sys.exit(f"demo: fastgen-generate ended with status {status}")
        with open(output, encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        results[way] = {"report": json.loads(report.read_text(encoding="utf-8")), "rows": rows}
    return results


def run(command: list[str]) -> int:
    """Runs a command and returns its exit status. The command ends with this process, even at a `kill`."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # Works from a checkout and with the installed package.
    with subprocess.Popen(command, cwd=HERE.parent) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            # A terminal also interrupts the command, which then ends in order, and frees its semaphores.
            with contextlib.suppress(subprocess.TimeoutExpired):
                if process.wait(timeout=_SECONDS_TO_END) == INTERRUPTED:
                    sys.exit(INTERRUPTED)  # the command has reported it
            process.terminate()
            raise
        except BaseException:
            process.terminate()
            raise


def identical(results: dict[str, Any]) -> tuple[int, int]:
    """Returns how many outputs have the same tokens both ways, and their number."""
    unpatched, patched = (results[way]["rows"] for way in WAYS)
    same = sum(one["token_ids"] == other["token_ids"] for one, other in zip(unpatched, patched, strict=True))
    return same, len(unpatched)


def table(console: Console, title: str, results: dict[str, Any], metrics: dict[str, str]) -> None:
    """Prints both ways side by side."""
    shown = Table(title=title, title_justify="left")
    shown.add_column("")
    for way in WAYS:
        shown.add_column(NAMES[way], justify="right")
    reports = [results[way]["report"] for way in WAYS]
    rows = {
        "samples per second": [f"{report['samples_per_second']:.2f}" for report in reports],
        "tokens per second": [f"{report['tokens_per_second']:.1f}" for report in reports],
        "generation, seconds": [f"{report['seconds']['generate']:.1f}" for report in reports],
        "peak memory, MiB": [f"{report['peak_memory_bytes'] / 2**20:.0f}" for report in reports],
        "waiting for post-processing": [f"{100 * report['waiting_for_output_share']:.2f} %" for report in reports],
        **{title: [f"{report['metrics'][name]:.2f}" for report in reports] for name, title in metrics.items()},
    }
    for label, values in rows.items():
        shown.add_row(label, *values)
    same, count = identical(results)
    speed_up = reports[1]["samples_per_second"] / reports[0]["samples_per_second"]
    shown.add_section()
    shown.add_row("identical outputs, token for token", "", f"{same} of {count}")
    shown.add_row("speed-up", "", f"{speed_up:.2f} times")
    console.print(shown)


def picture(console: Console, title: str, results: dict[str, Any]) -> None:
    """Prints the seconds of both ways as bars."""
    shown = Table(title=title, title_justify="left", box=None, show_header=False, padding=(0, 1))
    seconds = {way: results[way]["report"]["seconds"]["generate"] for way in WAYS}
    for way, taken in seconds.items():
        shown.add_row(NAMES[way], Bar(max(seconds.values()), 0, taken, width=60), f"{taken:.1f} s")
    console.print(shown)


def examples(console: Console, rows: list[dict[str, Any]], names: dict[str, str]) -> None:
    """Prints a few rows from across the input, of medium length among their neighbours."""
    step = max(1, len(rows) // EXAMPLES)
    for start in range(0, step * min(EXAMPLES, len(rows)), step):
        near = sorted(rows[start : start + step], key=lambda row: len(row["input"]))
        row = near[len(near) // 3]
        for name, label in names.items():
            console.print(Text(f"{label:>10}  ", style="bold").append(row[name], style="not bold"))
        console.print()


def copying(sources: list[str], references: list[str]) -> float:
    """Returns the BLEU of copying the input."""
    from sacrebleu import corpus_bleu

    return float(corpus_bleu(sources, [references]).score)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=500, help="passages for the first part (default: 500)")
    parser.add_argument("--prompts", type=int, default=256, help="prompts for the second part (default: 256)")
    parser.add_argument("--output", type=Path, default=HERE.parent / "demo-output", help="folder for the outputs")
    arguments = parser.parse_args()
    missing = [path for path in (RESTORE, CONTINUE, SOURCES, REFERENCES) if not path.exists()]
    if missing:
        print(f"demo: {missing[0]} is missing: examples/train.py makes it", file=sys.stderr)
        return 2
    arguments.output = arguments.output.resolve()
    arguments.output.mkdir(parents=True, exist_ok=True)
    console = Console(width=None if sys.stdout.isatty() else 120)
    sources = SOURCES.read_text(encoding="utf-8").splitlines()[: arguments.limit]
    references = REFERENCES.read_text(encoding="utf-8").splitlines()[: arguments.limit]

    options = ["--num-beams", "4", "--batch-size", "32", "--limit", str(len(sources)), "--reference", str(REFERENCES),
               "--metrics", "bleu,rouge"]  # fmt: skip
    restored = generate(RESTORE, SOURCES, arguments.output, "restore", options)
    prompts = arguments.output / "prompts.txt"
    starts = [" ".join(text.split()[:PROMPT_WORDS]) for text in references[: arguments.prompts]]
    prompts.write_text("\n".join(starts) + "\n", encoding="utf-8")
    options = ["--num-beams", "4", "--no-repeat-ngram-size", "2", "--repetition-penalty", "1.4",
               "--max-new-tokens", "48", "--batch-size", "16", "--include-prompt"]  # fmt: skip
    continued = generate(CONTINUE, prompts, arguments.output, "continue", options)

    console.print()
    title = f"Restoring punctuation and capitals: {len(sources)} held-out passages, encoder-decoder, 4 beams, fp32"
    table(console, title, restored, {"bleu": "BLEU", "rougeL": "ROUGE-L"})
    console.print(f"For comparison, the BLEU of copying the source: {copying(sources, references):.2f}")
    console.print("Speeds count generation alone, without imports and loading the model.\n")
    examples(console, restored["patched"]["rows"], {"input": "source", "reference": "reference", "text": "output"})
    title = f"Continuing a text: {len(starts)} prompts, decoder-only, 4 beams, no 2-gram twice, 48 new tokens, fp32"
    table(console, title, continued, {})
    examples(console, continued["patched"]["rows"], {"input": "prompt", "text": "output"})
    picture(console, "Seconds of generation: restoring", restored)
    picture(console, "Seconds of generation: continuing", continued)
    console.print()
    status = run([sys.executable, str(HERE / "slots.py"), "--picture", str(arguments.output / "slots.png")])
    if status != 0:
        return status
    console.print(NEXT, highlight=False, soft_wrap=True)
    for results in (restored, continued):
        same, count = identical(results)
        if same != count:
            print(f"demo: {count - same} of {count} outputs differ between unpatched and patched", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    try:
        status = main()
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        status = INTERRUPTED
    sys.exit(status)
