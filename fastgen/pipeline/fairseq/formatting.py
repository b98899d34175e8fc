"""Converts sentences from token ids, as the model returns them, into text, as it is printed and scored.

Workers do this. Dictionaries, tokenizers and scorers are FairSeq's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fastgen.pipeline.fairseq.errors import explained
from fastgen.pipeline.records import Result

_BASE_2 = math.log(2)


Hypothesis = dict[str, Any]
"""FairSeq's hypothesis as plain numbers, which are cheap to send to another process; scores are to the base 2."""


@dataclass(frozen=True)
class Sentence:
    """A source with its hypotheses, best first.

    Attributes:
        source, target: tokens without padding; None if there are none.
        original: the texts of source and target if the data set has kept them (--replace-unk).
        constraints: tokens that had to be in the output.
        seconds: the time that it took, for an interactive user.
    """

    id: int
    source: list[int] | None
    target: list[int] | None
    hypotheses: list[Hypothesis]
    original: tuple[str, str] | None = None
    constraints: list[list[int]] = field(default_factory=list)
    seconds: float | None = None


Pair = tuple[Any, Any]
"""A reference and its hypothesis, as the scorer takes them: texts or tokens."""


@dataclass(frozen=True)
class Written:
    """A sentence as text.

    Attributes:
        lines: as they are printed.
        pair: what is to be scored.
        result: the texts themselves; scores are to the base 2.
    """

    lines: str
    pair: Pair | None
    result: Result


class Writer:
    """Turns sentences into text, in a worker."""

    def __init__(self, task: Any, cfg: Any, strip: set[int], interactive: bool, scores_text: bool) -> None:
        from fairseq import utils
        from fairseq.data import data_utils

        with explained("the tokenizer or the byte pairs cannot be set up"):
            self._tokenizer = task.build_tokenizer(cfg.tokenizer)
            self._bpe = task.build_bpe(cfg.bpe)
        with explained("--replace-unk"):
            self._align = utils.load_align_dict(cfg.generation.replace_unk)
        self._source, self._target = dictionaries(task)
        self._generation = cfg.generation
        self._symbol = cfg.common_eval.post_process
        with explained("--post-process"):
            data_utils.post_process("", self._symbol)
        self._quiet = cfg.common_eval.quiet and not interactive
        self._strip = strip
        self._interactive = interactive
        self._scores_text = scores_text

    def encode(self, text: str) -> str:
        """Encodes a user's line as symbols of the dictionary."""
        text = self._tokenizer.encode(text) if self._tokenizer is not None else text
        return self._bpe.encode(text) if self._bpe is not None else text

    def _decode(self, text: str) -> str:
        text = self._bpe.decode(text) if self._bpe is not None else text
        return self._tokenizer.decode(text) if self._tokenizer is not None else text

    def __call__(self, sentences: list[Sentence]) -> list[Written]:
        return [self._write(sentence) for sentence in sentences]

    def _write(self, sentence: Sentence) -> Written:
        from fairseq import utils

        source, target = self._texts(sentence)
        lines = [] if self._quiet else list(self._head(sentence, source, target))
        pair: Pair | None = None
        outputs = []
        for hypothesis in sentence.hypotheses:
            tokens, text, _ = utils.post_process_prediction(
                hypo_tokens=_tensor(hypothesis["tokens"]),
                src_str=source,
                alignment=hypothesis["alignment"],
                align_dict=self._align,
                tgt_dict=self._target,
                remove_bpe=self._symbol,
                extra_symbols_to_ignore=self._strip,
            )
            outputs.append(self._decode(text))
            if not self._quiet:
                lines += self._body(sentence.id, hypothesis, text, outputs[-1])
            if target is not None and pair is None:
                pair = self._pair(sentence, target, tokens, outputs[0])
        scores = [hypothesis["score"] for hypothesis in sentence.hypotheses]
        text = "".join(f"{line}\n" for line in lines)
        result = {"id": sentence.id, "input": source, "text": "".join(outputs[:1])}
        result |= {"sequences": outputs, "scores": scores} | ({} if target is None else {"reference": target})
        return Written(text, pair, result)

    def _texts(self, sentence: Sentence) -> tuple[str, str | None]:
        """Returns the source and the target; an interactive user gets the source as the model has read it."""
        source, target = sentence.original or ("", None)
        if sentence.original is None and sentence.source is not None:
            source = self._source.string(_tensor(sentence.source), self._symbol)
        if sentence.original is None and sentence.target is not None:
            target = self._target.string(
                _tensor(sentence.target), self._symbol, escape_unk=True, extra_symbols_to_ignore=self._strip
            )
        if self._interactive:
            return source, target
        return self._decode(source), self._decode(target) if target is not None else None

    def _head(self, sentence: Sentence, source: str, target: str | None) -> Iterator[str]:
        if self._source is not None:
            yield f"S-{sentence.id}\t{source}"
            if sentence.seconds is not None:
                yield f"W-{sentence.id}\t{sentence.seconds:.3f}\tseconds"
            for constraint in sentence.constraints:
                yield f"C-{sentence.id}\t{self._target.string(_tensor(constraint), self._symbol)}"
        if target is not None:
            yield f"T-{sentence.id}\t{target}"

    def _body(self, id: int, hypothesis: Hypothesis, text: str, output: str) -> Iterator[str]:
        score, alignment = hypothesis["score"], hypothesis["alignment"]
        yield f"H-{id}\t{score}\t{text}"
        yield f"D-{id}\t{score}\t{output}"
        yield f"P-{id}\t" + " ".join(f"{score:.4f}" for score in hypothesis["positional_scores"])
        kind = self._generation.print_alignment
        if kind == "hard":
            yield f"A-{id}\t" + " ".join(f"{source}-{target}" for source, target in alignment)
        elif kind == "soft":
            yield f"A-{id}\t" + " ".join(",".join(probabilities) for probabilities in alignment)
        if self._interactive:
            return
        if self._generation.print_step:
            yield f"I-{id}\t" + str(hypothesis["steps"])
        for step, tokens in enumerate(hypothesis["history"]):
            yield f"E-{id}_{step}\t{self._target.string(_tensor(tokens), None)}"

    def _pair(self, sentence: Sentence, target: str, tokens: Any, output: str) -> Pair:
        if self._scores_text:
            return target, output
        if self._align is None and self._symbol is None:
            return sentence.target, tokens.tolist()
        # Compares words, not their parts. The dictionary grows by the words that it lacks.
        return tuple(self._target.encode_line(text, add_if_not_exist=True).tolist() for text in (target, output))


