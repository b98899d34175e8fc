"""Constrained results: JSON of a schema, a regular expression, a choice of texts, or a grammar.

In each step, tokens that cannot continue the form get no probability. llguidance computes these tokens from the form
and the bytes of each token.
"""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastgen.optimizer.transformers.captured.forms import FormProcessor

KINDS = ("json_schema", "regex", "choice", "grammar")
# JSON is written as Python writes it. If any white space were allowed, small models would go on writing spaces.
_ON_ONE_LINE = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
# llguidance reads a tokenizer into a trie of its tokens' bytes, which takes up to a second. It is cached by the end
# tokens, and by the number of tokens, because tokens may be added.
_tries: weakref.WeakKeyDictionary[Any, dict[tuple[int, tuple[int, ...]], Any]] = weakref.WeakKeyDictionary()


class FormError(ValueError):
    """A form cannot be followed, from its beginning on or in the middle of a result, where it exceeds a limit."""


class Grammar:
    """The form of a result. One object serves any number of calls, and threads.

    Args:
        tokenizer: the model's tokenizer, a fast one.
        eos_token_id: tokens that end a result: `model.generation_config.eos_token_id`. By default the tokenizer's.
        json_schema: a schema, as text or a dict, or a pydantic class: results are JSON that matches it, on one line.
            `x-guidance` in the schema can change the layout: {"whitespace_flexible": true}.
        regex: results match all of it, in the syntax of Rust's crate regex.
        choice: results are one of these texts.
        grammar: in the syntax of Lark, or of llama.cpp (GBNF).
        unless: anything that begins with this text is also allowed, such as a model's tool calls. With `json_schema`
            only.

    Raises:
        ImportError: llguidance is not installed.
        ValueError: not exactly one form is given, the form is malformed or not supported, or the tokenizer is not a
            fast one.

    Example:
        ```python
        grammar = fastgen.Grammar(tokenizer, json_schema={"type": "object", "properties": {"name": {"type": "string"}}})
        model.generate(**inputs, logits_processor=[grammar.processor()], max_new_tokens=100)
        ```
    """

    def __init__(
        self,
        tokenizer: Any,
        eos_token_id: int | Sequence[int] | None = None,
        *,
        json_schema: Any = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
        unless: str | None = None,
    ) -> None:
        forms = zip(KINDS, (json_schema, regex, choice, grammar), strict=True)
        given = [(kind, form) for kind, form in forms if form is not None]
        if len(given) != 1:
            raise ValueError(f"give one of {', '.join(KINDS)}: {len(given)} are given")
        if unless is None:
            text = _written(*given[0])
        elif unless and json_schema is not None:
            text = _unless(tokenizer, unless, _schema_of(json_schema))
        else:
            raise ValueError("unless is a text beside a json_schema")
        eos = tokenizer.eos_token_id if eos_token_id is None else eos_token_id
        trie = _trie_of(tokenizer, (eos,) if isinstance(eos, int) else tuple(eos or ()))
        self._begin = _Form(_llguidance().LLMatcher(trie, text, log_level=0))

    def processor(self) -> FormProcessor:
        """Returns a processor for one call of `generate`, with any number of inputs and beams: all have the form."""
        return FormProcessor(self._begin)


