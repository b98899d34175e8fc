"""The flowchart of docs/options.md is the one that its script draws, and names settings that exist."""

from __future__ import annotations

import re
from dataclasses import fields
from xml.etree import ElementTree

import pytest

from fastgen import settings
from tests.docs.pages import script


@pytest.fixture(scope="module")
def flowchart():
    return script("make_flowchart")


def test_the_picture_is_up_to_date(flowchart, monkeypatch):
    assert not flowchart.is_stale(), "run python docs/make_flowchart.py"
    monkeypatch.setattr(flowchart, "STEPS", flowchart.STEPS[1:])
    assert flowchart.is_stale()


def test_the_picture_is_well_formed_and_its_settings_exist(flowchart):
    root = ElementTree.fromstring(flowchart.draw())
    text = " ".join(element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text"))
    named = set(re.findall(r"(\w+)=", text)) - {"dtype"}
    assert named and named <= {field.name for field in fields(settings.Settings)}
