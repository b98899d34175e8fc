"""Detects the language of a text."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass

from py3langid.langid import MODEL_FILE, LanguageIdentifier

from fastgen_serve.translation import languages
from fastgen_serve.translation.sentences import has_letters

# Characters that the detector reads: more would not improve its result.
_CHARACTERS = 4000
_MOST = 3


@dataclass(frozen=True)
class Detected:
    """A language, and its probability in percent."""

    language: str
    confidence: float


def detect(text: str, served: Collection[str]) -> list[Detected]:
    """Returns the likeliest of the served languages, best first: at most three.

    Their confidence counts all languages that the detector knows: a text in none of the served ones gets low values.
    If no served language is likely, or the text has no letters, returns the first one with a confidence of 0.
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
    """Returns py3langid's model, which its package contains. A separate instance, because the module's is shared."""
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
