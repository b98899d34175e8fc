"""What FairSeq's commands read, print and write.

They read checkpoints and lines, and explain on one line what cannot be used. Workers turn sentences of token ids, as
the model returns them, into text, as it is printed and scored (`Writer`, `Scorer`), with FairSeq's own dictionaries,
tokenizers and scorers. `Records` is an output file in a format of `fastgen-generate`.

Importing this module imports neither torch nor FairSeq.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from fastgen.pipeline import errors, writers
from fastgen.pipeline.errors import SetupError, one_line, writing
from fastgen.pipeline.journal import find, line_of
from fastgen.pipeline.layouts import GENERATION, Result
from fastgen.pipeline.settings import STANDARD_STREAM, TEXT_SUFFIXES, followed, is_special

logger = logging.getLogger("fastgen.fairseq")

# First bytes of what torch.save writes: a zip archive, or a pickle before torch 1.6.
_CHECKPOINT_STARTS = (b"PK\x03\x04", b"\x80")


def saved_by_torch(path: str | Path) -> bool:
    """Whether a file begins like those that torch saves."""
    with open(path, "rb") as handle:
        return handle.read(4).startswith(_CHECKPOINT_STARTS)


def load_models(paths: list[str], task: Any, cfg: Any, overrides: Any) -> tuple[list[Any], Any]:
    """Loads the models of checkpoints and the configuration in them; without `cfg`, models with a task of their own."""
    from fairseq import checkpoint_utils
    from fairseq.models import FairseqLanguageModel
    from fairseq.tasks.translation import TranslationTask

    shards: dict[str, Any] = {}
    if cfg is not None:
        count = cfg.checkpoint.checkpoint_shard_count
        shards = {"suffix": cfg.checkpoint.checkpoint_suffix, "strict": count == 1, "num_shards": count}
    named = os.pathsep.join(paths)
    with explained(f"checkpoint {named} cannot be used" + (f" for task {cfg.task._name}" if cfg is not None else "")):
        logger.info("loading %s", named)
        check_saved_by_torch(paths)
        try:
            models, saved = checkpoint_utils.load_model_ensemble(paths, arg_overrides=overrides, task=task, **shards)
        except (KeyError, AttributeError) as error:
            lacking = f"no {one_line(error)}" if isinstance(error, KeyError) else one_line(error)
            raise SetupError(
                f"checkpoint {named} is of another architecture than it says, or for another task: {lacking}"
            ) from error
        if isinstance(task, TranslationTask) and any(isinstance(model, FairseqLanguageModel) for model in models):
            raise SetupError(f"checkpoint {named} is a language model: --task language_modeling generates with it")
    return models, saved


def check_saved_by_torch(paths: list[str]) -> None:
    """Raises a ValueError for a file that is no checkpoint, because torch's own error would not tell that."""
    for path in paths:
        if os.path.isfile(path) and not saved_by_torch(path):
            raise ValueError(f"{path} is nothing that torch has saved")


def reason(error: Exception) -> str:
    """Returns the reason on one line. Some messages of FairSeq and torch are long."""
    text = str(error)
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"{error.filename} is missing"
    if "Error(s) in loading state_dict" in text:
        if "in_proj_weight" in text:  # encoders of FairSeq 0.12.2 save it in addition, and fairseq-fixed refuses it
            return "its encoder was saved by another release of FairSeq, with weights that this one does not know"
        differences = [line.strip() for line in text.splitlines()[1:] if line.strip()]
        return (
            "its weights are those of another architecture, or of a model with other dictionaries "
            f"({len(differences)} differences, first: {differences[0][:200] if differences else text[:200]})"
        )
    architecture = re.search(r"Requested model type: (\S+)", text)
    if architecture is not None:
        return f"FairSeq does not know its architecture {architecture.group(1)!r} (--user-dir imports code that does)"
    if isinstance(error, AssertionError) and re.fullmatch(r"(\d+) < \1", text):
        # FairSeq's generator has reached the greatest length with a source that has no hypothesis.
        return "no hypothesis of a source has come to an end: its scores are no numbers, or no token was allowed"
    if "in DataLoader worker process" in text:
        return text.strip().splitlines()[-1]
    if text.strip():
        return one_line(error)
    frames = traceback.extract_tb(error.__traceback__)  # of an assertion without a message
    where = f"{os.path.basename(frames[-1].filename)}, line {frames[-1].lineno}" if frames else "an unknown place"
    return f"{type(error).__name__}, at {where}"


