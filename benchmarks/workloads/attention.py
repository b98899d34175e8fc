"""The attention of a step of beam search over what the beams share, alone: a query per beam, and the K/V of the input.

Reading K/V is the floor: each byte has to come from memory once per step. How near the operator comes to it is the
metric "of_copy_bandwidth": bytes of K/V per second, over the bytes per second (read and written) of a `copy_` of
tensors of the same size in the same run. Every call works on the K/V of another layer, so that none is in the caches
already. Backends:

* transformers: `scaled_dot_product_attention` on K/V that is repeated for each beam, as the library's cache holds it;
* fastgen: the operator;
* copy: the K/V of a layer copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import alternate, summary
from benchmarks.record import Record, Target
from benchmarks.workload import Context, Workload
from benchmarks.workloads.no_repeat_ngram import sampler


@dataclass(frozen=True, kw_only=True)
class SharedPrefixAttention(Workload):
    """Attributes: the sizes, and how many layers take turns."""

    batch: int = 16
    heads: int = 12
    beams: int = 4
    prefix: int = 1024
    dim: int = 64
    layers: int = 4
    repetitions: int = 7
    quick_repetitions: int = 3
    quick: bool = True

    group = "operator"

    def run(self, context: Context, record: Record) -> None:
        from fastgen.ops import attention

        sizes = {name: getattr(self, name) for name in ("batch", "heads", "beams", "prefix", "dim", "layers")}
        record.parameters = {**sizes, "dtype": "float32", "backend": attention.backend()}
        torch.manual_seed(0)
        query = torch.randn(self.batch * self.beams, self.heads, 1, self.dim).to(context.device)
        shared = [self._layer(context.device) for _ in range(self.layers)]
        repeated = [tuple(x.repeat_interleave(self.beams, dim=0) for x in layer) for layer in shared[:2]]
        target = torch.empty_like(shared[0])
        work: dict[str, Callable[[], Tensor]] = {
            "transformers": _in_turn(lambda layer: F.scaled_dot_product_attention(query, *layer), repeated),
            "fastgen": _in_turn(lambda layer: attention.shared_prefix_attention(query, *layer), shared),
            "copy": _in_turn(target.copy_, shared),
        }
        difference = (work["fastgen"]() - work["transformers"]()).abs().max().item()
        record.metrics["largest_difference"] = difference
        # Both sum 1,024 products of numbers about 1 in float32, each in its own order.
        if not difference < 1e-4:
            record.errors.append(f"the operator differs from scaled_dot_product_attention by {difference:.3g}")
        runs = {name: sampler(call, context.device) for name, call in work.items()}
        samples = alternate(runs, self.repetitions_in(context), context.log)
        record.backends = {name: summary([seconds for seconds, _ in found]) for name, found in samples.items()}
        record.compare()
        self._bandwidths(record, bytes_read=target.nbytes)

    def _layer(self, device: torch.device) -> Tensor:
        """[keys and values, batch, heads, prefix, dim]"""
        return torch.randn(2, self.batch, self.heads, self.prefix, self.dim).to(device)

    def _bandwidths(self, record: Record, bytes_read: int) -> None:
        medians = {name: backend["median"] for name, backend in record.backends.items()}
        # As STREAM counts a copy: what it reads and what it writes.
        record.metrics["copy_gb_per_second"] = 2 * bytes_read / medians["copy"] / 1e9
        record.metrics["kv_gb_per_second"] = bytes_read / medians["fastgen"] / 1e9
        share = record.metrics["kv_gb_per_second"] / record.metrics["copy_gb_per_second"]
        record.metrics["of_copy_bandwidth"] = share
        record.notes.append(
            f"the operator reads {record.metrics['kv_gb_per_second']:.1f} GB of K/V per second; a copy moves "
            f"{record.metrics['copy_gb_per_second']:.1f} GB (reads and writes)"
        )


def _in_turn(call: Callable[[Any], Tensor], layers: Iterable[Any]) -> Callable[[], Tensor]:
    """A function that works on the next of the layers each time."""
    following = cycle(layers)
    return lambda: call(next(following))


WORKLOADS = [
    SharedPrefixAttention(
        name="attention-b16-s1024",
        title="Attention, 16 x 12 heads, 4 beams, prefix 1,024",
        targets=(Target("K/V read per second, as a part of what a copy moves", "of_copy_bandwidth", at_least=0.7),),
    )
]
