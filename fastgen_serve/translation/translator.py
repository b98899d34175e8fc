"""Sentences on their way through the models: which one translates a pair, what it is asked, and what comes back."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Sequence
from typing import Any

from transformers import AutoConfig

from fastgen_serve.concurrency import together
from fastgen_serve.errors import BadRequest, TimedOut
from fastgen_serve.jobs import Generate
from fastgen_serve.models import Models
from fastgen_serve.served import ServedModel
from fastgen_serve.settings import ServeSettings
from fastgen_serve.translation import detection, languages, pairs, sentences
from fastgen_serve.translation.detection import Detected
from fastgen_serve.translation.pairs import Pairs, Way
from fastgen_serve.translation.sentences import Piece

# Tokens of a sentence, and of its translation where the files of a model do not limit it. Models of translation have
# been trained on sentences: longer ones are cut.
_MOST_TOKENS = 512
# Bytes of a character: a token is one of them at the least.
_BYTES = 4


class TranslatingModel:
    """A model that is served, as one that translates."""

    def __init__(self, model: ServedModel, settings: ServeSettings, found: Pairs) -> None:
        self.pairs = found
        self._model, self._settings = model, settings
        # Its language is set for each request, and others use theirs at the same time.
        self._tokenizer = copy.deepcopy(model.tokenizer)
        self._lock = threading.Lock()

    def shorten(self, pieces: Sequence[Piece], way: Way) -> list[list[Piece]]:
        """Each piece, cut where it is a sentence that the model could not read."""
        positions = self._model.info.positions
        most = min(_MOST_TOKENS, positions or _MOST_TOKENS)

        def fits(sentence: str) -> bool:
            return _BYTES * len(way.prefix + sentence) < most or len(self._encode([sentence], way)[0]) <= most

        return [sentences.shorten(piece, fits) for piece in pieces]

    async def translate(self, texts: Sequence[str], way: Way, count: int) -> list[list[str]]:
        """The best translations of each sentence, so many of them, best first.

        Raises:
            ServeError: as `ServedModel.generate`.
        """
        inputs = await asyncio.to_thread(self._encode, texts, way)
        options = {**way.options, **self._options(count)}
        # A long text leaves room for the requests of others: its sentences do not wait all at once.
        room = asyncio.Semaphore(max(1, self._settings.slots // options.get("num_beams", 1)))

        async def run(tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
            async with room:
                made = await self._model.generate(Generate(tokens, options))
            return [sequence.tokens for sequence in made.sequences]

        results = await together(run(tokens) for tokens in inputs)
        return await asyncio.to_thread(self._decode, results)

    def _options(self, count: int) -> dict[str, Any]:
        defaults = self._model.info.defaults
        options: dict[str, Any] = {}
        if defaults.get("max_length") is None and defaults.get("max_new_tokens") is None:
            options["max_new_tokens"] = min(_MOST_TOKENS, self._settings.max_tokens)
        if count > 1:
            options["num_beams"] = max(count, int(defaults.get("num_beams") or 1))
            options["num_return_sequences"] = count
        return options

    def _encode(self, texts: Sequence[str], way: Way) -> list[tuple[int, ...]]:
        with self._lock:
            if way.source_code is not None:
                self._tokenizer.src_lang = way.source_code
            encoded = self._tokenizer([way.prefix + text for text in texts], verbose=False)["input_ids"]
        return [tuple(tokens) for tokens in encoded]

    def _decode(self, results: Sequence[Sequence[tuple[int, ...]]]) -> list[list[str]]:
        with self._lock:
            return [
                [self._tokenizer.decode(list(tokens), skip_special_tokens=True).strip() for tokens in sequences]
                for sequences in results
            ]


class Translator:
    """All models that translate.

    Args:
        models: those that are served.
        settings: of the server: `languages` and `translation_prefix` say what the files of models do not.
    """

    def __init__(self, models: Models, settings: ServeSettings) -> None:
        self._settings = settings
        self._models = [made for model in models if (made := _translating(model, settings)) is not None]

    def languages(self) -> dict[str, list[str]]:
        """The targets of each source, both in the order of their English names."""
        found: dict[str, set[str]] = {}
        for model in self._models:
            for source in model.pairs.sources():
                found.setdefault(source, set()).update(model.pairs.targets(source))
        return {source: sorted(found[source], key=languages.name) for source in sorted(found, key=languages.name)}

    def target(self, code: str) -> str:
        """The language that a client wants a text in.

        Raises:
            BadRequest: it is none of the targets.
        """
        served = {target for targets in self.languages().values() for target in targets}
        return _served(code, served, "target")

    def source(self, code: str) -> str:
        """The language that a client says a text is in.

        Raises:
            BadRequest: it is none of the sources.
        """
        return _served(code, self.languages(), "source")

    def detect(self, text: str, target: str | None = None) -> list[Detected]:
        """The likeliest languages of a text, best first: of those that are translated, or translated to this one.

        Raises:
            BadRequest: no model translates.
        """
        found = self.languages()
        served = [source for source, targets in found.items() if target in (None, source) or target in targets]
        if not served:
            raise BadRequest("no model here translates: see /languages")
        return detection.detect(text, served)

    async def translate(self, pieces: Sequence[Piece], source: str, target: str, count: int = 1) -> list[list[Piece]]:
        """Versions of a text, best first: as many pieces, with what each sentence is in the other language.

        Args:
            source: as `source` and `detect` return them.
            target: likewise. A text that is in it already stays.
            count: of versions. A sentence that has fewer stays the same in the last ones.

        Raises:
            BadRequest: no model translates this pair.
            TimedOut: it took longer than a request may.
            ServeError: as `ServedModel.generate`.
        """
        if source == target:
            return [list(pieces)]
        model, way = self._model_for(source, target)
        cut = await asyncio.to_thread(model.shorten, pieces, way)
        texts = list(dict.fromkeys(part.text for parts in cut for part in parts if part.is_sentence))
        seconds = self._settings.request_timeout_s
        try:
            made = await asyncio.wait_for(model.translate(texts, way, count), seconds)
        except asyncio.TimeoutError:
            raise TimedOut(f"the text took longer than {seconds:g} s: send less of it at once") from None
        translations = dict(zip(texts, made, strict=True))

        def version(number: int) -> list[Piece]:
            return [
                Piece("".join(_translated(part, translations, number) for part in parts), piece.is_sentence)
                for piece, parts in zip(pieces, cut, strict=True)
            ]

        return [version(number) for number in range(max(map(len, made), default=1))]

    def _model_for(self, source: str, target: str) -> tuple[TranslatingModel, Way]:
        for model in self._models:
            if (way := model.pairs.way(source, target)) is not None:
                return model, way
        names = f"{languages.name(source)} ({source})", f"{languages.name(target)} ({target})"
        raise BadRequest(f"no model here translates from {names[0]} to {names[1]}: see /languages", param="target")


def _translated(part: Piece, translations: dict[str, list[str]], number: int) -> str:
    versions = translations[part.text] if part.is_sentence else [part.text]
    return versions[min(number, len(versions) - 1)]


def _translating(model: ServedModel, settings: ServeSettings) -> TranslatingModel | None:
    config = AutoConfig.from_pretrained(settings.path(model.name), trust_remote_code=False)
    stated = dict(settings.languages).get(model.name)
    if not config.is_encoder_decoder:
        return None
    only = None if stated is None else pairs.parse(stated)
    found = pairs.of_model(model.tokenizer, config, only, settings.translation_prefix)
    return TranslatingModel(model, settings, found) if found.sources() else None


def _served(code: str, served: Any, param: str) -> str:
    found = languages.find(code, served)
    if found is None:
        raise BadRequest(f"{code[:20]!r} is not supported as a {param} language: see /languages", param=param)
    return found
