"""Encoders on texts with and without padding, in float32: Transformers, and FastGen with `padding="zero"`, for programs
that only read real tokens.

all-MiniLM-L6-v2 comes from the installed package (`benchmarks.minilm`), or is its shape with random weights. The
mixture's lengths are 3 to 400 tokens, log-normal with mean 40, in random order. Forward passes are captured before
they are timed.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.backends import Backend
from benchmarks.minilm import unpacked
from benchmarks.record import Record
from benchmarks.workload import Context, Generation, Outcome
from fastgen.optimizer.transformers.captured import pays

FIRST_WORD, VOCABULARY = 1000, 20000
SEED = 1
_PROMISED = 1e-5  # the relative difference to the largest number


def mixture(count: int, longest: int = 400) -> Tensor:
    """Returns lengths of texts [count], 3 to 400 tokens, with a mean of about 40."""
    generator = random.Random(SEED)
    return torch.tensor([min(longest, max(3, int(generator.lognormvariate(3.3, 0.9)))) for _ in range(count)])


def uniform(count: int, longest: int = 100) -> Tensor:
    """Returns lengths [count] from 2 to 100 tokens (Fang et al., "TurboTransformers", PPoPP 2021, section 6)."""
    generator = random.Random(SEED)
    return torch.tensor([generator.randint(2, longest) for _ in range(count)])


def minilm(**changes: Any) -> Any:
    """Returns all-MiniLM-L6-v2, or a model of its shape: 6 layers of width 384."""
    import transformers

    with tempfile.TemporaryDirectory() as temporary:
        folder = None if changes else unpacked(Path(temporary))
        if folder is not None:
            return transformers.AutoModel.from_pretrained(folder)
    sizes = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536, "num_hidden_layers": 6}
    return transformers.BertModel(transformers.BertConfig(**{**sizes, **changes}))


def bert_base(**changes: Any) -> Any:
    """BERT-base's shape: 12 layers of width 768."""
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**changes))


@dataclass(frozen=True, kw_only=True)
class Encoding(Generation):
    """The hidden states at real tokens of texts, in padded batches.

    Attributes:
        batch: number of texts; `length` is that of the longest.
        of_a_batch: texts that are encoded together.
    """

    of_a_batch: int
    new_tokens: int = 0
    subject: str = "fastgen-zero-padding"

    group = "encoders"

    def make_inputs(self, model: Any) -> dict[str, Tensor]:
        lengths = torch.full((self.batch,), self.length) if self.lengths is None else self._lengths()
        assert lengths is not None
        mask = (torch.arange(self.length) < lengths.unsqueeze(1)).long()
        ids = torch.randint(FIRST_WORD, VOCABULARY, mask.shape) * mask
        return {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}

    def generate(self, model: Any, inputs: dict[str, Tensor], new_tokens: int = 0) -> Tensor:
        """Returns the hidden states [tokens, width]."""
        found = []
        batches = (inputs[name].split(self.of_a_batch) for name in ("input_ids", "attention_mask"))
        with torch.inference_mode():
            for ids, mask in zip(*batches, strict=True):
                width = int(mask.sum(dim=1).max())
                states = model(input_ids=ids[:, :width], attention_mask=mask[:, :width]).last_hidden_state
                found.append(states[mask[:, :width].bool()])
        return torch.cat(found)

    def backends_in(self, context: Context) -> list[str]:
        return [self.baseline, self.subject]

    def check(self, record: Record, ready: Mapping[str, Backend], outcomes: Mapping[str, list[Outcome]]) -> None:
        """Checks that FastGen's numbers equal Transformers', up to a fraction of the largest one."""
        expected, found = (outcomes[name][0].tokens for name in (self.baseline, self.subject))
        difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))
        record.metrics["difference"] = difference
        record.identical = difference <= _PROMISED  # false for NaN
        record.notes.append(f"the largest difference is {difference:.1e} of the largest number")


WORKLOADS = [
    Encoding(
        name="encoder-minilm",
        title="all-MiniLM-L6-v2, 320 texts of 3 to 400 tokens",
        shape=minilm,
        batch=320,
        length=400,
        lengths=mixture,
        of_a_batch=32,
    ),
    Encoding(
        name="encoder-bert-base",
        title="BERT base, 20 texts of 2 to 100 tokens",
        shape=bert_base,
        batch=20,
        length=100,
        lengths=uniform,
        of_a_batch=20,
    ),
    *(
        Encoding(
            name=f"encoder-latency-{length}",
            title=f"all-MiniLM-L6-v2, 20 texts of {length} tokens, one at a time",
            shape=minilm,
            batch=20,
            length=length,
            of_a_batch=1,
            warm_ups=-(-pays.PASSES // 20),  # as many forward passes as a capture needs
        )
        for length in (10, 40, 200)
    ),
]
