"""vLLM's further paths: the numbers are the library's for each text, or pair of texts, alone."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest

from tests.serve.checkpoints import encoded, encoder, logits, states

TEXTS = ["let there be light", "day", "darkness upon the face of the deep"]
QUERY = "the light"


def post(client: httpx.Client, path: str, **fields: Any) -> Any:
    response = client.post(path, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def vector(path: str, text: str) -> Any:
    return states(path, text).mean(0).double().numpy()


def cosine(first: Any, second: Any) -> float:
    return float(first @ second / np.linalg.norm(first) / np.linalg.norm(second))


def tokens_of(path: str, *text: str) -> list[int]:
    return encoded(path, *text)["input_ids"][0].tolist()


def test_classes(http: httpx.Client, paths: dict[str, str]) -> None:
    answer = post(http, "/classify", model="classes", input=TEXTS)
    assert (answer["object"], answer["model"]) == ("list", "classes") and answer["id"].startswith("classify-")
    for index, (made, text) in enumerate(zip(answer["data"], TEXTS, strict=True)):
        expected = logits(paths["classes"], text).softmax(-1)
        assert made["probs"] == pytest.approx(expected.tolist(), abs=1e-5)
        assert made["label"] == f"kind {expected.argmax()}"
        assert (made["index"], made["num_classes"]) == (index, 3)
    used = sum(len(tokens_of(paths["classes"], text)) for text in TEXTS)
    assert answer["usage"] == {"prompt_tokens": used, "total_tokens": used, "completion_tokens": 0}
    ids = tokens_of(paths["classes"], TEXTS[1])
    assert post(http, "/classify", model="classes", input=ids)["data"][0]["probs"] == pytest.approx(
        answer["data"][1]["probs"], abs=1e-6
    )


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents")])
def test_scores_of_a_cross_encoder(
    http: httpx.Client, paths: dict[str, str], path: str, names: tuple[str, str]
) -> None:
    first, second = names
    answer = post(http, path, model="pairs", **{first: QUERY, second: TEXTS})
    expected = [logits(paths["pairs"], QUERY, text).sigmoid().item() for text in TEXTS]
    assert [each["score"] for each in answer["data"]] == pytest.approx(expected, abs=1e-5)
    assert [each["index"] for each in answer["data"]] == [0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == sum(len(tokens_of(paths["pairs"], QUERY, text)) for text in TEXTS)


def test_scores_of_many_pairs(http: httpx.Client, paths: dict[str, str]) -> None:
    answer = post(http, "/score", model="pairs", text_1=TEXTS, text_2=TEXTS[::-1], use_activation=False)
    expected = [logits(paths["pairs"], *pair).item() for pair in zip(TEXTS, TEXTS[::-1], strict=True)]
    assert [each["score"] for each in answer["data"]] == pytest.approx(expected, abs=1e-5)


def test_scores_of_vectors(http: httpx.Client, paths: dict[str, str]) -> None:
    answer = post(http, "/score", model="vectors", text_1=QUERY, text_2=TEXTS)
    expected = [cosine(vector(paths["vectors"], QUERY), vector(paths["vectors"], text)) for text in TEXTS]
    assert [each["score"] for each in answer["data"]] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
@pytest.mark.parametrize("model", ["pairs", "vectors"])
def test_rerank(http: httpx.Client, path: str, model: str) -> None:
    scores = [each["score"] for each in post(http, "/score", model=model, text_1=QUERY, text_2=TEXTS)["data"]]
    answer = post(http, path, model=model, query=QUERY, documents=TEXTS)
    order = sorted(range(3), key=lambda index: -scores[index])
    assert [each["index"] for each in answer["results"]] == order
    assert [each["relevance_score"] for each in answer["results"]] == pytest.approx([scores[index] for index in order])
    assert [each["document"]["text"] for each in answer["results"]] == [TEXTS[index] for index in order]
    best = post(http, path, model=model, query=QUERY, documents=TEXTS, top_n=1, return_documents=False)["results"]
    assert best == [{"index": order[0], "relevance_score": pytest.approx(scores[order[0]])}]


def test_tokens(http: httpx.Client, paths: dict[str, str]) -> None:
    ids = tokens_of(paths["vectors"], TEXTS[0])
    answer = post(http, "/tokenize", model="vectors", prompt=TEXTS[0], return_token_strs=True)
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), 64)
    assert answer["token_strs"][0] == "<s>"
    plain = post(http, "/tokenize", model="vectors", prompt=TEXTS[0], add_special_tokens=False)
    assert plain["tokens"] == ids[1:-1] and plain["token_strs"] is None
    assert post(http, "/detokenize", model="vectors", tokens=ids)["prompt"] == f"<s>{TEXTS[0]}</s>"
    assert post(http, "/detokenize", model="vectors", tokens=[])["prompt"] == ""
    assert post(http, "/tokenize", model="vectors", prompt="", add_special_tokens=False)["tokens"] == []


def test_tokens_of_a_chat(http: httpx.Client, paths: dict[str, str]) -> None:
    tokenizer = encoder(paths["chat"])[1]
    messages = [{"role": "user", "content": "what is the law"}]
    answer = post(http, "/tokenize", model="chat", messages=messages)
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert answer["tokens"] == tokenizer(prompt)["input_ids"]
    without = post(http, "/tokenize", model="chat", messages=messages, add_generation_prompt=False)
    assert without["count"] < answer["count"]


def test_long_pairs_are_cut_if_asked_for(http: httpx.Client, paths: dict[str, str]) -> None:
    answer = post(http, "/score", model="pairs", text_1=QUERY, text_2="light " * 80, truncate_prompt_tokens=-1)
    assert answer["usage"]["prompt_tokens"] == 64
