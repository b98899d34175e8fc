"""Results as Markdown."""

from __future__ import annotations

from typing import Any

from benchmarks.machine import BUSY
from benchmarks.measure import format_seconds
from benchmarks.record import Record


def markdown(about: dict[str, Any], records: list[Record]) -> str:
    """The page: what the numbers were measured on, the targets, and a table for each kind of workload."""
    sections = [_head(about, records)]
    if any(record.targets for record in records):
        sections.append("## Targets\n\n" + _targets(records))
    generation = [record for record in records if record.group == "generation"]
    if generation:
        sections.append("## Generation\n\n" + _generation(generation))
    others = [record for record in records if record.group != "generation" and record.backends]
    if others:
        sections.append("## Cost of beams, operators, pipeline, import\n\n" + _others(others))
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
        "Medians, with the smallest and the largest in brackets. The backends ran alternately; those of generation in "
        "one process. How: benchmarks/README.md.",
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
    head = [
        "workload",
        "backend",
        "time",
        "FastGen's time",
        "times as fast",
        "same tokens",
        "accelerated",
        "K/V memory",
        "peak memory",
    ]
    rows = []
    for record in records:
        rows += _generation_rows(record) or [[_title(record), "failed", *[""] * (len(head) - 2)]]
    return _table(head, rows)


def _generation_rows(record: Record) -> list[list[str]]:
    """A row for each backend that FastGen is held against, that of the library first."""
    rows = []
    main = f"{record.baseline}/{record.subject}"
    # Results of earlier versions have the two main backends, and their ratio among the metrics.
    for pair in dict.fromkeys((main, *record.ratios)):
        other, _, subject = pair.partition("/")
        if other not in record.backends or subject not in record.backends:
            continue
        rows.append(
            [
                _title(record),
                _backend(record, other),
                _spread(record.backends[other]),
                _spread(record.backends[subject]) + (f" ({subject})" if subject != record.subject else ""),
                _ratio(record, pair),
                *(
                    (
                        _yes(record.identical) or _same(record, other, subject),
                        _yes(record.accelerated),
                        _memory(record, "kv_bytes_at_end", "kv_ratio"),
                        _memory(record, "peak_bytes", "peak_ratio"),
                    )
                    if pair == main
                    else (_same(record, other, subject), "", "", "")
                ),
            ]
        )
    shown = {name for pair in (main, *record.ratios) for name in pair.split("/")} if rows else set()
    for name, found in record.backends.items():
        if name not in shown:
            rows.append([_title(record), _backend(record, name), _spread(found), *[""] * 6])
    rows += [[_title(record), name, "not measured", *[""] * 6] for name in record.skipped]
    return rows


def _backend(record: Record, name: str) -> str:
    version = record.backends[name].get("version")
    return f"{name} {version}" if version else name


def _same(record: Record, other: str, subject: str) -> str:
    """In how many of the sequences the backend that may differ gave the tokens of the library."""
    return ", ".join(f"{100 * record.same[name]:.0f} %" for name in (other, subject) if name in record.same)


def _others(records: list[Record]) -> str:
    rows = []
    for record in records:
        baseline = record.backends.get(record.baseline)
        for name, backend in record.backends.items():
            times = f"{baseline['median'] / backend['median']:.2f}" if baseline else ""
            rows.append([_title(record), name, _spread(backend), times, _yes(record.identical)])
    return _table(["workload", "backend", "time", "times as fast as the first", "identical"], rows)


def _remarks(records: list[Record]) -> list[str]:
    remarks = []
    for record in records:
        remarks += [f"{record.title}: {error.splitlines()[-1]} (failed)" for error in record.errors if error.strip()]
        remarks += [f"{record.title}: {note}" for note in record.notes]
        remarks += [f"{record.title}: {name} is not measured: {reason}" for name, reason in record.skipped.items()]
        for name, backend in record.backends.items():
            # That is more than a warm-up: something was compiled, which the user waits for as well.
            if backend.get("warm_up_seconds", 0.0) > 2 * backend["median"] + 1:
                remarks.append(f"{record.title}: {name} took {format_seconds(backend['warm_up_seconds'])} to get ready")
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


def _spread(backend: dict[str, Any] | None) -> str:
    if backend is None:
        return ""
    return f"{format_seconds(backend['median'])} [{format_seconds(backend['min'])} - {format_seconds(backend['max'])}]"


def _ratio(record: Record, pair: str) -> str:
    found = record.ratios.get(pair)
    if found is None:
        found = {
            "ratio": record.metrics["ratio"],
            "min": record.metrics["ratio_min"],
            "max": record.metrics["ratio_max"],
        }
    return f"**{found['ratio']:.2f}** [{found['min']:.2f} - {found['max']:.2f}]"


def _memory(record: Record, key: str, ratio: str) -> str:
    backends = [record.memory.get(backend) for backend in (record.baseline, record.subject)]
    if None in backends or ratio not in record.metrics:
        return ""
    before, after = (backend[key] / 2**20 for backend in backends if backend is not None)
    return f"{before:,.0f} → {after:,.0f} MiB ({record.metrics[ratio]:.2f})"


def _yes(value: bool | None) -> str:
    return {True: "yes", False: "**no**", None: ""}[value]


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