def _llguidance() -> Any:
    """Imports the module. Raises ImportError if it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise ImportError("results of a given form need llguidance: pip install llguidance") from error
    return llguidance


def _written(kind: str, form: Any) -> str:
    """Translates a form for llguidance. Raises ValueError if the form is not of this kind."""
    if kind == "choice":
        if isinstance(form, str) or not form or not all(isinstance(text, str) and text for text in form):
            raise ValueError("choice is no list of texts with a character each at least")
        form = json.dumps(list(form))
    elif kind == "json_schema":
        form = _schema_of(form)
    elif not isinstance(form, str):
        raise ValueError(f"{kind} is no text")
    text: str = _llguidance().grammar_from(kind, form)
    return text


def _schema_of(form: Any) -> str:
    """Returns a schema as JSON. Raises ValueError if it is not valid."""
    form = form.model_json_schema() if hasattr(form, "model_json_schema") else form
    try:
        schema = json.loads(form) if isinstance(form, str) else form
        return json.dumps({**_ON_ONE_LINE, **schema} if isinstance(schema, dict) else schema)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"json_schema is no JSON: {error}") from error


def _unless(tokenizer: Any, begin: str, schema: str) -> str:
    """Returns a grammar of JSON of a schema, or of any text with this beginning, which may be a special token."""
    special = {each.content: number for number, each in tokenizer.added_tokens_decoder.items() if each.special}
    token = max((each for each in special if begin.startswith(each)), key=len, default="")
    parts = [f"<[{special[token]}]>"] if token else []
    parts += [json.dumps(begin[len(token) :])] if begin != token else []
    return f"start: form | other\nform: %json {schema}\nother: {' '.join(parts)} <[*]>*\n"


def _malformed(said: str) -> str:
    return f"the form of the result cannot be followed: {_first_line(said)}"


def _first_line(said: str) -> str:
    """Returns the first line of a message of llguidance, which may go on with its own state."""
    return next(iter(said.strip().splitlines()), "")[:300]


def _trie_of(tokenizer: Any, eos: tuple[int, ...]) -> Any:
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ValueError(f"{type(tokenizer).__name__} is no fast tokenizer: results of a given form need one")
    if not eos:
        raise ValueError("no token ends a result: give eos_token_id")
    tries, which = _tries.setdefault(tokenizer, {}), (len(tokenizer), eos)
    made = tries.get(which)
    if made is None:
        backend = copy.deepcopy(tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        described = json.loads(backend.to_str())
        _begin_anywhere(described["pre_tokenizer"])
        try:
            made = _llguidance().LLTokenizer(json.dumps(described), eos_token=list(eos))
        except ValueError as error:
            what = f"{type(tokenizer).__name__} cannot be read by llguidance: {_first_line(str(error))}"
            raise ValueError(what) from error
        tries.clear()  # another thread may do the same
        tries[which] = made
    return made


def _begin_anywhere(described: Any) -> None:
    """Makes parts of a tokenizer put no space before a text: a result continues other text."""
    if isinstance(described, dict):
        if "add_prefix_space" in described:
            described["add_prefix_space"] = False
        described = [*described.values()]
    for part in described if isinstance(described, list) else ():
        _begin_anywhere(part)


class _Form:
    """The position of a sequence in its form.

    Args:
        matcher: llguidance's matcher.
    """

    def __init__(self, matcher: Any) -> None:
        bits = np.frombuffer(b"" if matcher.is_error() else matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            raise FormError(_malformed(matcher.get_error()))
        self._matcher = matcher
        self._blocked = torch.from_numpy(np.unpackbits(bits, bitorder="little") == 0)  # [tokens]

    def behind(self, token: int) -> _Form:
        """Returns the position after a token. A token that does not continue the form was forced, and is not part of
        it.

        The position stays at the end after the end token: a finished beam may continue there.
        """
        if token >= len(self._blocked) or self._blocked[token] or self._matcher.is_stopped():
            return self
        matcher = self._matcher.deep_copy()
        matcher.consume_token(token)
        return _Form(matcher)

    def allows(self, token: int) -> bool:
        """Whether this token may come next."""
        return token < len(self._blocked) and not self._blocked[token]

    def forced(self) -> list[int]:
        """Returns the tokens that must come next, because no other text is possible."""
        return [] if self._matcher.is_stopped() else list(self._matcher.compute_ff_tokens())

    def blocked(self, size: int) -> Tensor:
        """Returns [size], bool: which tokens may not come next. Blocks the model's tokens beyond the tokenizer's."""
        if len(self._blocked) < size:
            self._blocked = torch.nn.functional.pad(self._blocked, (0, size - len(self._blocked)), value=True)
        return self._blocked[:size]
