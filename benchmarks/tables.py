"""Results as Markdown."""

from __future__ import annotations

from typing import Any

from benchmarks.measure import format_seconds
from benchmarks.record import Record

# Above this many cores busy with other work, a measurement is marked.
BUSY = 0.15


def markdown(about: dict[str, Any], records: list[Record]) -> str:
    """The page: what the numbers were measured on, the targets, and a table for each kind of workload."""
    sections = [_head(about, records)]
    if any(record.targets for record in records):
        sections.append("## Targets\n\n" + _targets(records))
    generation = [record for record in records if record.group == "generation"]
    if generation:
        sections.append("## Generation\n\n" + _generation(generation))
    others = [record for record in records if record.group != "generation" and record.sides]
    if others:
        sections.append("## Operators, pipeline, import\n\n" + _others(others))
    remarks = _remarks(records)
    if remarks:
        sections.append("## Remarks\n\n" + "\n".join(f"- {remark}" for remark in remarks))
    return "\n\n".join(sections) + "\n"


def _head(about: dict[str, Any], records: list[Record]) -> str:
    machine, versions, settings = about["machine"], about["versions"], about["settings"]
    gpu = f"{machine['gpu']} ({machine['gpu_memory_gib']} GiB), " if "gpu" in machine else ""
    dates = sorted({record.date[:10] for record in records if record.date})
    commits = sorted({record.commit for record in records if record.commit})
    lines = [
        "# Benchmarks",
        "",
        f"- Machine: {gpu}{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"{machine['system']}, {machine['instructions']}",
        "- Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()),
        f"- Device {settings['device']}, {settings['threads']} threads"
        + (", quick run" if settings.get("quick") else ""),
        f"- Measured {' to '.join(dates[:1] + dates[1:][-1:])}",
        f"- FastGen at commit {', '.join(commits) or 'unknown'}",
        "",
        "Medians, with the smallest and the largest in brackets. The sides ran alternately; those of generation in one "
        "process. How: benchmarks/README.md.",
    ]
    return "\n".join(lines)


def _targets(records: list[Record]) -> str:
    rows = []
    for record in records:
        for target in record.targets:
            if not target["applies"]:
                # The reader would take a case that is too short to count for one that counts.
                continue
            measured = "not measured" if target["measured"] is None else f"{target['measured']:.3g}"
            met = {True: "yes", False: "**no**", None: "-"}[target["met"]]
            rows.append([record.title, target["what"], target["bound"], measured, met])
    return _table(["workload", "what", "must be", "measured", "met"], rows)


def _generation(records: list[Record]) -> str:
    rows = []
    for record in records:
        if not record.sides:
            rows.append([_title(record), "failed", "", "", "", "", "", ""])
            continue
        rows.append(
            [
                _title(record),
                *(_spread(record.sides.get(side)) for side in (record.baseline, record.subject)),
                _ratio(record.metrics),
                _yes(record.identical),
                _yes(record.accelerated),
                _memory(record, "kv_bytes_at_end", "kv_ratio"),
                _memory(record, "peak_bytes", "peak_ratio"),
            ]
        )
    head = [
        "workload",
        "transformers",
        "fastgen",
        "times as fast",
        "identical",
        "accelerated",
        "K/V memory",
        "peak memory",
    ]
    return _table(head, rows)


def _others(records: list[Record]) -> str:
    rows = []
    for record in records:
        baseline = record.sides.get(record.baseline)
        for name, side in record.sides.items():
            times = f"{baseline['median'] / side['median']:.2f}" if baseline else ""
            rows.append([_title(record), name, _spread(side), times, _yes(record.identical)])
    return _table(["workload", "side", "time", "times as fast as the first", "identical"], rows)


def _remarks(records: list[Record]) -> list[str]:
    remarks = []
    for record in records:
        remarks += [f"{record.title}: {error.splitlines()[-1]} (failed)" for error in record.errors if error.strip()]
        remarks += [f"{record.title}: {note}" for note in record.notes]
        for entry_point, reasons in record.fallbacks.items():
            remarks += [
                f"{record.title}: {entry_point} fell back {calls} times: {reason}" for reason, calls in reasons.items()
            ]
        if record.other_load is not None and record.other_load > BUSY:
            remarks.append(
                f"{record.title}: other processes kept {record.other_load:.1f} cores busy meanwhile; measure again "
                "on a quiet machine"
            )
    return remarks


def _title(record: Record) -> str:
    return record.title + (" (!)" if record.other_load is not None and record.other_load > BUSY else "")


def _spread(side: dict[str, Any] | None) -> str:
    if side is None:
        return ""
    return f"{format_seconds(side['median'])} [{format_seconds(side['min'])} - {format_seconds(side['max'])}]"


def _ratio(metrics: dict[str, float]) -> str:
    return f"**{metrics['ratio']:.2f}** [{metrics['ratio_min']:.2f} - {metrics['ratio_max']:.2f}]"


def _memory(record: Record, key: str, ratio: str) -> str:
    sides = [record.memory.get(side) for side in (record.baseline, record.subject)]
    if None in sides or ratio not in record.metrics:
        return ""
    before, after = (side[key] / 2**20 for side in sides if side is not None)
    return f"{before:,.0f} → {after:,.0f} MiB ({record.metrics[ratio]:.2f})"


def _yes(value: bool | None) -> str:
    return {True: "yes", False: "**no**", None: ""}[value]


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
