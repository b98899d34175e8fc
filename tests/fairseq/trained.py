"""A small Transformer that is trained here, in some seconds, to translate a made-up language.

Its outputs are as a trained model's are: a few words are likely, the others are not, and sentences end by themselves.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.models import transformer
from torch import Tensor

from tests.fairseq import models

# Of the dictionary, as many words are in use.
_WORDS = 20
_UPDATES = 280
_BATCH = 48
_LEARNING_RATE = 8e-3


class Trained(NamedTuple):
    """The model, the arguments that it was built with, and the dictionary of both languages."""

    model: Any
    arguments: Namespace
    dictionary: Dictionary


def translation(words: list[int]) -> list[int]:
    """What the model learns: another word for each, and for one in four two words."""
    first = 4
    found = []
    for word in words:
        found.append(first + (word - first) * 7 % _WORDS)
        if word % 4 == 0:
            found.append(first + (word - first) * 3 % _WORDS)
    return found


def pairs(count: int, longest: int = 10) -> tuple[list[list[int]], list[list[int]]]:
    """Sources, drawn from torch's random numbers, and their translations."""
    sources = [torch.randint(4, 4 + _WORDS, (int(torch.randint(2, longest + 1, ())),)).tolist() for _ in range(count)]
    return sources, [translation(words) for words in sources]


def batch(sources: list[list[int]]) -> dict[str, Any]:
    """As FairSeq's datasets make it."""
    tokens = _padded([[*words, 2] for words in sources], left=True)
    return {
        "id": torch.arange(len(sources)),
        "net_input": {"src_tokens": tokens, "src_lengths": tokens.ne(1).sum(dim=1)},
    }


def trained(weights: Path) -> Trained:
    """The same model each time: with the weights of this file, or trained, which writes the file."""
    words = models.dictionary()
    arguments = models.sizes(dropout=0.0, encoder_layers=1, share_all_embeddings=True)
    transformer.base_architecture(arguments)
    task = Namespace(source_dictionary=words, target_dictionary=words)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        model = transformer.TransformerModel.build_model(arguments, task)
        if weights.exists():
            model.load_state_dict(torch.load(weights))
        else:
            _train(model.train())
            torch.save(model.state_dict(), weights)
    return Trained(model.eval(), arguments, words)


def _train(model: Any) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, _UPDATES, pct_start=0.2)
    for _ in range(_UPDATES):
        sources, targets = pairs(_BATCH)
        target = _padded([[*words, 2] for words in targets])
        previous = _padded([[2, *words] for words in targets])
        logits, _ = model(**batch(sources)["net_input"], prev_output_tokens=previous)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=1, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def _padded(rows: list[list[int]], left: bool = False) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor(
        [([1] * (longest - len(row)) + row) if left else row + [1] * (longest - len(row)) for row in rows]
    )
