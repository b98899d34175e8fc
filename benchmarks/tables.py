"""Formats results as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.machine import BUSY
from benchmarks.measure import format_seconds
from benchmarks.record import Record

_HEAD = "workload,against,its time,FastGen's time,times as fast,same tokens,accelerated,peak memory".split(",")
_YES = {True: "yes", False: "**no**", None: ""}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def markdown(about: dict[str, Any], records: list[Record]) -> str:
    """Formats the page: the machine and versions, and the results."""
    sections = [_head(about, records)]
    sections += ["## Results", table(_HEAD, [row for record in records for row in _rows(record)])]
    remarks = [f"- {record.title}: {remark}" for record in records for remark in _remarks(record)]
    if remarks:
        sections += ["## Remarks", "\n".join(remarks)]
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
        "Medians, with the smallest and the largest in brackets. The backends ran alternately. How: "
        "benchmarks/README.md.",
    ]
    return "\n".join(lines)


def _rows(record: Record) -> Iterator[list[str]]:
    """Yields a row for each comparison with FastGen, the library's first, and for each other backend."""
    title = record.title + (" (!)" if _is_disturbed(record) else "")
    main = f"{record.baseline}/{record.subject}"
    shown: set[str] = set()
    for pair in sorted(record.ratios, key=lambda pair: pair != main):
        other, _, subject = pair.partition("/")
        ratio = record.ratios[pair]
        shown |= {other, subject}
        yield [
            title,
            _backend(record, other),
            _spread(record.backends[other]),
            _spread(record.backends[subject]) + (f" ({subject})" if subject != record.subject else ""),
            f"**{ratio['ratio']:.2f}** [{ratio['min']:.2f} - {ratio['max']:.2f}]",
            (pair == main and _YES[record.identical]) or _same(record, other, subject),
            _YES[record.accelerated] if pair == main else "",
            _peak(record) if pair == main else "",
        ]
    blank = [""] * 5
    for name, found in record.backends.items():
        if name not in shown:
            yield [title, _backend(record, name), _spread(found), *blank]
    yield from ([title, name, "not measured", *blank] for name in record.skipped)
    if not record.backends and record.errors:
        yield [title, "failed", "", *blank]


def _backend(record: Record, name: str) -> str:
    version = record.backends[name].get("version")
    return f"{name} {version}" if version else name


def _same(record: Record, other: str, subject: str) -> str:
    """Returns the share of sequences in which an inexact backend produced the library's tokens."""
    return ", ".join(f"{100 * record.same[name]:.0f} %" for name in (other, subject) if name in record.same)


def _remarks(record: Record) -> Iterator[str]:
    yield from (f"{error.splitlines()[-1]} (failed)" for error in record.errors if error.strip())
    yield from record.notes
    yield from (f"{name} is not measured: {reason}" for name, reason in record.skipped.items())
    for name, backend in record.backends.items():
        # Beyond a warm-up, something was compiled, for which the user also waits.
        if backend.get("warm_up_seconds", 0.0) > 2 * backend["median"] + 1:
            yield f"{name} took {format_seconds(backend['warm_up_seconds'])} to get ready"
    for entry_point, reasons in record.fallbacks.items():
        yield from (f"{entry_point} fell back {calls} times: {reason}" for reason, calls in reasons.items())
    if _is_disturbed(record):
        yield f"other processes kept {record.other_load:.1f} cores busy meanwhile; measure again on a quiet machine"


def _is_disturbed(record: Record) -> bool:
    return record.other_load is not None and record.other_load > BUSY


def _spread(backend: dict[str, Any]) -> str:
    return f"{format_seconds(backend['median'])} [{format_seconds(backend['min'])} - {format_seconds(backend['max'])}]"


def _peak(record: Record) -> str:
    if "peak_ratio" not in record.metrics:
        return ""
    before, after = (record.memory[backend]["peak_bytes"] / 2**20 for backend in (record.baseline, record.subject))
    return f"{before:,.0f} → {after:,.0f} MiB ({record.metrics['peak_ratio']:.2f})"
