"""The result of a workload: one record, which results.json also stores."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from benchmarks.measure import summary

T = TypeVar("T")


@dataclass
class Record:
    """The result of one workload.

    Attributes:
        name, title, group: of the workload.
        parameters: sizes and options that matter to a reader.
        baseline, subject: the backends of the main ratio: the median of `baseline` divided by that of `subject`.
        backends: for each backend the result of `measure.summary`; also "warm_up_seconds", and "version" if a backend
            has one of its own.
        ratios: for each pair of backends "a/b" the median of a divided by that of b, and its range.
        metrics: further numbers by name; always has `ratio` and `baseline_seconds` after a measurement, and the ratios
            under the names of their pairs.
        skipped: backends that were selected and not measured, with the reason.
        same: for backends that may produce other tokens than the baseline, the share of equal sequences.
        identical: whether all other backends produced the same result in every run; None if not checked.
        accelerated: whether every run of the subject was accelerated, without fallbacks; None if not applicable.
        fallbacks: {entry point: {reason: calls}} over the subject's runs.
        notes: for the reader: differences between results.
        memory: for each backend its peak, and how that was measured.
        errors: messages. A record may have both errors and results.
        date, commit, other_load, wall_seconds: set by the harness. `other_load` is the number of cores that other
            processes kept busy meanwhile: a measurement is reliable only if it is near zero.
    """

    name: str
    title: str
    group: str
    parameters: dict[str, Any] = field(default_factory=dict)
    baseline: str = "transformers"
    subject: str = "fastgen"
    backends: dict[str, dict[str, Any]] = field(default_factory=dict)
    ratios: dict[str, dict[str, float]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    same: dict[str, float] = field(default_factory=dict)
    identical: bool | None = None
    accelerated: bool | None = None
    fallbacks: dict[str, dict[str, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    memory: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    date: str = ""
    commit: str | None = None
    other_load: float | None = None
    wall_seconds: float | None = None

    @property
    def status(self) -> str:
        """ "failed", "different" (a result was not identical) or "ok"."""
        if self.errors:
            return "failed"
        return "different" if self.identical is False else "ok"

    def take(
        self, runs: Mapping[str, list[tuple[float, T]]], pairs: Iterable[tuple[str, str]] = ()
    ) -> dict[str, list[T]]:
        """Stores the times of interleaved runs, compares them, and returns the other values of each run."""
        self.backends = {name: summary([seconds for seconds, _ in found]) for name, found in runs.items()}
        self.compare(pairs)
        return {name: [value for _, value in found] for name, found in runs.items()}

    def compare(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        """Computes the ratio of the medians and its range, for the two main backends and for `pairs`."""
        for other, subject in ((self.baseline, self.subject), *pairs):
            if other in self.backends and subject in self.backends:
                above, below = self.backends[other], self.backends[subject]
                # The range is that of pairs of runs: two successive runs had the same conditions.
                found = [a / b for a, b in zip(above["seconds"], below["seconds"], strict=False)]
                ratio = above["median"] / below["median"]
                self.ratios[f"{other}/{subject}"] = {"ratio": ratio, "min": min(found), "max": max(found)}
                self.metrics[f"{other}/{subject}"] = ratio
        main = self.ratios.get(f"{self.baseline}/{self.subject}")
        if main is not None:
            self.metrics |= {"ratio": main["ratio"], "ratio_min": main["min"], "ratio_max": main["max"]}
            self.metrics["baseline_seconds"] = self.backends[self.baseline]["median"]

    def count_fallbacks(self, stats: dict[str, Any]) -> None:
        """Adds the counts of `fastgen.stats()` for one run of the subject."""
        for entry_point, entry in stats.items():
            for reason, calls in {**entry["fallback"], **entry.get("not used", {})}.items():
                reasons = self.fallbacks.setdefault(entry_point, {})
                reasons[reason] = reasons.get(reason, 0) + calls

    def note_peaks(self, peaks: Mapping[str, float], method: str) -> None:
        """Stores the peak memory of each backend, in bytes, and compares the two main ones."""
        for name, found in peaks.items():
            self.memory[name] = {"peak_bytes": found, "peak_method": method}
        if {self.baseline, self.subject} <= peaks.keys():
            self.metrics["peak_ratio"] = peaks[self.subject] / peaks[self.baseline]

    def to_json(self) -> dict[str, Any]:
        """Returns the fields, and the status."""
        return {"status": self.status, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Record:
        """Returns the record that `to_json` wrote; ignores unknown fields."""
        known = {each.name for each in dataclasses.fields(cls)}
        record = cls(**{name: value for name, value in data.items() if name in known})
        record.compare()  # older records lack the ratio of the two main backends in `ratios`
        return record
