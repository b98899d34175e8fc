"""What clients other than OpenAI's send, or ask for, as they are set up at first."""

from __future__ import annotations

import gzip
import json
import re
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fastgen_serve.app import create_app
from fastgen_serve.models import Models
from fastgen_serve.settings import ServeSettings
from fastgen_serve.workers.local import LocalModel
from tests.serve.checkpoints import GREEDY, PROMPT, USER, texts
from tests.serve.servers import GPT2, in_thread
from tests.serve.test_deploy import DASHBOARD

CHAT = {"model": "chat", "messages": [USER], **GREEDY}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def refusal(response: httpx.Response) -> tuple[int, str | None, str]:
    error = response.json()["error"]
    return response.status_code, error["param"], error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "gpt2", "prompt": PROMPT, **GREEDY}),
        ("/v1/chat/completions", CHAT),
        ("/v1/embeddings", {"model": "vectors", "input": "light"}),
        ("/v1/rerank", {"model": "pairs", "query": "light", "documents": ["day"]}),
        ("/tokenize", {"model": "chat", "prompt": "light"}),
    ],
)
def test_what_is_not_known_may_be_null(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    """Voyage's client, for one, sends all fields that it has."""
    without, answer = (http.post(path, json=each).json() for each in (body, {**body, "input_type": None}))
    assert answer.keys() == without.keys() and answer.get("usage") == without.get("usage")
    assert refusal(http.post(path, json={**body, "input_type": "query"})) == (
        400, "input_type", "input_type: is not known here: leave it out",
    )  # fmt: skip


def test_a_call_of_the_old_kind_is_named_where_the_message_has_no_content(http: httpx.Client) -> None:
    called = {"role": "assistant", "content": None, "function_call": CALL["function"]}
    status, param, message = refusal(http.post("/v1/chat/completions", json={**CHAT, "messages": [USER, called]}))
    assert (status, param) == (400, "messages.1.function_call") and "not supported" in message


def test_the_model_and_the_path_that_there_are_not(http: httpx.Client) -> None:
    status, param, message = refusal(http.post("/v1/chat/completions", json={**CHAT, "model": "dummy"}))
    assert (status, param) == (404, "model") and message.startswith("model 'dummy' is not served: the models are bart,")
    status, param, message = refusal(http.post("/v1/realtime", json={"model": "chat", "input": "a"}))
    assert (status, param) == (404, None) and "/docs" in message
    assert len(refusal(http.get("/v1/models/" + "a" * 5000))[2]) < 300


def test_log_probabilities_of_a_model_with_beams(http: httpx.Client) -> None:
    """The request has no beams, the model's files have: the message says how to go without."""
    body = {"model": "gpt2", "prompt": PROMPT, "max_tokens": 3, "logprobs": 1}
    status, param, message = refusal(http.post("/v1/completions", json=body))
    assert (status, param) == (400, "logprobs") and "num_beams=1" in message
    assert http.post("/v1/completions", json={**body, "num_beams": 1}).json()["choices"][0]["logprobs"]["tokens"]


def test_a_compressed_body_is_refused(http: httpx.Client) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    body = json.dumps(CHAT).encode()
    status, _, message = refusal(http.post("/v1/chat/completions", content=gzip.compress(body), headers=headers))
    assert status == 415 and "Content-Encoding" in message
    headers["Content-Encoding"] = "identity"
    assert http.post("/v1/chat/completions", content=body, headers=headers).status_code == 200


def test_proxies_do_not_hold_streams_back(http: httpx.Client) -> None:
    """nginx buffers what does not say otherwise."""
    for path, body in (("chat/completions", CHAT), ("completions", {"model": "gpt2", "prompt": PROMPT, **GREEDY})):
        assert http.post(f"/v1/{path}", json={**body, "stream": True}).headers["X-Accel-Buffering"] == "no"


def test_fields_of_rerank_that_ask_for_nothing(http: httpx.Client) -> None:
    body = {"model": "pairs", "query": "light", "documents": ["day"]}
    assert http.post("/v2/rerank", json={**body, "max_tokens_per_doc": 0}).status_code == 200
    assert refusal(http.post("/v2/rerank", json={**body, "max_tokens_per_doc": 9}))[:2] == (400, "max_tokens_per_doc")


def test_the_dashboard_offers_models_of_all_kinds(http: httpx.Client, paths: dict[str, str]) -> None:
    """Also those that only encode, which have no slots."""
    [query] = [each["query"]["query"] for each in DASHBOARD["templating"]["list"] if each["name"] == "model"]
    found = re.fullmatch(r"label_values\((\w+), model\)", query)
    assert found is not None
    families = text_string_to_metric_families(http.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == found[1]]
    assert {sample.labels["model"] for sample in samples} >= paths.keys()


def test_as_many_inputs_as_clients_send_at_once(paths: dict[str, str]) -> None:
    """LangChain sends 1000 texts in a request, OpenAI takes 2048."""
    settings = ServeSettings(models=(("vectors", paths["vectors"]),), warm_up=False)
    with in_thread(create_app(settings, Models([LocalModel("vectors", settings)]))) as url:
        ask = lambda count: httpx.post(f"{url}/v1/embeddings", json={"input": ["light", "day"] * count}, timeout=60)  # noqa: E731
        made = ask(1024).json()["data"]
        assert [each["index"] for each in made] == list(range(2048))
        assert made[2046]["embedding"] == pytest.approx(ask(1).json()["data"][0]["embedding"], abs=1e-6)
        assert refusal(ask(1025))[:2] == (400, "input")


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"temperature": 1e-8}, {"do_sample": False}),
        ({"temperature": 1e-5}, {"do_sample": True, "temperature": 1e-5}),
        ({"temperature": 1e-4, "top_p": 1e-6}, {"do_sample": True, "temperature": 1e-4, "top_p": 1e-6}),
        ({"typical_p": 1e-6}, {"do_sample": True, "typical_p": 1e-6}),
    ],
    ids=str,
)
def test_numbers_next_to_zero(http: httpx.Client, fields: dict[str, Any], options: dict[str, Any]) -> None:
    """Where a client means greedy search, it may say so with a small number: 0.000001 is what models of Qwen say."""
    body = {"model": "gpt2", "prompt": PROMPT, "max_tokens": 12, "seed": 1, **fields}
    expected = texts(GPT2, PROMPT, seed=1, max_new_tokens=12, num_beams=1, top_k=0, **options)
    assert [each["text"] for each in http.post("/v1/completions", json=body).json()["choices"]] == expected


def test_numbers_with_a_point_and_no_model(http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "n": 1, "seed": 1}
    same = {name: float(value) if isinstance(value, int) else value for name, value in body.items()}
    ask = lambda **fields: http.post("/v1/completions", json=fields).json()  # noqa: E731
    expected = ask(model="gpt2", **body)["choices"]
    assert ask(model="gpt2", **same)["choices"] == expected and expected[0]["text"]
    assert ask(model="", **body)["model"] == ask(**body)["model"] == "bart"
    assert ask(model="gpt2", **{**body, "max_tokens": 3.5})["error"]["param"] == "max_tokens"
    assert http.get("/v1/models/").json() == http.get("/v1/models").json()
