"""Requests to a running `fastgen-serve`, for locust (https://locust.io), which must be installed separately:

    locust -f benchmarks/serving/locustfile.py --host http://localhost:8000 --headless -u 16 -t 60s

Each user requests completions with one of several sets of options, one after another. Every status but 200 is a
failure, and so is an answer without text.
"""

from __future__ import annotations

import random

from locust import HttpUser, task

_PROMPTS = ("And it came to pass", "The light", "In the beginning of the year, when the rain had gone,", "And")
_OPTIONS = (
    {"temperature": 0},
    {"use_beam_search": True, "n": 4, "temperature": 0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0, "repetition_penalty": 1.1},
)


class Client(HttpUser):
    def on_start(self) -> None:
        self.model = self.client.get("/v1/models").json()["data"][0]["id"]

    @task
    def complete(self) -> None:
        asked = {
            "model": self.model,
            "prompt": random.choice(_PROMPTS),
            "min_tokens": 1,
            "max_tokens": random.randint(1, 64),
        }
        body = asked | random.choice(_OPTIONS)
        with self.client.post("/v1/completions", json=body, catch_response=True) as answer:
            if answer.status_code != 200:
                answer.failure(answer.text)
            elif not any(choice["text"] for choice in answer.json()["choices"]):
                answer.failure("no text")