class Scorer:
    """FairSeq's scorer, in a process of its own: takes pairs in order, and returns the result when it is given none."""

    def __init__(self, cfg: Any, dictionary: Any) -> None:
        from fairseq import scoring

        with explained("the scorer cannot be set up"):
            self._scorer = scoring.build_scorer(cfg.scoring, dictionary)
        self.takes_text = hasattr(self._scorer, "add_string")

    def __call__(self, pairs: list[Pair]) -> str | None:
        for reference, hypothesis in pairs:
            if self.takes_text:
                self._scorer.add_string(reference, hypothesis)
            else:
                self._scorer.add(_tensor(reference), _tensor(hypothesis))
        return None if pairs else self._scorer.result_string()


def dictionaries(task: Any) -> tuple[Any, Any]:
    """Returns the dictionaries of the source, or None if the source is no text, and of the target."""
    try:
        source = getattr(task, "source_dictionary", None)
    except NotImplementedError:
        source = None
    return source, task.target_dictionary


def plain(hypothesis: Any) -> Hypothesis:
    import torch

    def number(value: Any) -> Any:
        return value.tolist() if torch.is_tensor(value) else value

    return {
        "tokens": hypothesis["tokens"].tolist(),
        # Divided as tensors, in their own precision.
        "score": number(hypothesis["score"] / _BASE_2),
        "positional_scores": number(hypothesis["positional_scores"].div(_BASE_2)),
        "alignment": number(hypothesis["alignment"]),
        "steps": hypothesis.get("steps"),
        "history": [step["tokens"].tolist() for step in hypothesis.get("history") or ()],
    }


def unpadded(tokens: Any, row: int, pad: int) -> list[int] | None:
    return None if tokens is None else [token for token in tokens[row].tolist() if token != pad]


def _tensor(tokens: list[int]) -> Any:
    import torch

    return torch.tensor(tokens, dtype=torch.int32)
