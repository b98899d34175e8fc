"""Translates sentences: chooses the model for a pair, makes its jobs, and puts the results together."""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fastgen.pipeline.errors import one_line
from fastgen_serve.concurrency import in_turns, together
from fastgen_serve.errors import BadRequest, Busy, TimedOut
from fastgen_serve.jobs import Generate, Generated
from fastgen_serve.models import Models
from fastgen_serve.served import ServedModel
from fastgen_serve.settings import ServeSettings
from fastgen_serve.translation import detection, languages, pairs
from fastgen_serve.translation.detection import Detected
from fastgen_serve.translation.pairs import Pairs, Way
from fastgen_serve.translation.sentences import Piece, shorten
from fastgen_serve.workers import loading

_log = logging.getLogger("fastgen_serve")
# The most tokens of a sentence, and of its translation if the model's files set no limit. Translation models are
# trained on sentences, so that longer ones are cut.
_MOST_TOKENS = 512
# A character has at most 4 bytes, and a token at least one. A token has at most 16 characters, except in texts that
# nobody reads. These bounds decide about most sentences without tokenising them.
_BYTES, _CHARACTERS = 4, 16
# Seconds until a refused sentence tries again.
_PAUSE = 0.5


class _Jobs:
    """The sentences of one request, on their way to the models."""

    def __init__(self) -> None:
        self._admitted = 0

    async def generate(self, model: ServedModel, job: Generate) -> Generated:
        """Runs a job. Once the queue has accepted a sentence, the others retry: no text fails in its middle.

        Raises:
            Busy: the queue has accepted none.
            ServeError: as `ServedModel.generate`.
        """
        while True:
            self._admitted += 1
            try:
                return await model.generate(job)
            except Busy:
                self._admitted -= 1
                if not self._admitted:
                    raise
            await asyncio.sleep(_PAUSE)