explained = functools.partial(errors.explained, reason=reason)


def log_to(output: TextIO) -> None:
    """Sends FairSeq's messages to the same output as its lines, unless logging is configured already."""
    logging.basicConfig(
        format="%(asctime)s | %(levelname)s | %(name)s | %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        level=os.environ.get("LOGLEVEL", "INFO").upper(),
        stream=output,
    )


def lines_in(name: str, size: int) -> Iterator[list[str]]:
    """Yields the lines of a file or of standard input, `size` at a time, without surrounding white space."""
    with contextlib.ExitStack() as files:
        lines: Iterator[str] = iter(sys.stdin)
        if name != "-":
            with explained("--input"):
                lines = files.enter_context(open(name, encoding="utf-8"))
        with explained("the input cannot be read"):
            while buffer := [line.strip() for line in islice(lines, size)]:
                yield buffer
                if len(buffer) < size:
                    return  # reading a terminal again after its end would ask for more


def unknown_token(sample: Any, source: Any, target: Any) -> str | None:
    """Describes a token in the data that is not in the dictionary, on which the model of a damaged data set fails."""
    import torch

    named = ("source", sample["net_input"].get("src_tokens"), source), ("target", sample.get("target"), target)
    for name, tokens, dictionary in named:
        if not torch.is_tensor(tokens) or tokens.is_floating_point() or dictionary is None or not tokens.numel():
            continue
        wrong = [token for token in map(int, tokens.cpu().aminmax()) if not 0 <= token < len(dictionary)]
        if wrong:
            return (
                f"the {name} data hold token {wrong[-1]}, but the dictionary has {len(dictionary)} entries: "
                "they are damaged, or were made with another dictionary"
            )
    return None


_BASE_2 = math.log(2)
_FIRST = '{"journal": "lines of FairSeq"}'  # identifies the work file, as for a run of Transformers


class Records:
    """An output file with a record for every source, in the order of the sources.

    FairSeq's lines go to a work file as they come, so that finished ones are kept whatever happens. The output file
    appears when the run is complete. For standard output there is no work file.
    """

    def __init__(self, name: str, overwrite: bool) -> None:
        self._to_stdout = name == STANDARD_STREAM
        self._path = followed(Path(name))
        self.partial = Path(os.devnull if self._to_stdout else f"{name}.partial")
        writers.check_suffix(self._path)
        kind = TEXT_SUFFIXES.get(self._path.suffix.lower())
        if kind not in (None, "jsonl"):
            raise SetupError(f"{name}: outputs of FairSeq models are written as .txt or .jsonl")
        self._form = kind or "txt"
        self._results: dict[int, Result] = {}
        if not self._to_stdout:
            left = find(self.partial)
            files = () if is_special(self._path) else (self._path,)
            for path in files:
                writers.check_writable(path)
                writers.check_unfinished(path, left)
            for path in () if overwrite else (*files, self.partial):
                writers.check_absent(path)
        try:
            self.lines: TextIO = open(self.partial, "w", encoding="utf-8")  # noqa: SIM115 (closed by `close`)
            print(_FIRST, file=self.lines, flush=True)
        except OSError as error:
            raise SetupError(f"cannot write {self.partial}: {one_line(error)}") from error

    def close(self) -> bool:
        """Ends the run; returns whether the work file has any content. A file without lines is removed."""
        self.lines.close()
        if is_special(self.partial):
            return False
        if self.partial.exists() and self.partial.stat().st_size <= len(_FIRST) + 1:
            self.partial.unlink()
        return self.partial.exists()

    def keep(self, written: Iterable[Written]) -> None:
        """Stores finished results."""
        self._results.update((one.result["id"], one.result) for one in written)

    def finish(self, sources: int) -> None:
        """Writes the output of all sources. For a source that was left out, a text file has an empty line."""
        ids = range(sources) if self._form == "txt" else sorted(self._results)
        lines = (GENERATION.line(self._results.get(id, {}), self._form) for id in ids)
        if self._to_stdout:
            with writing("standard output"):
                sys.stdout.buffer.writelines(lines)
                sys.stdout.flush()
            return
        with writing(self.partial):
            line = line_of({"finishing": os.path.relpath(self._path, self.partial.parent)})
            print(line.decode(), end="", file=self.lines, flush=True)
        with writers.placed(self._path) as unfinished, open(unfinished, "wb") as handle:
            handle.writelines(lines)
        self.partial.unlink()


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
