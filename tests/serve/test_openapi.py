"""The documentation says what the server does: requests drawn from it get an answer that it describes, and no 500."""

from __future__ import annotations

from collections import Counter
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

DOCUMENTED = (checks.content_type_conformance, checks.response_schema_conformance, checks.status_code_conformance)
CHECKS = (not_a_server_error, checks.negative_data_rejection, *DOCUMENTED)
EXAMPLES = 25
# By the path, a model for it: a name that is drawn is none of them.
MODELS = {
    "/v1/completions": "gpt2", "/v1/chat/completions": "chat", "/v1/responses": "chat", "/v1/embeddings": "vectors",
    "/classify": "classes", "/score": "pairs", "/rerank": "vectors", "/tokenize": "chat", "/detokenize": "chat",
}  # fmt: skip


def make_possible(path: str, body: dict[str, Any]) -> None:
    """Changes what no schema can say: there is such a model, and fields agree. Answers are short."""
    body["model"] = MODELS[path]
    for name in ("structured_outputs", "response_format", "text", "tools", "tool_choice"):
        body.pop(name, None)
    for message in body.get("messages") or ():
        if message["role"] == "tool":
            message["role"] = "user"
        for name in ("tool_calls", "tool_call_id"):
            message.pop(name, None)
    if path.endswith("/completions"):
        body["max_tokens"] = 4
        body.pop("max_completion_tokens", None)
    if path == "/v1/responses":
        body["max_output_tokens"] = 4
    if path == "/score":
        for name in ("data_1", "data_2", "queries", "documents", "items"):
            body.pop(name, None)
        body["text_1"], body["text_2"] = "day", body.get("text_2") or "night"


@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", MODELS)
def test_drawn_requests(url: str, path: str, mode: GenerationMode) -> None:
    """Requests as the documentation describes them, and such that it does not allow."""
    operation = schemathesis.openapi.from_url(f"{url}/openapi.json")[path]["POST"]
    statuses = Counter[int]()

    @settings(
        max_examples=4 * EXAMPLES, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        if mode is GenerationMode.POSITIVE:
            make_possible(path, case.body)
        response = case.call()
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    run()
    if mode is GenerationMode.POSITIVE:
        assert statuses[200], f"none is answered: {dict(statuses)}"


def test_errors_and_streams_are_documented(url: str) -> None:
    paths = httpx.get(f"{url}/openapi.json").json()["paths"]
    for path in ("/v1/completions", "/v1/chat/completions"):
        answers = paths[path]["post"]["responses"]
        assert set(answers["200"]["content"]) == {"application/json", "text/event-stream"}
    for path in ("/v1/completions", "/v1/embeddings", "/classify", "/v2/rerank"):
        answers = paths[path]["post"]["responses"]
        for status in ("400", "401", "404", "413", "429", "503", "504"):
            assert answers[status]["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorAnswer")
        assert "422" not in answers, "what is malformed gets 400"
