"""FairSeq's files: loads models, and writes outputs in the formats of `fastgen-generate`.

Importing this module imports neither torch nor FairSeq.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from fastgen.pipeline import writers
from fastgen.pipeline.errors import SetupError, one_line, writing
from fastgen.pipeline.fairseq.errors import explained
from fastgen.pipeline.journal import find, line_of
from fastgen.pipeline.layouts import GENERATION
from fastgen.pipeline.records import Result
from fastgen.pipeline.settings import STANDARD_STREAM, TEXT_SUFFIXES, followed, is_special

if TYPE_CHECKING:
    from fastgen.pipeline.fairseq.formatting import Written

logger = logging.getLogger("fastgen.fairseq")

# First bytes of what torch.save writes: a zip archive, or a pickle before torch 1.6.
_CHECKPOINT_STARTS = (b"PK\x03\x04", b"\x80")
_FIRST = '{"journal": "lines of FairSeq"}'  # identifies the work file, as for a run of Transformers


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
