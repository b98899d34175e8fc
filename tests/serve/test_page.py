"""The page in a real browser: by hand and by keyboard alone, wide and as on a telephone.

Needs selenium, and chromium with its driver (`apt-get install chromium chromium-driver`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from fastgen_serve.api import page as page_api
from fastgen_serve.app import create_app
from fastgen_serve.jobs import ModelInfo
from fastgen_serve.settings import ServeSettings
from tests.browser import MISSING, in_browser, resize, started
from tests.serve import servers

TEXT = "fear not for i am with thee"
VERSE = "and god said let there be light and there was light and god saw the light that it was good"


@pytest.fixture(scope="module")
def settings() -> ServeSettings:
    return ServeSettings(
        models=(("kjv-bart", servers.BART), ("kjv-gpt2", servers.GPT2)), slots=8, max_beams=6, max_tokens=200,
        warm_up=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if MISSING:
        pytest.skip(in_browser.kwargs["reason"])
    with started() as driver:
        driver.set_script_timeout(servers.WAIT)
        yield driver


class Page:
    """What a person does with the page, and sees."""

    def __init__(self, browser: Any, url: str, width: int = 1280, height: int = 860, scheme: str = "light") -> None:
        self.browser = browser
        resize(browser, width, height)
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        browser.get_log("browser")
        browser.get(url)
        servers.until(lambda: self.of("run", "disabled") is False or not self.of("key-field", "hidden"))

    def of(self, name: str, prop: str = "textContent") -> Any:
        return self.browser.execute_script(f"return document.getElementById('{name}').{prop}")

    def find(self, selector: str) -> list[Any]:
        return self.browser.find_elements("css selector", selector)

    def write(self, **values: object) -> None:
        """Into fields, by their names."""
        for name, value in values.items():
            field = self.browser.find_element("id", name)
            field.clear()
            field.send_keys(str(value))

    def run(self, **values: object) -> None:
        """Writes into fields, and asks for results until they are there."""
        self.write(**values)
        self.click("run")
        self.wait_until_done()

    def choose(self, name: str, value: str) -> None:
        from selenium.webdriver.support.select import Select

        Select(self.browser.find_element("id", name)).select_by_value(value)

    def click(self, name: str) -> None:
        self.browser.find_element("id", name).click()

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.browser).send_keys(*keys).perform()

    def focused(self) -> str:
        return self.browser.execute_script("return document.activeElement.id")

    def wait_until_done(self) -> None:
        servers.until(lambda: self.of("list", "ariaBusy") == "false" and self.of("state") != "Generating.")

    def results(self) -> list[str]:
        return [each.get_property("textContent") for each in self.find(".words")]

    def complaints(self) -> list[str]:
        return [
            entry["message"] for entry in self.browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")
        ]

    def is_cut(self) -> list[str]:
        """What is beyond the edges of the window."""
        return self.browser.execute_script(
            """
            const width = document.documentElement.clientWidth;
            const all = Array.from(document.querySelectorAll("body *"));
            const isBeyond = ({ right, width: own }) => own > 0 && right > width + 1;
            const isCut = (each) => each.clientWidth > 0 && each.scrollWidth > each.clientWidth + 1;
            return [
                ...all.filter((each) => isBeyond(each.getBoundingClientRect())),
                ...all.filter((each) => isCut(each) && each.tagName !== "SELECT"),
            ].map((each) => `${each.tagName} ${each.id} ${each.className}`);
            """
        )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_first_view(browser, url, scheme):
    page = Page(browser, url, scheme=scheme)
    assert page.of("model", "value") == "kjv-bart"
    assert [each.text for each in page.find("#model option")] == ["kjv-bart", "kjv-gpt2"]
    assert page.of("all-slots") == "8"
    assert page.of("state").startswith("Results appear here")
    assert page.of("failure", "hidden") and page.of("key-field", "hidden")
    assert page.focused() == "text"
    assert not page.complaints() and not page.is_cut()


def test_the_n_best_are_side_by_side_with_their_scores(browser, url):
    page = Page(browser, url, height=720)
    page.write(text=VERSE, beams=4)
    assert page.of("results", "value") == "4"  # as many as beams, unless somebody says another number
    page.run(results=3, most=40, penalty=0.8)
    body = {"prompt": VERSE, "num_beams": 4, "n": 3, "max_tokens": 40, "length_penalty": 0.8}
    expected = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    assert page.results() == [choice["text"] for choice in expected["choices"]]
    scores = [each.text for each in page.find(".score")]
    assert scores == [f"score {choice['score']:.3f}".replace("-", "−") for choice in expected["choices"]]
    assert page.of("tokens") == str(expected["usage"]["completion_tokens"])
    assert float(page.of("rate")) > 0
    places = [each.rect for each in page.find(".result")]
    assert len({place["y"] for place in places}) == 1 and len({place["x"] for place in places}) == 3
    assert page.of("state").startswith("3 results")
    best, *others = page.results()
    for same, other in zip(page.find(".same"), others, strict=True):
        shared = same.get_property("textContent")
        assert best.startswith(shared) and other.startswith(shared)
        assert best[len(shared) :][:1] != other[len(shared) :][:1]
    assert not page.complaints() and not page.is_cut()


def test_tokens_come_as_they_are_certain(browser, url):
    page = Page(browser, url, height=720, scheme="dark")
    page.choose("model", "kjv-gpt2")
    page.write(beams=1, text="and it came to pass", most=60)
    page.click("run")
    # More than one picture of the text: each one goes on where the last one has ended.
    seen: list[str] = []

    def look() -> bool:
        text = "".join(page.results())
        if text and text not in seen:
            seen.append(text)
        return page.of("list", "ariaBusy") == "false" and page.of("state") != "Generating."

    servers.until(look, every=0)
    assert all(after.startswith(before) for before, after in itertools.pairwise(seen))
    assert len(page.find(".words .new")) > 5
    body = {"model": "kjv-gpt2", "prompt": "and it came to pass", "temperature": 0, "max_tokens": 60}
    expected = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    assert page.results() == [expected["choices"][0]["text"]]
    assert "cut at the limit" in page.find(".length")[0].text
    assert page.of("first").endswith("s") and page.of("total").endswith("s")
    assert not page.complaints()


def test_stopping_frees_the_slots(browser, url, models):
    page = Page(browser, url)
    page.choose("model", "kjv-gpt2")
    page.write(beams=1, text="and it came to pass", most=60, least=60)
    page.click("run")
    servers.until(lambda: page.results() and page.results()[0])
    page.press("\ue00c")  # Escape
    page.wait_until_done()
    assert page.of("state") in ("Stopped.", "One result, 60 tokens.")
    servers.until(lambda: page.of("busy") == "0" and page.of("waiting") == "0")
    assert page.of("run", "disabled") is False and page.of("stop", "disabled") is True


def test_errors_are_shown_and_go(browser, url):
    page = Page(browser, url)
    page.run(text=TEXT, least=50, most=20)
    assert "min_tokens" in page.of("failure") and not page.of("failure", "hidden")
    assert page.of("failure", "role") == "alert"
    page.browser.find_element("id", "least").clear()
    page.run()
    assert page.of("failure", "hidden") and page.results()
    page.write(beams=100)
    page.click("run")  # the browser says what is wrong, and nothing is sent
    assert page.browser.execute_script("return document.getElementById('beams').validity.rangeOverflow")


def test_what_a_model_writes_is_text(browser, url):
    page = Page(browser, url)
    page.browser.execute_script(
        """
        const choice = { index: 0, text: "<img src=x onerror=alert(1)>", finish_reason: "stop" };
        const answer = `data: ${JSON.stringify({ choices: [choice] })}\\n\\ndata: [DONE]\\n\\n`;
        const ask = window.fetch;
        window.fetch = async (path, options) =>
            path.startsWith("v1/") ? new Response(answer) : ask(path, options);
        """
    )
    page.run(text=TEXT)
    assert page.results() == ["<img src=x onerror=alert(1)>"]
    assert not page.find(".words img")


def test_languages_are_chosen_where_a_model_is_told_them(browser, url):
    page = Page(browser, url)
    assert page.of("languages", "hidden")
    page.browser.execute_script(
        """
        const ask = window.fetch;
        window.fetch = async (path, options) => {
            if (path.startsWith("v1/")) {
                window.sent = JSON.parse(options.body);
                return new Response("data: [DONE]\\n\\n");
            }
            const stats = await (await ask(path, options)).json();
            stats.models[1].languages = [{ code: "eng_Latn", name: "English" }, { code: "deu_Latn", name: "German" }];
            return new Response(JSON.stringify(stats));
        };
        document.dispatchEvent(new Event("visibilitychange"));
        """
    )

    def is_shown() -> bool:
        page.choose("model", "kjv-bart")
        page.choose("model", "kjv-gpt2")
        return not page.of("languages", "hidden")

    servers.until(is_shown, every=0.1)
    page.choose("source", "eng_Latn")
    page.choose("target", "deu_Latn")
    page.run(text=TEXT)
    sent = page.browser.execute_script("return window.sent")
    assert (sent["src_lang"], sent["tgt_lang"], sent["model"]) == ("eng_Latn", "deu_Latn", "kjv-gpt2")


def test_the_keyboard_alone_is_enough(browser, url):
    page = Page(browser, url)
    tab, control, enter, up = "\ue004", "\ue009", "\ue007", "\ue013"
    page.press(TEXT)
    order = []
    for _ in range(7):
        page.press(tab)
        order.append(page.focused())
        if page.focused() == "beams":
            page.press(up, up)
        if page.focused() == "most":
            page.press("16")
    assert order == ["beams", "results", "penalty", "least", "most", "run", order[-1]]
    page.browser.execute_script("document.getElementById('run').focus()")
    page.press(enter)
    page.wait_until_done()
    assert len(page.results()) == int(page.of("beams", "value"))
    page.browser.execute_script("document.getElementById('text').focus()")
    page.press(control, enter)
    servers.until(lambda: page.of("state") == "Generating." or page.of("list", "ariaBusy") == "true" or page.results())
    page.wait_until_done()
    assert page.results()


def test_each_field_has_a_name_and_the_focus_is_seen(browser, url):
    page = Page(browser, url)
    for field in page.find("input, select, textarea, button"):
        assert field.accessible_name or not field.is_displayed(), field.get_attribute("id")
    page.press("\ue004")
    style = "return getComputedStyle(document.activeElement)"
    assert page.browser.execute_script(f"{style}.outlineStyle") == "solid"
    assert page.browser.execute_script(f"{style}.outlineWidth") == "2px"


@pytest.mark.parametrize("width", [360, 768])
def test_narrow_windows(browser, url, width):
    page = Page(browser, url, width=width, height=740)
    assert not page.is_cut()
    page.run(text=TEXT, beams=3, most=24)
    assert len(page.results()) == 3
    assert not page.is_cut()
    assert page.browser.execute_script(
        "return document.getElementById('results-title').getBoundingClientRect().bottom <= innerHeight"
    )
    if width < 500:
        assert len({each.rect["x"] for each in page.find(".result")}) == 1
        for control in page.find("button, input, select"):
            assert not control.is_displayed() or control.rect["height"] >= 32


def test_a_key_is_asked_for_where_one_is_needed(browser, settings, models):
    locked = dataclasses.replace(settings, api_keys=("right",))
    with servers.in_thread(create_app(locked, servers.SharedModels(list(models)))) as url:
        page = Page(browser, url)
        assert page.focused() == "key" and page.of("run", "disabled") is True
        assert page.of("metrics", "hidden") is True  # a link has no key
        page.press("wrong", "\ue004")
        servers.until(lambda: "API key" in page.of("failure"))
        page.write(key="right")
        page.press("\ue004")
        servers.until(lambda: page.of("run", "disabled") is False)
        page.run(text=TEXT)
        assert page.results()
        assert page.browser.execute_script("return localStorage.length + document.cookie.length") == 0


def test_the_page_asks_nothing_of_others(url):
    for path, kind in (
        ("/", "text/html"), ("/page.js", "text/javascript"), ("/page.css", "text/css"), ("/icon.svg", "image/svg+xml"),
    ):  # fmt: skip
        answer = httpx.get(f"{url}{path}")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(kind)
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "") and "https://" not in answer.text
    assert httpx.get(f"{url}/page/../settings.py").status_code == 404


def test_what_is_said_of_languages():
    tokenizer = SimpleNamespace(src_lang="en_XX", lang_code_to_id={"en_XX": 1, "de_DE": 2}, chat_template=None)
    info = ModelInfo("m", "encoder-decoder", ("generate",), 100, 20, slots=4, defaults={"num_beams": 5})
    state = page_api._state(SimpleNamespace(name="m", is_ready=True, info=info, tokenizer=tokenizer), {"busy": 3})
    assert [(each.code, each.name) for each in state.languages] == [("en_XX", "English"), ("de_DE", "German")]
    assert (state.beams, state.busy, state.waiting, state.positions) == (5, 3, 0, 100)


def test_what_is_said_of_the_models(url):
    found = httpx.get(f"{url}/stats").json()
    assert (found["max_beams"], found["max_tokens"]) == (6, 200)
    bart, gpt2 = found["models"]
    assert (bart["name"], bart["kind"], bart["ready"], bart["generates"]) == ("kjv-bart", "encoder-decoder", True, True)
    assert (gpt2["kind"], gpt2["chats"], gpt2["slots"], gpt2["busy"]) == ("decoder-only", False, 8, 0)
