"""Writes the tables of docs/benchmarks.md and README.md, and docs/small-models.png, from the results of the benchmarks.

python docs/make_benchmark_tables.py            # writes the tables between the <!-- numbers --> markers
python docs/make_benchmark_tables.py --check    # exit status 1 if a table or the chart is out of date
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import chart  # noqa: E402
from benchmarks.measure import format_seconds  # noqa: E402
from benchmarks.record import Record  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "intel-xeon-processor-2-core" / "results.json"
RESULTS_OF_SMALL_MODELS = RESULTS
CHART = ROOT / "docs" / "small-models.png"
BEGIN, END = "<!-- numbers -->", "<!-- /numbers -->"
IN_README = (
    "bart-base-b16-s1024",
    "gpt2-b4-p512",
    "t5-base-b16-s128",
    "fairseq-gpt2-b4-p512",
    "llama-1b-greedy-b16-p128",
)
SMALL_MODELS = ("smollm2-", "opus-mt-")
SMALL_MODELS_IN_README = (
    "smollm2-b1",
    "smollm2-b16",
    "smollm2-b4-beam4",
    "smollm2-b1-bfloat16",
    "opus-mt-b1",
    "opus-mt-b8",
)
HEAD = ["workload", "against", "its time", "with FastGen", "times as fast", "K/V memory", "peak memory"]

# Ways to run FastGen that are not its defaults.
VARIANTS = {
    "fastgen-int8": " (int8)",
    "fastgen-bf16": " (bf16)",
    "fastgen-fairseq-plain": " (torch's products)",
    "fastgen-tier1": " (no captured step)",
    "fastgen-captured": " (captured from the first call on)",
}
# Of weights with fewer bits than the model has.
OTHER_PRECISIONS = ("-int8", "-q8_0", "-q4_1")


def read(path: Path) -> tuple[dict[str, object], list[Record]]:
    """What the results were measured on, and the records that compare two backends in generation or whole commands."""
    results = json.loads(path.read_text(encoding="utf-8"))
    records = [Record.from_json(record) for record in results["workloads"]]
    kept = [r for r in records if r.group in ("generation", "pipeline", "beams") and "ratio" in r.metrics]
    return results, kept


def rows(record: Record) -> list[list[str]]:
    """Lines of the large table: FastGen against the library, then against the others that were measured with it."""
    main = f"{record.baseline}/{record.subject}"
    metrics = record.metrics
    ratios = {main: {"ratio": metrics["ratio"], "min": metrics["ratio_min"], "max": metrics["ratio_max"]}}
    ratios |= record.ratios
    lines = []
    for pair, found in ratios.items():
        other, _, subject = pair.partition("/")
        if (other, subject) == ("transformers", "fastgen-fairseq"):
            continue  # two libraries: what FastGen gives is in the line of FairSeq
        memory = [f"{metrics[name]:.2f}" if name in metrics else "" for name in ("kv_ratio", "peak_ratio")]
        lines.append(
            [
                record.title,
                other,
                format_seconds(record.backends[other]["median"]),
                format_seconds(record.backends[subject]["median"]) + VARIANTS.get(subject, ""),
                f"**{found['ratio']:.1f}** ({found['min']:.1f} to {found['max']:.1f})",
                *(memory if pair == main else ["", ""]),
            ]
        )
    return lines


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rows])


def machine(results: dict[str, dict[str, object]]) -> str:
    about, versions, settings = results["machine"], results["versions"], results["settings"]
    return (
        f"Measured on: {about['cpu']}, {about['cores']} cores, {about['memory_gib']} GiB, {about['instructions']}, "
        f"{settings['threads']} threads; torch {versions['torch']}, transformers {versions['transformers']}."
    )


def best_other(record: Record) -> str:
    """The time of the fastest of the other libraries in the model's own precision, with its name."""
    times = {
        name: found["median"]
        for name, found in record.backends.items()
        if name != record.baseline and not name.startswith(record.subject) and not name.endswith(OTHER_PRECISIONS)
    }
    best = min(times, key=times.__getitem__)
    return f"{format_seconds(times[best])} ({best})"


def read_small_models() -> tuple[dict[str, object], list[Record]]:
    """As `read`, of the models whose steps are short."""
    results, records = read(RESULTS_OF_SMALL_MODELS)
    return results, [record for record in records if record.name.startswith(SMALL_MODELS)]


def make(path: Path = RESULTS) -> dict[Path, str]:
    """The text of README.md and docs/benchmarks.md with the tables as they should be."""
    results, records = read(path)
    large = [record for record in records if not record.name.startswith(("small-", *SMALL_MODELS))]
    small = [record for record in records if record.name.startswith("small-")]
    by_name = {record.name: record for record in records}
    of_small_models, small_models = read_small_models()
    page = "\n\n".join(
        [
            machine(results),
            table(HEAD, [line for record in large for line in rows(record)]),
            "Small calls, which must not become slower:",
            table(HEAD[:5], [line[:5] for record in small for line in rows(record)]),
            "Small models in small batches, where the host is what a step waits for. SmolLM2 has its trained weights, "
            "and goes on for 96 tokens; opus-mt has random ones, and 32 tokens.",
            machine(of_small_models),
            f"![New tokens per second of small models, by backend]({CHART.name})",
            table(HEAD[:5], [line[:5] for record in small_models for line in rows(record)]),
        ]
    )
    short = [[line[0], *line[2:]] for line in (rows(by_name[name])[0] for name in IN_README)]
    by_name = {record.name: record for record in small_models}
    lines = [(by_name[name], rows(by_name[name])[0]) for name in SMALL_MODELS_IN_README]
    short_of_small_models = [[line[0], line[2], best_other(record), *line[3:5]] for record, line in lines]
    readme = [
        machine(results),
        table(["workload", "library alone", *HEAD[3:]], short),
        f"Small models in small batches, also against the fastest other library. {machine(of_small_models)}",
        table(["workload", "library alone", "other library", *HEAD[3:5]], short_of_small_models),
    ]
    parts = {
        ROOT / "README.md": "\n\n".join(readme),
        ROOT / "docs" / "benchmarks.md": page,
    }
    return {path: _between_markers(path.read_text(encoding="utf-8"), text) for path, text in parts.items()}


def is_chart_stale() -> bool:
    """Whether the chart shows other numbers than those of the results."""
    shown = chart.shown_rates(CHART) if CHART.exists() else None
    return json.dumps(shown) != json.dumps(chart.all_rates(read_small_models()[1]))  # in this order


def _between_markers(page: str, text: str) -> str:
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, "the markers are missing"
    return f"{before}{begin}\n{text}\n{end}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something is out of date")
    arguments = parser.parse_args()
    stale = [(path, text) for path, text in make().items() if path.read_text(encoding="utf-8") != text]
    for path, text in stale:
        print(f"{path.relative_to(ROOT)} {'is out of date' if arguments.check else 'written'}")
        if not arguments.check:
            path.write_text(text, encoding="utf-8")
    stale_chart = is_chart_stale()
    if stale_chart:
        print(f"{CHART.relative_to(ROOT)} {'is out of date' if arguments.check else 'written'}")
        if not arguments.check:
            CHART.write_bytes(chart.rates_png(*read_small_models()))
    return 1 if arguments.check and (stale or stale_chart) else 0


if __name__ == "__main__":
    sys.exit(main())
