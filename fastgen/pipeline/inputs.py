"""The records of a run: chooses the columns, and checks each record; and the conversations in records.

Message contents for chat templates: those of models that take images may write only lists of parts, even for text.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastgen.pipeline.errors import Problem, SetupError
from fastgen.pipeline.layouts import Result
from fastgen.pipeline.readers import LONGEST_TEXT, CsvSource, JsonLinesSource, Row, Source, open_source
from fastgen.pipeline.settings import STANDARD_STREAM, DataOptions

_MISSING = object()
_MOST_NAMED = 50  # limit of columns in a message
_SURROGATE = re.compile("[\ud800-\udfff]")  # half of a surrogate pair, which UTF-8 cannot represent


@dataclass(frozen=True)
class Record:
    """One input, from the reader to the model. `position` counts from 0; `line` is its line or row in the file, from 1.

    A skipped record has a problem, and nothing else beside position, line and id.
    """

    position: int
    line: int
    id: Any
    text: str = ""
    reference: str | None = None
    pair: str | None = None
    """The second text, for a command that takes two."""
    messages: tuple[Mapping[str, Any], ...] | None = None
    """A conversation, of which `text` is the last message."""
    kept: tuple[Any, ...] | None = None
    """The values of the columns to keep, in their order."""
    problem: Problem | None = None
    """Why it is skipped."""
    ids: Sequence[int] = ()
    """Its tokens, once it has been tokenised."""
    others: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Further model inputs for each token, such as which of two texts it belongs to."""
    truncated: bool = False
    """Whether tokens were cut off, because the model does not take so many."""

    def skipped(self, problem: Problem) -> Record:
        return Record(self.position, self.line, self.id, problem=problem)

    def named(self) -> Result:
        """Returns the beginning of its result."""
        return {"position": self.position, "line": self.line, "id": self.id}

    def error(self) -> Result:
        """Returns the result of a skipped record."""
        assert self.problem is not None
        return self.named() | {"error": self.problem.kind, "message": self.problem.message}


def choose_column(source: Source, settings: DataOptions) -> str:
    """Returns the column of the input. Raises `SetupError`, which lists the columns, if it is unclear or missing."""
    columns = source.columns or []
    wanted = settings.input_column
    if not source.has_rows and wanted is None:
        return "text"
    # The layout of translation data sets: {"translation": {"en": ..., "de": ...}}.
    if wanted is None and len(columns) != 1 and "translation" in columns and settings.src_lang:
        return f"translation.{settings.src_lang}"
    if wanted is None and len(columns) != 1:
        raise SetupError(f"{source.name}: choose the input column (--input-column), {_listed(columns)}")
    return _checked(source, columns[0] if wanted is None else wanted, "input column")


def _checked(source: Source, wanted: str, what: str) -> str:
    columns = source.columns or []
    if source.has_rows and wanted not in columns and wanted.split(".")[0] not in columns:
        raise SetupError(f"{source.name} has no {what} {wanted!r}, {_listed(columns)}")
    return wanted


def _listed(columns: list[str]) -> str:
    if not columns:
        return "it has no readable row"
    more = f" and {len(columns) - _MOST_NAMED} more" if len(columns) > _MOST_NAMED else ""
    return f"the columns are: {', '.join(columns[:_MOST_NAMED])}{more}"


def field_of(fields: Mapping[str, Any], column: str, default: Any = None) -> Any:
    """Returns the value of a column of a row; `a.b` looks into column `a`."""
    if column in fields:
        return fields[column]
    value: Any = fields
    for part in column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


