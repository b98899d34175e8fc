"""Writes the tables of docs/benchmarks.md and README.md, and their charts, from the results of the benchmarks.

Sessions come from docs/sessions.csv: each is some minutes of `python -m benchmarks --only ordinary-session-NAME`.

python docs/make_benchmark_tables.py            # writes the tables between the markers, <!-- numbers --> and others
python docs/make_benchmark_tables.py --check    # exit status 1 if a table or the chart is out of date
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import chart  # noqa: E402
from benchmarks.measure import format_seconds  # noqa: E402
from benchmarks.record import Record  # noqa: E402
from benchmarks.serving import overload, report, schedulers, streams, translation  # noqa: E402
from benchmarks.tables import table  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "intel-xeon-processor-2-core" / "results.json"
RESULTS_OF_SMALL_MODELS = RESULTS
CHART = ROOT / "docs" / "small-models.png"
SESSIONS = ROOT / "docs" / "sessions.csv"
CHART_OF_SESSIONS = ROOT / "docs" / "sessions.png"
TITLE_OF_SESSIONS = (
    "Times as fast as Transformers: 24 calls that all differ, in a fresh process; two cores of an AMD EPYC (Zen 4), "
    "torch 2.13.0, Transformers 5.24.0"
)
SERVING = ROOT / "benchmarks" / "results" / "amd-epyc-2-core" / "serving"
# The columns of a benchmark of the server that the page shows, by its name.
COLUMNS_OF_SERVING = {
    "translation": translation.COLUMNS,
    "streams": streams.COLUMNS,
    "schedulers": schedulers.SUMMARY,
    "overload": overload.COLUMNS,
}
LEFT_OUT = {"alive", "statuses", "p99"}
SERVERS = {"fastgen": "`fastgen-serve`", "transformers": "`transformers serve`"}
SERVERS["transformers-continuous"] = "`transformers serve`, with continuous batching"
SERVICES = {"transformers": "a service over Transformers", "ctranslate2": "a service over CTranslate2"}
SMALL_MODELS = ("smollm2-", "opus-mt-")
# Where the system names no model.
PROCESSORS = {"Intel(R) Xeon(R) Processor": "an Intel Xeon with AVX-512 and AMX"}
HEAD = ["workload", "against", "its time", "with FastGen", "times as fast", "K/V memory", "peak memory"]

# Ways to run FastGen that are not its defaults.
VARIANTS = {
    "fastgen-int8": " (int8)",
    "fastgen-bf16": " (bf16)",
    "fastgen-fairseq-plain": " (torch's products)",
    "fastgen-hooks": " (no captured step)",
    "fastgen-captured": " (captured from the first call on)",
}


def read(path: Path) -> tuple[dict[str, object], list[Record]]:
    """What the results were measured on, and the records that compare two backends in generation or whole commands."""
    results = json.loads(path.read_text(encoding="utf-8"))
    records = [Record.from_json(record) for record in results["workloads"]]
    kept = [r for r in records if r.group in ("generation", "pipeline", "beams") and "ratio" in r.metrics]
    return results, kept


def rows(record: Record) -> list[list[str]]:
    """Lines of the large table: FastGen against the library, then against the others that were measured with it."""
    main, metrics = f"{record.baseline}/{record.subject}", record.metrics
    lines = []
    for pair in sorted(record.ratios, key=lambda pair: pair != main):
        found = record.ratios[pair]
        other, _, subject = pair.partition("/")
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


def machine(results: dict[str, dict[str, object]]) -> str:
    about, versions, settings = results["machine"], results["versions"], results["settings"]
    name = PROCESSORS.get(str(about["cpu"]), about["cpu"])
    return (
        f"Measured on: {name}, {about['cores']} cores, {about['memory_gib']} GiB, {about['instructions']}, "
        f"{settings['threads']} threads; torch {versions['torch']}, transformers {versions['transformers']}."
    )


def read_small_models() -> tuple[dict[str, object], list[Record]]:
    """As `read`, of the models whose steps are short."""
    results, records = read(RESULTS_OF_SMALL_MODELS)
    return results, [record for record in records if record.name.startswith(SMALL_MODELS)]


def make(path: Path = RESULTS) -> dict[Path, str]:
    """The text of README.md and docs/benchmarks.md with the tables as they should be."""
    results, records = read(path)
    large = [record for record in records if not record.name.startswith(("small-", *SMALL_MODELS))]
    small = [record for record in records if record.name.startswith("small-")]
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
    readme, benchmarks = (
        path.read_text(encoding="utf-8") for path in (ROOT / "README.md", ROOT / "docs/benchmarks.md")
    )
    head, lines = sessions_table()
    tables = {"sessions": table(head, lines), "numbers": page}
    for name, text in (tables | {f"serving-{name}": serving_table(name) for name in COLUMNS_OF_SERVING}).items():
        benchmarks = _between_markers(benchmarks, text, name)
    return {
        ROOT / "README.md": _between_markers(readme, table(head[:5], [line[:5] for line in lines]), "sessions"),
        ROOT / "docs" / "benchmarks.md": benchmarks,
    }


def serving_table(name: str) -> str:
    """What a benchmark of the server has measured."""
    rows = json.loads((SERVING / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    columns = {key: title for key, title in COLUMNS_OF_SERVING[name].items() if key not in LEFT_OUT}
    if name == "schedulers":
        rows = schedulers.summarised(rows)
    return report.shown([{**row, "side": _server(row.get("side", ""))} for row in rows], columns).rstrip()


def _server(side: str) -> str:
    kind, _, wait = side.rpartition("-")
    return f"{SERVICES[kind]}, {wait} ms" if wait.isdigit() else SERVERS.get(side, side)


def read_sessions() -> list[dict[str, str]]:
    """A row for each model: seconds of 24 calls, and ratios."""
    with open(SESSIONS, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def sessions_table() -> tuple[list[str], list[list[str]]]:
    """Its head and its lines."""
    head = ["24 calls that all differ", "Transformers", "with FastGen", "times as fast", "first five calls"]
    head += ["slowest call", "another library", "against it", "peak memory"]
    lines = []
    for row in read_sessions():
        library, other, fastgen = (float(row[name]) for name in ("library", "other", "fastgen"))
        line = [row["model"], f"{library:.1f} s", f"{fastgen:.1f} s", f"**{library / fastgen:.1f}**", row["first_five"]]
        lines.append(
            [*line, row["slowest"], f"{row['other_name']} {other:.1f} s", f"{other / fastgen:.1f}", row["memory"]]
        )
    return head, lines


def charts() -> dict[Path, tuple[str, chart.Parts]]:
    """Title and numbers of each chart."""
    sessions = {}
    for row in read_sessions():
        library, other, fastgen = (float(row[name]) for name in ("library", "other", "fastgen"))
        sessions[row["model"]] = {row["other_name"]: round(library / other, 1), "FastGen": round(library / fastgen, 1)}
    results, records = read_small_models()
    return {
        CHART: (f"New tokens per second. {machine(results)}", chart.rates(records)),
        CHART_OF_SESSIONS: (TITLE_OF_SESSIONS, sessions),
    }


def stale_charts() -> list[Path]:
    """Those that show other numbers than those of the results, or in another order."""
    return [
        path
        for path, (_, parts) in charts().items()
        if not path.exists() or json.dumps(chart.shown(path)) != json.dumps(parts)
    ]


def _between_markers(page: str, text: str, name: str) -> str:
    before, begin, rest = page.partition(f"<!-- {name} -->")
    _, end, after = rest.partition(f"<!-- /{name} -->")
    assert begin and end, f"the markers of {name} are missing"
    return f"{before}{begin}\n{text}\n{end}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something is out of date")
    arguments = parser.parse_args()
    word = "is out of date" if arguments.check else "written"
    stale = {path: text.encode() for path, text in make().items() if path.read_text(encoding="utf-8") != text}
    stale |= {path: b"" if arguments.check else chart.bars_png(*charts()[path]) for path in stale_charts()}
    for path, content in stale.items():
        print(f"{path.relative_to(ROOT)} {word}")
        if not arguments.check:
            path.write_bytes(content)
    return 1 if arguments.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
