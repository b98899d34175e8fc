"""Runs batches through `generate`: padding, seeds, scores of sequences, and which steps are captured."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastgen import settings as process_settings
from fastgen.pipeline.batches import Batch, BatchStage
from fastgen.pipeline.generation.loading import LoadedModel
from fastgen.pipeline.generation.options import RunOptions, captured_drafts
from fastgen.pipeline.records import Record


@dataclass
class RawOutput:
    """The model's output for some rows: all sequences of a row together, best first."""

    rows: list[Record]
    written: list[list[int]]
    """The tokens that the model wrote in each sequence, its end token included, without the padding after it."""
    scores: list[float] | None = None
    """The score of each sequence; None if there are none."""


class SequenceScores:
    """A stopping criterion that never stops: it reads the scores of each step and releases them.

    `generate` would keep the scores over the whole vocabulary of every step: gigabytes, for one number per sequence.
    This adds up the log-probability of each chosen token (beam search does its own sum) and empties the stored tensor.
    """

    releases_cache = True
    """FastGen need not fill the cache that a call returns: nobody reads it."""

    def __init__(self, beams: bool) -> None:
        self.releases_scores = beams
        """FastGen need not compute what would only be released."""
        self._beams = beams
        self._chosen: list[Any] = []
        self._usable = True

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        import torch

        if isinstance(scores, tuple) and scores:
            last = scores[-1]
            if not self._beams:
                # One step, one token: anything else (speculation) has no scores here.
                if len(scores) == len(self._chosen) + 1 and last.shape[0] == input_ids.shape[0]:
                    logs = torch.log_softmax(last.float(), dim=-1)
                    self._chosen.append(logs.gather(1, input_ids[:, -1:]).squeeze(1))
                else:
                    self._usable = False
            last.set_()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def sums(self, lengths: Sequence[int]) -> list[float] | None:
        """Returns for each sequence the sum over its first `length` tokens; None if it could not be followed."""
        import torch

        if not self._usable or not self._chosen or len(self._chosen) < max(lengths):
            return None
        table = torch.stack(self._chosen, dim=1).double().cpu()
        return [float(row[:length].sum()) for row, length in zip(table, lengths, strict=True)]


class ModelStage(BatchStage[RawOutput]):
    """Puts batches through `generate`."""

    def __init__(self, loaded: LoadedModel, settings: RunOptions) -> None:
        super().__init__(loaded.device, settings.weights | (captured_drafts() if loaded.asks_for_drafts else {}))
        self.loaded = loaded
        self._settings = settings

    def size(self, rows: Sequence[Record]) -> int:
        """Returns the memory size of a batch: padded input tokens, and the most new tokens, for each row."""
        return len(rows) * (max(len(row.ids) for row in rows) + self._new_tokens)

    @property
    def _new_tokens(self) -> int:
        generation = self.loaded.generation
        return generation.max_new_tokens or generation.max_length or 20

    def _captured_step(self, batch: Batch) -> dict[str, Any]:
        """Returns FastGen's setting for a batch, from the plan alone, so that a resumed run has the same bits.

        On a GPU, every step that can be captured is. With drafts, the number of drafted tokens decides about bits.
        """
        is_on_cpu = self.loaded.device.type == "cpu"
        if not is_on_cpu or self._drafts or process_settings.current().captured_step != "auto":
            return {}
        steps = batch.alike * batch.rounds * min(self._new_tokens, process_settings.STEPS_OF_A_CALL)
        return {"captured_step": "always" if steps >= process_settings.RECORDING_PAYS_FROM else "never"}

    @property
    def _drafts(self) -> bool:
        if not self._settings.to_text:  # with scores, batches run without drafts
            return False
        return self.loaded.asks_for_drafts or process_settings.current().self_speculation != "off"

    def forward(self, rows: list[Record], batch: Batch) -> RawOutput:
        import torch
        from torch.nn.utils.rnn import pad_sequence

        loaded = self.loaded
        # Decoder-only models continue after the last column, so the padding must be on the left.
        side = "right" if loaded.encoder_decoder else "left"
        tokens = [torch.tensor(row.ids, dtype=torch.long) for row in rows]
        ids = pad_sequence(tokens, True, loaded.pad_id, side)
        mask = pad_sequence([torch.ones_like(row) for row in tokens], True, 0, side)
        scores, options = self.options()
        if loaded.generation.do_sample:
            # Every batch has its own seed: a resumed run draws what an uninterrupted one would have.
            torch.manual_seed(self.seed(batch.window, batch.index, rows[0].position))
        with process_settings.changed(**self._captured_step(batch)):
            output = loaded.model.generate(
                input_ids=ids.to(loaded.device),
                attention_mask=mask.to(loaded.device),
                generation_config=loaded.generation,
                **options,
            )
        return self.raw(rows, output, ids.shape[1], scores)

    def options(self) -> tuple[SequenceScores | None, dict[str, Any]]:
        """Returns the object that follows scores, if the output has some, and the arguments of `generate` beside the
        config.
        """
        generation, options = self.loaded.generation, dict[str, Any]()
        scores = None if self._settings.to_text else SequenceScores((generation.num_beams or 1) > 1)
        if scores is not None:
            options["stopping_criteria"] = [scores]
        if generation.stop_strings is not None:
            options["tokenizer"] = self.loaded.tokenizer
        if self.loaded.grammar is not None:
            options["logits_processor"] = [self.loaded.grammar.processor()]
        return scores, options

    def seed(self, *of: int) -> int:
        """Returns a 56-bit seed, from that of the run and numbers that identify its use."""
        words = ":".join(map(str, (self._settings.seed, *of))).encode()
        return int.from_bytes(hashlib.blake2b(words, digest_size=7).digest(), "big")

    def raw(self, rows: list[Record], output: Any, width: int, scores: SequenceScores | None) -> RawOutput:
        """Converts the output of `generate` for some rows, whose inputs are `width` tokens long, padding included."""
        end = self.loaded.generation.eos_token_id
        ends = frozenset() if end is None else frozenset([end] if isinstance(end, int) else end)
        # Before the new tokens are the padded prompt (decoder-only) or the start token (encoder-decoder).
        new = getattr(output, "sequences", output)[:, 1 if self.loaded.encoder_decoder else width :].tolist()
        raw = RawOutput(rows, [tokens[: token_count(tokens, ends, self.loaded.pad_id)] for tokens in new])
        own = getattr(output, "sequences_scores", None)
        if scores is not None:
            raw.scores = own.tolist() if own is not None else scores.sums(list(map(len, raw.written)))
        return raw


def token_count(generated: Sequence[int], ends: frozenset[int], pad_id: int) -> int:
    """Returns how many tokens the model wrote, its end token included, without the padding after it."""
    for index, token in enumerate(generated):
        if token in ends:
            return index + 1
    count = len(generated)
    while count and generated[count - 1] == pad_id:
        count -= 1
    return count
