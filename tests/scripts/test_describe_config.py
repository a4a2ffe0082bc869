"""The page on settings agrees with the classes that check them."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Literal

import pytest
from pydantic import Field

from swarm.config import PeerConfig, RunConfig, valid_keys
from swarm.config.section import Section

ROOT = Path(__file__).parents[2]
README = ROOT / "configs" / "README.md"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "describe_config", ROOT / "scripts" / "describe_config.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Sample(Section):
    """A section."""

    count: int = Field(default=3, gt=0, le=2**20)
    """How many."""
    kind: Literal["a", "b"] | None = None
    """Which
    of them."""
    size: float
    """How large."""
    mode: Literal["fast", "slow"] = "slow"
    """How fast."""


class Silent(Section):
    """A section with an undocumented key."""

    count: int = 1


def test_an_item_says_values_or_type_and_meaning(script):
    assert script.items(Sample, ["count", "kind", "size", "mode"]) == (
        "- `count` = `3`: How many.\n"
        '- `kind` (`"a"` or `"b"`): Which of them.\n'
        "- `size` (number, required): How large.\n"
        '- `mode` = `"slow"` or `"fast"`: How fast.\n'
    )


def test_a_long_meaning_keeps_its_first_sentences_and_what_each_value_does(script):
    long = "a long sentence " * 10
    meaning = f"How. Short. Then {long}. It is left out, too. off: not at all. 0: {long}."
    assert script.summary(meaning) == f"How. Short. off: not at all. 0: {long}."
    assert script.summary(f"Then {long}.") == f"Then {long}."


def test_lines_are_short_and_names_in_quotes_stay_whole(script):
    lines = script.item("word " * 22 + "`two words` `" + "x" * 130 + "`").splitlines()
    assert lines == ["- " + ("word " * 22).strip(), "  `two words`", "  `" + "x" * 130 + "`"]


def test_a_key_without_a_meaning_is_refused(script):
    with pytest.raises(LookupError, match=r"Silent\.count"):
        script.items(Silent, ["count"])


def test_what_stands_before_the_tables_is_kept_and_what_follows_is_made_anew(script):
    page = script.described("By hand.\n" + script.MARK + "old\n")
    assert page.startswith("By hand.\n" + script.MARK)
    assert "old\n" not in page
    assert script.described(page) == page


def test_the_page_has_every_key_and_is_current(script):
    text = README.read_text(encoding="utf-8")
    chapters = dict(re.findall(r"^### `\[+(\w+)\]+`\n(.*?)(?=^#|\Z)", text, flags=re.M | re.S))
    for key in (*valid_keys(RunConfig), *valid_keys(PeerConfig)):
        section, _, name = key.partition(".")
        assert f"\n- `{name}`" in chapters[section], key
    assert max(map(len, text.splitlines())) <= 120
    assert script.described(text) == text, "run scripts/describe_config.py"
