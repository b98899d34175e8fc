"""Translation and summarisation with BERT's dictionaries, and the loss over the predicting streams."""

# FairSeq reads the types of a configuration's fields, so that this module must evaluate its annotations.

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.criterions import FairseqCriterion
from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from fairseq.tasks.translation import TranslationTask
from fairseq.tokenizer import tokenize_line
from torch import Tensor


class BertDictionary(Dictionary):
    """A vocabulary of tokens with their counts, in order. [CLS], [PAD], [SEP] and [UNK] may be at any index.

    Missing special tokens are appended.
    """

    def __init__(self, tokens: Iterable[tuple[str, int]] = ()) -> None:
        super().__init__(bos="[CLS]", pad="[PAD]", eos="[SEP]", unk="[UNK]")
        self.symbols: list[str] = []
        self.count: list[int] = []
        self.indices: dict[str, int] = {}
        for token, count in tokens:
            self.add_symbol(token, n=count)
        special = self.bos_word, self.pad_word, self.eos_word, self.unk_word
        indices = [self.indices[word] if word in self.indices else self.add_symbol(word) for word in special]
        self.bos_index, self.pad_index, self.eos_index, self.unk_index = indices

    @classmethod
    def load_from_file(cls, path: str) -> "BertDictionary":
        """Reads a dictionary file with `TOKEN COUNT` in each line. Raises ValueError for another format."""
        with open(path, encoding="utf-8", errors="ignore") as file:
            return cls(_read(line.rstrip("\n"), f"{path}, line {number}") for number, line in enumerate(file, start=1))

    def save(self, f: Any) -> None:
        """Writes all tokens, special ones included, to a file or path."""
        self._save(f, zip(self.symbols, self.count, strict=True))


def _read(line: str, where: str) -> tuple[str, int]:
    token, _, count = line.rpartition(" ")
    if not token or not count.isdecimal():
        raise ValueError(f"{where}: expected a token and its count, found {line!r}")
    return token, int(count)


class TranslationProphetNetTask(TranslationTask):
    """FairSeq's translation with `BertDictionary`."""

    @classmethod
    def load_dictionary(cls, filename: str) -> "BertDictionary":
        return BertDictionary.load_from_file(filename)

    @classmethod
    def build_dictionary(
        cls, filenames: list[str], workers: int = 1, threshold: int = -1, nwords: int = -1, padding_factor: int = 8
    ) -> "BertDictionary":
        """Builds a text's dictionary, for a model that is not pre-trained; the arguments are `fairseq-preprocess`'s."""
        made = BertDictionary()
        for filename in filenames:
            Dictionary.add_file_to_dictionary(filename, made, tokenize_line, workers)
        made.finalize(threshold=threshold, nwords=nwords, padding_factor=padding_factor)
        return made


@dataclass
class NgramLanguageLossConfig(FairseqDataclass):
    label_smoothing: float = field(default=0.0, metadata={"help": "part of the probability that all tokens share"})
    disable_ngram_loss: bool = field(
        default=False, metadata={"help": "count the first predicting stream alone, which predicts the next token"}
    )


class NgramLanguageLoss(FairseqCriterion):
    """The negative log-likelihood of the target in every predicting stream, summed over tokens and streams.

    Qi et al. 2020, section 3.3, with equal weights for all streams.
    """

    def __init__(self, task: Any, label_smoothing: float = 0.0, disable_ngram_loss: bool = False) -> None:
        super().__init__(task)
        self.label_smoothing = label_smoothing
        self.disable_ngram_loss = disable_ngram_loss

    def forward(self, model: Any, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        """
        Returns:
            The sum, the divisor of its gradient (the number of counted tokens), and the values to log.
        """
        streams, _ = model(**sample["net_input"])
        targets = sample["target"]
        if self.disable_ngram_loss:
            streams = streams[:1]
        loss = torch.stack([self._loss(scores, targets) for scores in streams]).sum()
        sample_size = len(streams) * int(targets.ne(self.padding_idx).sum())
        logged = {
            "loss": loss.detach(),
            "ntokens": sample["ntokens"],
            "nsentences": targets.shape[0],
            "sample_size": sample_size,
        }
        return loss, sample_size, logged

    def _loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        log_probs = F.log_softmax(scores.flatten(0, 1), dim=-1, dtype=torch.float32)
        targets = targets.flatten()
        loss = F.nll_loss(log_probs, targets, ignore_index=self.padding_idx, reduction="sum")
        if self.label_smoothing > 0:
            smooth = -log_probs[targets.ne(self.padding_idx)].mean(dim=-1).sum()
            loss = (1 - self.label_smoothing) * loss + self.label_smoothing * smooth
        return loss

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Logs the loss per token and stream, in bits."""
        loss = sum(log.get("loss", 0) for log in logging_outputs)
        sample_size = sum(log.get("sample_size", 0) for log in logging_outputs)
        metrics.log_scalar("loss", loss / sample_size / math.log(2), sample_size, round=3)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True
