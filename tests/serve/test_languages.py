"""Languages: what clients and checkpoints call them, what a model translates, which one a text is in."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from transformers.models.m2m_100 import tokenization_m2m_100
from transformers.models.mbart50.tokenization_mbart50 import FAIRSEQ_LANGUAGE_CODES as MBART
from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES as NLLB

from fastgen_serve import main
from fastgen_serve.translation import detection, languages, pairs

M2M100 = tokenization_m2m_100.FAIRSEQ_LANGUAGE_CODES["m2m100"]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("de", "de"), ("DEU", "de"), ("ger", "de"), ("de_DE", "de-DE"), ("zh_CN", "zh-Hans"), ("cmn_Hant", "zh-Hant"),
        ("zt", "zh-Hant"), ("pb", "pt-BR"), ("pt-br", "pt-BR"), ("haw", "haw"), ("", None), ("english", None),
        ("../x", None),
    ],
)  # fmt: skip
def test_codes_have_one_form(code, expected):
    assert languages.standard(code) == expected


def test_models_languages_are_named_by_the_shortest_code():
    found = languages.shortest(["eng_Latn", "deu_Latn", "zho_Hans", "zho_Hant", "ace_Arab", "ace_Latn", "<mask>"])
    assert found == {
        "en": "eng_Latn", "de": "deu_Latn", "zh-Hans": "zho_Hans", "zh-Hant": "zho_Hant", "ace-Arab": "ace_Arab",
        "ace-Latn": "ace_Latn",
    }  # fmt: skip


@pytest.mark.parametrize("codes", [NLLB, M2M100, MBART], ids=["nllb", "m2m100", "mbart50"])
def test_each_language_of_a_model_has_a_code_and_a_name(codes):
    found = languages.shortest(codes)
    assert sorted(found.values()) == sorted(codes)
    assert not [code for code in found if languages.name(code) == code]
    assert len({languages.name(code) for code in found}) == len(found)


@pytest.mark.parametrize(
    ("code", "served", "expected"),
    [
        ("zh", ["en", "zh-Hans", "zh-Hant"], "zh-Hans"), ("zh-TW", ["zh-Hans", "zh-Hant"], "zh-Hant"),
        ("zh-Hans", ["zh"], "zh"), ("de-AT", ["de"], "de"), ("pt", ["pt-BR"], "pt-BR"), ("no", ["nb"], "nb"),
        ("fr", ["de"], None), ("x" * 50, ["de"], None),
    ],
)  # fmt: skip
def test_clients_find_what_they_mean(code, served, expected):
    assert languages.find(code, served) == expected


def test_pairs_of_the_command_are_read():
    assert pairs.parse("en:de, eng:fra") == {("en", "de"), ("en", "fr")}
    for wrong in ("en", "en:", "en:en", "en-de", "en:de,", "english:german"):
        with pytest.raises(ValueError, match="no pair of languages"):
            pairs.parse(wrong)


def test_the_command_names_models_or_means_the_first_one():
    words = "a=models/a b=models/b --languages en:de,de:en b=en:fr --translation-prefix".split()
    found = main.read([*words, "to {target}: "])
    assert found.languages == {"a": {("en", "de"), ("de", "en")}, "b": {("en", "fr")}}
    assert found.translation_prefix == "to {target}: "


def test_files_of_t5_say_what_it_translates():
    tasks = {
        "summarization": {"prefix": "summarize: "},
        "translation_en_to_de": {"prefix": "translate English to German: "},
    }
    config = SimpleNamespace(model_type="t5", task_specific_params=tasks)
    found = pairs.of_model(SimpleNamespace(), config)
    assert (found.sources(), found.targets("en")) == (["en"], ["de"])
    assert found.way("en", "de") == pairs.Way("translate English to German: ")
    assert found.way("de", "en") is None


def test_tokens_of_madlad_are_put_in_front():
    tokenizer = SimpleNamespace(get_vocab=lambda: {"<2de>": 5, "<2en>": 6, "▁a": 7})
    found = pairs.of_model(tokenizer, SimpleNamespace(model_type="t5", task_specific_params=None))
    assert found.sources() == ["de", "en"]
    assert found.way("en", "de") == pairs.Way("<2de> ")


def test_pairs_and_prefix_of_the_command_count_where_files_say_nothing():
    tokenizer, config = SimpleNamespace(get_vocab=dict), SimpleNamespace(model_type="t5", task_specific_params=None)
    assert pairs.of_model(tokenizer, config).sources() == []
    found = pairs.of_model(tokenizer, config, pairs.parse("en:zh"), "from {source} to {target}: ")
    assert found.way("en", "zh") == pairs.Way("from English to Chinese: ")


@pytest.mark.parametrize("kind", ["M2M100Tokenizer", "NllbTokenizer", "MBart50Tokenizer"])
def test_language_tokens_of_a_model_are_used(kind):
    codes = {"en_XX": 3, "de_DE": 4} if kind.startswith("MBart") else {"en": 3, "de": 4}
    if kind == "NllbTokenizer":
        codes = {"eng_Latn": 3, "deu_Latn": 4}
        tokenizer = type(kind, (), {})()
        tokenizer.all_special_tokens, tokenizer.convert_tokens_to_ids = (
            ["<s>", *codes],
            lambda names: [codes[name] for name in names],
        )
    else:
        tokenizer = type(kind, (), {"lang_code_to_id": codes})()
    tokenizer.src_lang = "en"
    found = pairs.of_model(tokenizer, SimpleNamespace(model_type="m2m_100"))
    (english, german) = codes
    assert found.way("en", "de") == pairs.Way("", english, {"forced_bos_token_id": codes[german]})
    limited = pairs.of_model(tokenizer, SimpleNamespace(model_type="m2m_100"), pairs.parse("en:de"))
    assert limited.way("en", "de") == found.way("en", "de")
    assert limited.way("de", "en") is None


def test_a_tuned_mbart_says_its_pair_by_the_command():
    tokenizer = type("MBartTokenizer", (), {"lang_code_to_id": {"en_XX": 3, "ro_RO": 4}, "src_lang": "en_XX"})()
    config = SimpleNamespace(model_type="mbart")
    assert pairs.of_model(tokenizer, config).sources() == []
    assert pairs.of_model(tokenizer, config, pairs.parse("en:ro")).way("en", "ro") == pairs.Way("", "en_XX")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The quick brown fox jumps over the lazy dog.", "en"),
        ("Der schnelle braune Fuchs springt über den faulen Hund.", "de"),
        ("Le renard brun saute par-dessus le chien paresseux.", "fr"),
        ("敏捷的棕色狐狸跳过了懒狗。", "zh-Hans"),
    ],
)
def test_the_language_of_a_text_is_found_among_those_served(text, expected):
    found = detection.detect(text, ["fr", "en", "de", "zh-Hans"])
    assert found[0].language == expected
    assert 50 < found[0].confidence <= 100
    assert [each.confidence for each in found] == sorted((each.confidence for each in found), reverse=True)


def test_a_text_in_no_language_that_is_served_is_not_sure_of_any():
    assert detection.detect("Der schnelle braune Fuchs springt.", ["en"])[0].confidence < 5
    assert detection.detect("12 + 3", ["fr", "en"]) == [detection.Detected("fr", 0.0)]
