"""Which language a text is in."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass

from py3langid.langid import MODEL_FILE, LanguageIdentifier

from fastgen_serve.translation import languages
from fastgen_serve.translation.sentences import has_letters

# What a detector reads of a text: more makes it no surer.
_CHARACTERS = 4000
_MOST = 3


@dataclass(frozen=True)
class Detected:
    """A language, and how likely it is: from 0 to 100."""

    language: str
    confidence: float


def detect(text: str, served: Collection[str]) -> list[Detected]:
    """The likeliest of the served languages, best first: at most three.

    Their confidence counts all languages that the detector knows: a text in none of the served ones gets low numbers.
    For a text without letters, or in none of them at all, that is the first one, with a confidence of 0.
    """
    found: dict[str, float] = {}
    if has_letters(text):
        for code, probability in _identifier().rank(text[:_CHARACTERS]):
            if (language := languages.find(code, served)) is not None:
                found[language] = found.get(language, 0.0) + float(probability)
    best = sorted(found.items(), key=lambda each: -each[1])[:_MOST]
    likely = [Detected(language, round(100 * probability, 1)) for language, probability in best]
    return [each for each in likely if each.confidence] or [Detected(next(iter(served)), 0.0)]


@functools.cache
def _identifier() -> LanguageIdentifier:
    """py3langid's model, which is in its package. Our own: its settings are others' in the module's."""
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
