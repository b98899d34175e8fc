"""What a workload reports: one record, which is also what results.json holds for it."""

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
        parameters: sizes and options, as far as they matter to a reader.
        baseline, subject: the backends whose medians make the ratio: `baseline` divided by `subject`.
        backends: for each backend what `measure.summary` makes of its runs; also "warm_up_seconds", and "version" where
            a backend has one of its own.
        ratios: for each pair of backends "a/b" the median of a divided by that of b, and its spread.
        metrics: further numbers by name; `ratio` and `baseline_seconds` are always there once something was timed, and
            so are the ratios under the names of their pairs.
        skipped: backends that were asked for and not measured, with the reason.
        same: for backends that may give other tokens than the baseline, the share of sequences in which they do not.
        identical: whether all other backends gave the same result in every run; None where that was not looked at.
        accelerated: whether every run of the subject was accelerated, with no fallback; None where that has no meaning.
        fallbacks: {entry point: {reason: calls}} over the subject's runs.
        notes: for the reader: where results differ.
        memory: for each backend its peak, and what that is of.
        errors: what went wrong. A record may have an error and results.
        date, commit, other_load, wall_seconds: filled in by the harness. `other_load` is the number of cores that
            other processes kept busy meanwhile: a measurement is worth little where it is not near zero.
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
        """Takes in the times of interleaved runs, compares them, and returns what else each of them gave."""
        self.backends = {name: summary([seconds for seconds, _ in found]) for name, found in runs.items()}
        self.compare(pairs)
        return {name: [value for _, value in found] for name, found in runs.items()}

    def compare(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        """Works out the ratio of the medians and its spread, for the two main backends and for `pairs`."""
        for other, subject in ((self.baseline, self.subject), *pairs):
            if other in self.backends and subject in self.backends:
                above, below = self.backends[other], self.backends[subject]
                # The spread is that of the pairs: two runs made one after the other saw the same machine.
                found = [a / b for a, b in zip(above["seconds"], below["seconds"], strict=False)]
                ratio = above["median"] / below["median"]
                self.ratios[f"{other}/{subject}"] = {"ratio": ratio, "min": min(found), "max": max(found)}
                self.metrics[f"{other}/{subject}"] = ratio
        main = self.ratios.get(f"{self.baseline}/{self.subject}")
        if main is not None:
            self.metrics |= {"ratio": main["ratio"], "ratio_min": main["min"], "ratio_max": main["max"]}
            self.metrics["baseline_seconds"] = self.backends[self.baseline]["median"]

    def count_fallbacks(self, stats: dict[str, Any]) -> None:
        """Adds what `fastgen.stats()` says of one run of the subject."""
        for entry_point, entry in stats.items():
            for reason, calls in {**entry["fallback"], **entry.get("not used", {})}.items():
                reasons = self.fallbacks.setdefault(entry_point, {})
                reasons[reason] = reasons.get(reason, 0) + calls

    def note_peaks(self, peaks: Mapping[str, float], method: str) -> None:
        """Takes in the most memory of each backend, in bytes, and compares the two main ones."""
        for name, found in peaks.items():
            self.memory[name] = {"peak_bytes": found, "peak_method": method}
        if {self.baseline, self.subject} <= peaks.keys():
            self.metrics["peak_ratio"] = peaks[self.subject] / peaks[self.baseline]

    def to_json(self) -> dict[str, Any]:
        """The fields, and the status."""
        return {"status": self.status, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Record:
        """The record that `to_json` wrote; fields that are not known are left out."""
        known = {each.name for each in dataclasses.fields(cls)}
        record = cls(**{name: value for name, value in data.items() if name in known})
        record.compare()  # earlier ones lack the ratio of the two main backends among those of pairs
        return record
