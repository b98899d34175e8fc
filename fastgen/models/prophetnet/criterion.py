"""The loss over the predicting streams (Qi et al. 2020, section 3.3, with every stream weighted the same)."""

# FairSeq reads the types of a configuration's fields, so annotations are evaluated in this module.

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.criterions import FairseqCriterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from torch import Tensor


@dataclass
class NgramLanguageLossConfig(FairseqDataclass):
    label_smoothing: float = field(default=0.0, metadata={"help": "part of the probability that all tokens share"})
    disable_ngram_loss: bool = field(
        default=False, metadata={"help": "count the first predicting stream alone, which predicts the next token"}
    )


class NgramLanguageLoss(FairseqCriterion):
    """The negative log-likelihood of the target in every predicting stream, summed over tokens and streams."""

    def __init__(self, task: Any, label_smoothing: float = 0.0, disable_ngram_loss: bool = False) -> None:
        super().__init__(task)
        self.label_smoothing = label_smoothing
        self.disable_ngram_loss = disable_ngram_loss

    def forward(self, model: Any, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        """
        Returns:
            The sum, by how much its gradient is to be divided (the tokens that were counted), what to log.
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
