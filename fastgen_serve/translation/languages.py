"""Codes of languages: those of clients, and those of checkpoints."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable

from fastgen_serve.translation.names import NAMES, OTHER_CODES, SCRIPTS

# Other codes of LibreTranslate's clients, and regions that stand for a script.
_ALIASES = {
    "zt": "zh-Hant",
    "pb": "pt-BR",
    "zh-CN": "zh-Hans",
    "zh-SG": "zh-Hans",
    "zh-TW": "zh-Hant",
    "zh-HK": "zh-Hant",
}
# Alternatives if a code is not served, in order: most models mean simplified Chinese by Chinese.
_VARIANTS = {"zh": ("zh-Hans", "zh-Hant"), "no": ("nb", "nn"), "nb": ("no",), "nn": ("no",), "pt": ("pt-BR", "pt-PT")}
_CODE = re.compile(r"([A-Za-z]{2,3})(?:[-_]([A-Za-z]{2,4}))?")


def standard(code: str) -> str | None:
    """Returns the code in the clients' form: "de", "zh-Hans", "pt-BR". None if it is not the code of a language.

    Args:
        code: "de", "deu", "deu_Latn", "de_DE", "zh_CN", "cmn_Hans", "pt_br", ...: in any case of letters.
    """
    match = _CODE.fullmatch(code)
    if match is None:
        return None
    language = match[1].lower()
    language = OTHER_CODES.get(language, language)
    rest = match[2] or ""
    found = f"{language}-{rest.title() if len(rest) == 4 else rest.upper()}" if rest else language
    return _ALIASES.get(found, found)


def shortest(own: Iterable[str]) -> dict[str, str]:
    """Returns a model's own code of each language by the client's: the shortest that distinguishes it from the others.

    A script or a region stays if the model has several variants of a language, and for Chinese.
    """
    known = [(code, found) for code in own if (found := standard(code)) is not None]
    languages = Counter(found.partition("-")[0] for _, found in known)
    codes: dict[str, str] = {}
    for code, found in known:
        language = found.partition("-")[0]
        codes.setdefault(language if languages[language] == 1 and language != "zh" else found, code)
    return codes


def find(code: str, served: Collection[str]) -> str | None:
    """Returns the served language that a client means: the same, its usual variant, or it without its region."""
    found = standard(code)
    if found is None:
        return None
    language = found.partition("-")[0]
    for each in (found, *_VARIANTS.get(found, ()), language, *_VARIANTS.get(language, ())):
        if each in served:
            return each
    return None


def name(code: str) -> str:
    """Returns the English name of a language; its code if the name is unknown."""
    language, _, rest = code.partition("-")
    known = NAMES.get(language, language)
    return f"{known} ({SCRIPTS.get(rest, rest)})" if rest else known
