"""Finds the languages that a model translates, by its files and the command's options, and how to ask for a pair."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastgen_serve.translation import languages

_MARIAN_TARGET = re.compile(r">>(\S+)<<")
_T5_TARGET = re.compile(r"<2(\S+)>")
_T5_TASK = re.compile(r"translation_(\w+?)_to_(\w+)")
_SPECIAL_CODE = re.compile(r"[a-z]{2,3}_[A-Za-z]{2,4}")


@dataclass(frozen=True)
class Way:
    """How to ask a model for a translation.

    Attributes:
        prefix: of each sentence.
        source_code: value for the tokenizer's `src_lang`; None if it has no such setting.
        options: keywords of `generate`.
    """

    prefix: str = ""
    source_code: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


class Pairs:
    """The language pairs that a model translates.

    Args:
        sources: the model's own codes by the clients' codes.
        targets: likewise.
        way: returns the `Way` for two of the model's own codes.
        only: pairs of clients' codes; None for all.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        targets: Mapping[str, str],
        way: Callable[[str, str], Way],
        only: frozenset[tuple[str, str]] | None = None,
    ) -> None:
        self._sources, self._targets, self._way, self._only = sources, targets, way, only

    def sources(self) -> list[str]:
        """Returns the source languages."""
        return [source for source in self._sources if self.targets(source)]

    def targets(self, source: str) -> list[str]:
        """Returns the target languages for a source."""
        return [target for target in self._targets if self.has(source, target)]

    def has(self, source: str, target: str) -> bool:
        """Returns whether it translates a pair."""
        is_known = source in self._sources and target in self._targets and source != target
        return is_known and (self._only is None or (source, target) in self._only)

    def way(self, source: str, target: str) -> Way | None:
        """Returns how to ask for a pair; None if the model does not translate it."""
        return self._way(self._sources[source], self._targets[target]) if self.has(source, target) else None

    def limited_to(self, only: frozenset[tuple[str, str]]) -> Pairs:
        """Returns these pairs restricted to `only`."""
        return Pairs(self._sources, self._targets, self._way, only)


def parse(text: str) -> frozenset[tuple[str, str]]:
    """Parses the pairs of an option such as "en:de,en:fr".

    Raises:
        ValueError: it is invalid.
    """
    pairs = set()
    for each in text.split(","):
        source, target = (languages.standard(code.strip()) for code in each.partition(":")[::2])
        if source is None or target is None or source == target:
            raise ValueError(f"{each.strip()!r} is no pair of languages: write for example en:de")
        pairs.add((source, target))
    return frozenset(pairs)


def of_model(tokenizer: Any, config: Any, stated: frozenset[tuple[str, str]] | None = None, prefix: str = "") -> Pairs:
    """Returns the pairs that a model translates.

    Args:
        tokenizer: the model's, which is not changed.
        config: the model's.
        stated: pairs that the command names; by default, the model's files determine them.
        prefix: of each sentence, if the model's files define none; {source} and {target} stand for the names.

    Returns:
        No pairs, if neither names any.
    """
    readers = (_of_marian, _of_language_tokens, _of_t5_tasks, _of_t5_tokens)
    found = next((pairs for read in readers if (pairs := read(tokenizer, config)) is not None), None)
    if stated is None:
        return found or Pairs({}, {}, lambda *_: Way())
    if found is not None and all(found.has(*pair) for pair in stated):
        return found.limited_to(stated)
    return _stated(tokenizer, stated, prefix)


def _stated(tokenizer: Any, pairs: frozenset[tuple[str, str]], prefix: str) -> Pairs:
    """Returns pairs that only the command names: for a model of one pair, or one that needs a prefix."""
    own = languages.shortest(language_tokens(tokenizer))

    def way(source: str, target: str) -> Way:
        named = prefix.replace("{source}", languages.name(source)).replace("{target}", languages.name(target))
        return Way(named, own.get(source))

    return Pairs({source: source for source, _ in pairs}, {target: target for _, target in pairs}, way, pairs)


def _of_marian(tokenizer: Any, config: Any) -> Pairs | None:
    """OPUS-MT: the files name the languages; a model with several targets needs a token before the text."""
    if config.model_type != "marian":
        return None
    sources = _of_group(getattr(tokenizer, "source_lang", None))
    tokens = [_MARIAN_TARGET.fullmatch(token) for token in getattr(tokenizer, "supported_language_codes", [])]
    if targets := languages.shortest(match[1] for match in tokens if match):
        return Pairs(sources, targets, lambda _, target: Way(f">>{target}<< ")) if sources else None
    targets = _of_group(getattr(tokenizer, "target_lang", None))
    return Pairs(sources, targets, lambda *_: Way()) if sources and targets else None


def _of_group(codes: str | None) -> dict[str, str]:
    return languages.shortest((codes or "").split("+"))


def _of_language_tokens(tokenizer: Any, config: Any) -> Pairs | None:
    """M2M100, NLLB, mBART-50: a token for each language begins or ends the source, and begins the target."""
    codes = language_tokens(tokenizer)
    # A model fine-tuned from the first mBART translates one pair, which its files do not name.
    if not codes or type(tokenizer).__name__.startswith("MBartTokenizer"):
        return None
    known = languages.shortest(codes)
    return Pairs(known, known, lambda source, target: Way("", source, {"forced_bos_token_id": codes[target]}))


def language_tokens(tokenizer: Any) -> dict[str, int]:
    """Returns the language tokens by the tokenizer's names; none if it has no language tokens."""
    if not hasattr(tokenizer, "src_lang"):
        return {}
    if codes := getattr(tokenizer, "lang_code_to_id", None):
        return dict(codes)
    tokens = [token for token in tokenizer.all_special_tokens if _SPECIAL_CODE.fullmatch(token)]
    return dict(zip(tokens, tokenizer.convert_tokens_to_ids(tokens), strict=True))


def _of_t5_tasks(tokenizer: Any, config: Any) -> Pairs | None:
    """T5: the config has a prefix for each pair."""
    prefixes = {}
    for task, options in (getattr(config, "task_specific_params", None) or {}).items():
        if (match := _T5_TASK.fullmatch(task)) and isinstance(options.get("prefix"), str):
            prefixes[languages.standard(match[1]), languages.standard(match[2])] = options["prefix"]
    if not prefixes:
        return None
    pairs = frozenset((source, target) for source, target in prefixes if source and target)
    sources = {source: source for source, _ in pairs}
    targets = {target: target for _, target in pairs}
    return Pairs(sources, targets, lambda source, target: Way(prefixes[source, target]), pairs)


def _of_t5_tokens(tokenizer: Any, config: Any) -> Pairs | None:
    """MADLAD-400: a T5 with a token for each target, before a text in any language."""
    if config.model_type != "t5":
        return None
    tokens = [match[1] for token in tokenizer.get_vocab() if (match := _T5_TARGET.fullmatch(token))]
    known = languages.shortest(tokens)
    return Pairs(known, known, lambda _, target: Way(f"<2{target}> ")) if known else None
