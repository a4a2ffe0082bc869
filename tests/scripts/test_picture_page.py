"""The pictures show the present page."""

import shutil
from pathlib import Path

import pytest

from scripts.picture_page import MAX_BYTES, PICTURES, SCHEMES, WEB, web_digest


def test_the_pictures_are_of_the_files_that_the_page_is_made_of() -> None:
    """If not: run scripts/demo --page, and meanwhile scripts/picture_page.py with its address."""
    assert (PICTURES / "page.digest").read_text() == f"{web_digest()}\n"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_picture_is_small(scheme: str) -> None:
    content = (PICTURES / f"page-{scheme}.webp").read_bytes()
    assert content[:4] == b"RIFF" and content[8:12] == b"WEBP"
    assert 10_000 < len(content) < MAX_BYTES


def test_any_change_of_the_page_changes_the_digest(tmp_path: Path) -> None:
    shutil.copytree(WEB, tmp_path / "web")
    assert web_digest(tmp_path / "web") == web_digest()
    (tmp_path / "web" / "style.css").write_bytes((WEB / "style.css").read_bytes() + b"\n")
    changed = web_digest(tmp_path / "web")
    (tmp_path / "web" / "more.js").write_bytes(b"")
    assert len({changed, web_digest(), web_digest(tmp_path / "web")}) == 3
