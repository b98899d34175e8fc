"""Which records share a batch.

Records are read in windows, in input order. Each window is sorted by length and cut into batches, so that the rows of a
batch have nearly one length and need little padding. The plan depends on the lengths and the settings alone: therefore
a seeded run can be repeated, and an interrupted one resumed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from fastgen.pipeline.errors import SetupError
from fastgen.pipeline.records import BadRecord, Record

WINDOW_BATCHES = 64
# A window is held in memory, and a streamed output comes window by window: of large batches a window has fewer.
WINDOW_RECORDS = 8192
# Lengths are about the same up to a multiple of so many tokens.
_ABOUT = 128


@dataclass(frozen=True)
class Prepared:
    """A record and its token ids."""

    record: Record
    ids: list[int]
    others: dict[str, list[int]] = field(default_factory=dict)
    """What else the model gets for each token, such as which of two texts it is of."""
    truncated: bool = False
    """Whether tokens were cut off, because the model does not take so many."""


@dataclass(frozen=True)
class Window:
    """Consecutive records: the position of the first one, their number, their batches, and those that are skipped."""

    index: int
    start: int
    count: int
    batches: int
    bad: list[BadRecord] = field(default_factory=list)


@dataclass(frozen=True)
class Batch:
    """Records that go through the model together, longest first."""

    window: int
    index: int
    rows: list[Prepared]
    alike: int = 1
    """How many batches of its window have as many rows of about its length, itself and those that are done included."""


@dataclass(frozen=True)
class Rules:
    """How batches are cut."""

    batch_size: int
    max_tokens: int | None = None
    equal_lengths: bool = False
    """Only rows of one length share a batch: for options whose effect depends on padding."""
    pass_cost: int | None = None
    """What a batch costs beside its padded tokens, in tokens. With it, batches are those that cost least together."""

    @property
    def window_records(self) -> int:
        """Records in a window: a multiple of the batch size, if that is not too many."""
        return max(self.batch_size, min(WINDOW_BATCHES * self.batch_size, WINDOW_RECORDS))


def cut(lengths: Sequence[int], rules: Rules) -> list[list[int]]:
    """Batches of indices into `lengths`, longest rows first.

    A batch has at most `batch_size` rows and, with padding, `max_tokens` tokens. A longer row is a batch by itself.
    """
    # Longest first, so that a lack of memory shows at once. Rows of one length keep the input order.
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if rules.pass_cost is not None:
        return _cheapest([lengths[index] for index in order], order, rules, rules.pass_cost)
    batches: list[list[int]] = []
    for index in order:
        batch = batches[-1] if batches else []
        width = lengths[batch[0]] if batch else 0
        if (
            0 < len(batch) < rules.batch_size
            and (rules.max_tokens is None or (len(batch) + 1) * width <= rules.max_tokens)
            and (not rules.equal_lengths or lengths[index] == width)
        ):
            batch.append(index)
        else:
            batches.append([index])
    return batches


def _cheapest(lengths: Sequence[int], order: list[int], rules: Rules, pass_cost: int) -> list[list[int]]:
    """Rows that are sorted by length, cut into the batches that cost least together: by dynamic programming over where
    a batch ends (Fang et al., "TurboTransformers", PPoPP 2021, section 5).

    Args:
        lengths: of the rows, longest first.
        order: the rows' own indices.
    """
    # costs[n]: of the first n rows; starts[n]: where the last of their batches starts.
    costs, starts = [0], [0]
    for end in range(1, len(lengths) + 1):
        best, start = costs[end - 1] + lengths[end - 1], end - 1
        for first in range(end - 2, max(end - rules.batch_size, 0) - 1, -1):
            tokens = (end - first) * lengths[first]
            if rules.max_tokens is not None and tokens > rules.max_tokens:
                break  # further rows are longer, and there are more of them
            if costs[first] + tokens < best:
                best, start = costs[first] + tokens, first
        costs.append(best + pass_cost)
        starts.append(start)
    batches: list[list[int]] = []
    end = len(lengths)
    while end:
        batches.append(order[starts[end] : end])
        end = starts[end]
    return batches[::-1]


@dataclass
class Resumed:
    """What an interrupted run has done: its windows, and the batches of each. It is empty for a new run."""

    windows: dict[int, Window] = field(default_factory=dict)
    done: dict[int, set[int]] = field(default_factory=dict)


def plan(
    records: Iterable[Record | BadRecord],
    prepare: Callable[[Sequence[Record]], list[Prepared | BadRecord]],
    rules: Rules,
    resumed: Resumed,
    on_bad: Callable[[BadRecord], None] = lambda bad: None,
) -> Iterator[Window | Batch]:
    """Each window, and after it those of its batches that are not done yet.

    `on_bad` is called with each skipped record and may raise to stop the run. Raises `SetupError` where the input is
    not the one that the interrupted run read.
    """
    stream = iter(records)
    for index in itertools.count():
        chunk = list(itertools.islice(stream, rules.window_records))
        if not chunk:
            _check_same(index >= len(resumed.windows))
            return
        known, done = resumed.windows.get(index), resumed.done.get(index, set())
        if known and len(done) == known.batches:
            # All is done: no need to tokenise the window.
            _check_same(known.start == chunk[0].position and known.count == len(chunk))
            continue
        encoded = prepare([record for record in chunk if isinstance(record, Record)])
        prepared = [row for row in encoded if isinstance(row, Prepared)]
        bad = [record for record in (*chunk, *encoded) if isinstance(record, BadRecord)]
        bad.sort(key=lambda record: record.position)
        lengths = [len(row.ids) for row in prepared]
        batches = cut(lengths, rules)
        sizes = [(len(rows), -(-lengths[rows[0]] // _ABOUT)) for rows in batches]
        alike = Counter(sizes)
        window = Window(index, chunk[0].position, len(chunk), len(batches), bad)
        if known:
            _check_same(known == window)
        else:
            yield window
        for record in bad:
            on_bad(record)
        for number, (rows, size) in enumerate(zip(batches, sizes, strict=True)):
            if number not in done:
                yield Batch(index, number, [prepared[row] for row in rows], alike[size])


def _check_same(same: bool) -> None:
    if not same:
        raise SetupError("cannot resume: the input is not the one that the interrupted run read")


def split_rows(rows: list[Prepared], parts: int) -> list[list[Prepared]]:
    """Rows cut into consecutive parts of nearly equal size. Rows of about the same length stay together."""
    size, more = divmod(len(rows), parts)
    ends = [part * size + min(part, more) for part in range(parts + 1)]
    return [rows[start:end] for start, end in itertools.pairwise(ends) if start < end]