class TranslatingModel:
    """A served model that translates."""

    def __init__(self, model: ServedModel, settings: ServeSettings, found: Pairs) -> None:
        self.pairs = found
        self._model, self._settings = model, settings
        # A copy, because each request sets its language, while other users rely on theirs.
        self._tokenizer = copy.deepcopy(model.tokenizer)
        self._lock = threading.Lock()

    def shorten(self, pieces: Sequence[Piece], way: Way) -> list[list[Piece]]:
        """Returns the parts of each piece: a sentence too long for the model is cut."""
        positions = self._model.info.positions
        most = min(_MOST_TOKENS, positions or _MOST_TOKENS)

        def fits(sentence: str) -> bool:
            size = len(way.prefix + sentence)
            return _BYTES * size < most or (
                size <= _CHARACTERS * most and len(self._encode([sentence], way)[0]) <= most
            )

        return [shorten(piece, fits) for piece in pieces]

    async def translate(self, sentences: Sequence[str], way: Way, count: int, jobs: _Jobs) -> list[list[str]]:
        """Returns the `count` best translations of each sentence, best first.

        Raises:
            ServeError: as `ServedModel.generate`.
        """
        inputs = await asyncio.to_thread(self._encode, sentences, way)
        options = {**way.options, **self._options(count)}
        # A long text does not queue all sentences at once, to leave room for other requests.
        beams = int(options.get("num_beams") or self._model.info.defaults.get("num_beams") or 1)
        at_once = max(1, self._settings.slots // beams)

        async def run(tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
            made = await jobs.generate(self._model, Generate(tokens, options))
            return [sequence.tokens for sequence in made.sequences]

        results = await in_turns(run, inputs, at_once)
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
        if not texts:
            return []  # tokenizers refuse an empty list
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
    """All models that translate. The constructor reads their files: do not call it in an event loop.

    Attributes:
        languages: the targets of each source, both in the order of their English names.

    Args:
        models: the served models.
        settings: of the server: `languages` and `translation_prefix` add what the models' files lack.
    """

    def __init__(self, models: Models, settings: ServeSettings) -> None:
        self._settings = settings
        self._models = [made for model in models if (made := _translating(model, settings)) is not None]
        self.languages = self._languages()

    def _languages(self) -> Mapping[str, list[str]]:
        found: dict[str, set[str]] = {}
        for model in self._models:
            for source in model.pairs.sources():
                found.setdefault(source, set()).update(model.pairs.targets(source))
        return {source: sorted(found[source], key=languages.name) for source in sorted(found, key=languages.name)}

    def target(self, code: str) -> str:
        """Returns the target language that a client asks for.

        Raises:
            BadRequest: it is not one of the targets.
        """
        return _served(code, {target for targets in self.languages.values() for target in targets}, "target")

    def source(self, code: str) -> str:
        """Returns the source language that a client names.

        Raises:
            BadRequest: it is not one of the sources.
        """
        return _served(code, self.languages, "source")

    def detect(self, text: str, target: str | None = None) -> list[Detected]:
        """Returns the likeliest languages of a text, best first, of all sources or of those for this target.

        Raises:
            BadRequest: no model translates.
        """
        served = [source for source, targets in self.languages.items() if target in (None, source) or target in targets]
        if not served:
            raise BadRequest("no model here translates: see /languages")
        return detection.detect(text, served)

    async def translate(
        self, texts: Sequence[Sequence[Piece]], sources: Sequence[str], target: str, count: int = 1
    ) -> list[list[list[Piece]]]:
        """Returns versions of each text, best first: the same number of pieces, with translated sentences.

        Args:
            texts: as pieces.
            sources: the language of each text, as `source` and `detect` return it. A text in the target's stays
                unchanged.
            target: as `target` returns it.
            count: of versions. The last ones repeat a sentence that has fewer.

        Raises:
            BadRequest: no model translates one of the pairs.
            TimedOut: it took longer than a request may.
            ServeError: as `ServedModel.generate`.
        """
        groups: dict[str, list[int]] = {}
        for index, source in enumerate(sources):
            groups.setdefault(source, []).append(index)
        models = [None if source == target else self._model_for(source, target) for source in groups]
        seconds, jobs = self._settings.request_timeout_s, _Jobs()
        works = together(
            _versions([texts[index] for index in group], model, count, jobs)
            for group, model in zip(groups.values(), models, strict=True)
        )
        try:
            made = await asyncio.wait_for(works, seconds)
        except asyncio.TimeoutError:
            raise TimedOut(f"the text took longer than {seconds:g} s: send less of it at once") from None
        order = [index for group in groups.values() for index in group]
        found = dict(zip(order, (versions for group in made for versions in group), strict=True))
        return [found[index] for index in range(len(texts))]

    def _model_for(self, source: str, target: str) -> tuple[TranslatingModel, Way]:
        for model in self._models:
            if (way := model.pairs.way(source, target)) is not None:
                return model, way
        names = f"{languages.name(source)} ({source})", f"{languages.name(target)} ({target})"
        raise BadRequest(f"no model here translates from {names[0]} to {names[1]}: see /languages", param="target")


async def _versions(
    texts: Sequence[Sequence[Piece]], model: tuple[TranslatingModel, Way] | None, count: int, jobs: _Jobs
) -> list[list[list[Piece]]]:
    """Returns versions of texts in one language. Translates their sentences together, each once."""
    if model is None:
        return [[list(text)] for text in texts]
    translating, way = model
    cut = await asyncio.to_thread(lambda: [translating.shorten(text, way) for text in texts])
    sentences = await asyncio.to_thread(_sentences, cut)
    made = await translating.translate(sentences, way, count, jobs)
    return await asyncio.to_thread(_put_together, texts, cut, dict(zip(sentences, made, strict=True)))


def _sentences(cut: Sequence[Sequence[Sequence[Piece]]]) -> list[str]:
    return list(dict.fromkeys(part.text for text in cut for parts in text for part in parts if part.is_sentence))


def _put_together(
    texts: Sequence[Sequence[Piece]],
    cut: Sequence[Sequence[Sequence[Piece]]],
    translations: Mapping[str, list[str]],
) -> list[list[list[Piece]]]:
    most = max(map(len, translations.values()), default=1)

    def version(number: int, pieces: Sequence[Piece], parts: Sequence[Sequence[Piece]]) -> list[Piece]:
        return [
            Piece("".join(_translated(part, translations, number) for part in each), piece.is_sentence)
            for piece, each in zip(pieces, parts, strict=True)
        ]

    return [[version(number, text, parts) for number in range(most)] for text, parts in zip(texts, cut, strict=True)]


def _translated(part: Piece, translations: Mapping[str, list[str]], number: int) -> str:
    versions = translations[part.text] if part.is_sentence else [part.text]
    return versions[min(number, len(versions) - 1)]


def _translating(model: ServedModel, settings: ServeSettings) -> TranslatingModel | None:
    """Returns the model, if it translates. A model with unreadable files is skipped."""
    try:
        config = loading.read_config(settings.path(model.name))
        if not config.is_encoder_decoder:
            return None
        stated = settings.languages.get(model.name)
        found = pairs.of_model(model.tokenizer, config, stated, settings.translation_prefix)
        return TranslatingModel(model, settings, found) if found.sources() else None
    except Exception as error:  # files may contain anything
        _log.warning("LibreTranslate's paths go without model %s: %s", model.name, one_line(error))
        return None


def _served(code: str, served: Collection[str], param: str) -> str:
    found = languages.find(code, served)
    if found is None:
        raise BadRequest(f"{code[:20]!r} is not supported as a {param} language: see /languages", param=param)
    return found
