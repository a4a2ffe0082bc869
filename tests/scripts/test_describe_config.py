"""The page on settings agrees with the classes that check them."""

import importlib.util
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


class Silent(Section):
    """A section with an undocumented key."""

    count: int = 1


def test_a_row_says_type_default_bounds_and_meaning(script):
    assert script.rows(Sample, ["count", "kind"], "sample.") == (
        "| `sample.count` | integer | `3` | > 0, ≤ 2^20 | How many. |\n"
        '| `sample.kind` | `"a"` or `"b"` |  |  | Which of them. |\n'
    )


def test_a_key_without_a_meaning_is_refused(script):
    with pytest.raises(LookupError, match=r"Silent\.count"):
        script.rows(Silent, ["count"])


def test_what_stands_before_the_tables_is_kept_and_what_follows_is_made_anew(script):
    page = script.described("By hand.\n" + script.MARK + "old\n")
    assert page.startswith("By hand.\n" + script.MARK)
    assert "old\n" not in page
    assert script.described(page) == page


def test_the_page_has_every_key_and_is_current(script):
    text = README.read_text(encoding="utf-8")
    for key in (*valid_keys(RunConfig), *valid_keys(PeerConfig)):
        assert f"| `{key}` |" in text, key
    assert script.described(text) == text, "run scripts/describe_config.py"