class Inputs:
    """The records of a run: the rows of the input with their references, checked one by one.

    Raises `SetupError` if input, columns and references cannot be read or do not fit together.
    """

    def __init__(self, settings: DataOptions) -> None:
        self._limit = settings.limit
        self.source = open_source(settings.input, settings.input_format, settings.dataset_config, settings.split)
        self.column = choose_column(self.source, settings)
        self._ids, self._references = settings.id_column, settings.reference_column
        self._pairs = settings.pair_column
        # Integers have 64 bits in Parquet, and any length in JSON.
        self._short_ids = settings.resolved_output_format == "parquet"
        wanted = [self.column]
        others = {"id column": self._ids, "reference column": self._references, "pair column": self._pairs}
        for what, column in others.items():
            wanted += [_checked(self.source, column, what)] if column else []
        columns = self.source.columns or []
        self.kept = _columns_to_keep(self.source, settings.keep)
        wanted += self.kept
        self._chat, self._cells_are_text = settings.chat, isinstance(self.source, CsvSource)
        self.source.needed = list(dict.fromkeys(name if name in columns else name.split(".")[0] for name in wanted))
        self.references = _open_references(settings.reference) if settings.reference else None
        self.total = self.source.count()
        if self._limit is not None and self.total is not None:
            self.total = min(self.total, self._limit)
        if self.references and self.total is not None:
            there = self.references.count()
            if there is not None and (there < self.total or (self._limit is None and there != self.total)):
                raise SetupError(_mismatch(self.references.name, there, self.total))

    def identity(self) -> dict[str, Any]:
        """Returns what must be equal for a run to be resumed."""
        return {
            "input": self.source.identity(),
            "reference": self.references.identity() if self.references else None,
            "columns": [self.column, self._ids, self._references, *([self._pairs] if self._pairs else ())],
            "limit": self._limit,
        }

    def __iter__(self) -> Iterator[Record]:
        references = _references(self.references) if self.references else None
        name = self.references.name if self.references else ""
        reference = None
        position = -1
        for position, row in enumerate(itertools.islice(self.source.rows(), self._limit)):
            if references:
                reference = next(references, None)
                if reference is None:
                    raise SetupError(_mismatch(name, position, f"at least {position + 1}"))
            yield self._record(position, row, reference)
        if references and self._limit is None and next(references, None) is not None:
            raise SetupError(_mismatch(name, f"more than {position + 1}", position + 1))

    def _record(self, position: int, row: Row, reference: str | None) -> Record:
        identity: Any = position
        if self._ids:
            identity = field_of(row.fields, self._ids)
            if isinstance(identity, float) and not math.isfinite(identity):
                # Data frames have NaN for missing values. JSON has no such number.
                identity = None
            elif not isinstance(identity, str | int | float | None):
                identity = str(identity)
        text = field_of(row.fields, self.column, default=_MISSING)
        messages = None
        if self._chat and (messages := messages_in(text, self._cells_are_text)):
            text = messages[-1]["content"]
        pair = field_of(row.fields, self._pairs, default=_MISSING) if self._pairs else None
        problem = row.problem or _problem(self.column, text) or (_problem(self._pairs, pair) if self._pairs else None)
        for message in messages or ():
            problem = problem or _problem(self.column, message["content"])
        problem = problem or self._bad_id(identity)
        kept, bad = self._kept_of(row) if self.kept and problem is None else (None, None)
        problem = problem or bad
        if problem is None and self._references:
            reference = field_of(row.fields, self._references)
            reason = _not_text(reference)
            problem = Problem("bad-reference", f"column {self._references!r}: {reason}") if reason else None
        if problem is not None:
            return Record(position, row.line, identity, problem=problem)
        return Record(position, row.line, identity, text, reference, pair, messages, kept)

    def _kept_of(self, row: Row) -> tuple[tuple[Any, ...] | None, Problem | None]:
        """Returns the values of the columns to keep, or why they cannot be written."""
        found = []
        for name in self.kept:
            try:
                found.append(_as_json(field_of(row.fields, name)))
                text = json.dumps(found[-1], ensure_ascii=False)
            except RecursionError:
                return None, Problem("malformed", f"column {name!r} has a value that is nested too deeply")
            if _SURROGATE.search(text):
                return None, Problem("invalid-utf8", f"column {name!r} is not valid UTF-8")
        return tuple(found), None

    def _bad_id(self, identity: Any) -> Problem | None:
        if isinstance(identity, str) and _SURROGATE.search(identity):
            return Problem("bad-id", "the id is not valid UTF-8")
        if self._short_ids and isinstance(identity, int) and not -(2**63) <= identity < 2**63:
            return Problem("bad-id", "the id does not fit into the 64 bits that Parquet has for a number")
        return None


