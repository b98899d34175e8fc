"""The documentation says what the server does: requests drawn from it get an answer that it describes, and no 500."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from fastgen_serve.app import create_app
from tests.serve import checkpoints

CHECKS = (
    not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    negative_data_rejection,
)
EXAMPLES = 20


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory, enabled: None) -> Any:
    made = checkpoints.folders(tmp_path_factory.mktemp("models"))
    paths = {name: made[name] for name in ("chat", "vectors", "pairs")}
    chosen, models = checkpoints.load(paths, max_batch=4, max_beams=4, max_tokens=8)
    yield create_app(chosen, models)
    for model in models:
        model.close()  # type: ignore[attr-defined]


@pytest.fixture
def api(app: Any) -> Any:
    return schemathesis.openapi.from_asgi("/openapi.json", app)


schema = schemathesis.pytest.from_fixture("api")


@schema.include(path_regex="^/(v1|v2|classify|score|rerank|tokenize|detokenize)").parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_drawn_requests(case: Any) -> None:
    case.call_and_validate(checks=CHECKS)


def test_errors_and_streams_are_documented(app: Any) -> None:
    paths = app.openapi()["paths"]
    for path in ("/v1/completions", "/v1/chat/completions"):
        answers = paths[path]["post"]["responses"]
        assert set(answers["200"]["content"]) == {"application/json", "text/event-stream"}
    for path in ("/v1/completions", "/v1/embeddings", "/classify", "/v2/rerank"):
        answers = paths[path]["post"]["responses"]
        for status in ("400", "401", "404", "413", "429", "503", "504"):
            assert answers[status]["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorAnswer")
        assert "422" not in answers, "what is malformed gets 400"