def _columns_to_keep(source: Source, wanted: tuple[str, ...]) -> list[str]:
    """Returns the columns to keep; `all` stands for every column with a name. Raises `SetupError` for a missing one."""
    if isinstance(source, JsonLinesSource) and wanted:
        source.look_for_columns()
    if tuple(wanted) == ("all",) and "all" not in (source.columns or []):
        return [name for name in source.columns or [] if name]
    return [_checked(source, name, "column to keep") for name in dict.fromkeys(wanted)]


def _as_json(value: Any) -> Any:
    """Converts a value to JSON, which has neither NaN nor infinity: data frames have NaN for missing values."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _as_json(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(part) for part in value]
    return value if isinstance(value, str | int | None) else str(value)


def messages_in(value: Any, may_be_text: bool = False) -> tuple[dict[str, Any], ...] | None:
    """Returns the messages of a conversation, which is a list of them; None if it is none.

    Each message has a role and a text as its content.

    Args:
        may_be_text: the value may be JSON in a text, as in a table whose cells are all text. Elsewhere, a text is a
            prompt, whatever it contains.
    """
    if may_be_text and isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if not isinstance(value, list) or not value:
        return None
    for message in value:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            return None
    # In columns of structures, every message has the fields of all messages, without a value where it has none.
    return tuple({name: part for name, part in message.items() if part is not None} for message in value)


def _problem(column: str, text: Any) -> Problem | None:
    if text is _MISSING:
        return Problem("missing-column", f"the record has no column {column!r}")
    if text is None:
        return Problem("wrong-type", f"column {column!r} has no value (null)")
    if not isinstance(text, str):
        return Problem("wrong-type", f"column {column!r} has a value of type {type(text).__name__}, not a string")
    if _SURROGATE.search(text):
        return Problem("invalid-utf8", "the text is not valid UTF-8")
    if len(text) > LONGEST_TEXT:
        return Problem("malformed", f"the text is longer than {LONGEST_TEXT} characters")
    if "\0" in text:
        return Problem("nul-character", "the text has a NUL character")
    if not text.strip():
        return Problem("empty", "the text is empty")
    return None


def _open_references(path: str) -> Source:
    if path == STANDARD_STREAM:
        raise SetupError("references cannot be read from standard input")
    if not Path(path).is_file():
        raise SetupError(f"reference file {path} does not exist")
    source = open_source(path)
    if len(source.columns or []) != 1:
        raise SetupError(
            f"reference file {path} must be text or have a single column; "
            "references that are a column of the input are chosen with the reference column"
        )
    return source


def _references(source: Source) -> Iterator[str]:
    """Yields the texts of references. Raises `SetupError` for the first bad one."""
    for row in source.rows():
        value = next(iter(row.fields.values()), None)
        # An empty CSV or JSON line is an empty reference, which is allowed.
        if row.problem is not None and row.problem.kind == "empty":
            value = ""
        elif reason := row.problem.message if row.problem else _not_text(value):
            raise SetupError(f"{source.name}, line {row.line}: {reason}")
        yield str(value)


def _mismatch(name: str, there: object, wanted: object) -> str:
    return f"reference file {name} has {there} lines but the input has {wanted}"


def _not_text(value: Any) -> str | None:
    if not isinstance(value, str):
        return "it is not a string"
    return "it is not valid UTF-8" if _SURROGATE.search(value) else None


# A text that no template writes by itself.
_PROBE = "text of a message"


def with_parts(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages for a tokenizer's chat template: a text becomes a list of one part if only lists are written."""
    if not reads_parts_only(tokenizer, str(tokenizer.chat_template)):
        return [dict(message) for message in messages]
    return [{**message, "content": _as_parts(message["content"])} for message in messages]


@lru_cache(maxsize=64)
def reads_parts_only(tokenizer: Any, template: str) -> bool:
    """Whether a chat template writes contents that are lists of parts, but not contents that are texts.

    Args:
        template: the tokenizer's template, which may be replaced.
    """
    return not _writes(tokenizer, _PROBE) and _writes(tokenizer, _as_parts(_PROBE))


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _writes(tokenizer: Any, content: Any) -> bool:
    with suppress(Exception):  # a template is a program, and may refuse what it does not know
        return _PROBE in tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    return False
