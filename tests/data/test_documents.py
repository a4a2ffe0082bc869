"""Cuts of texts: at most 64 KiB, at the best place, by their bytes alone."""

import io
import itertools

import pytest

from swarm.data import documents
from swarm.data.documents import MAX_DOCUMENT_BYTES, html_text, pieces

HALF = MAX_DOCUMENT_BYTES // 2


def cut(text: bytes) -> list[bytes]:
    return [piece for piece in pieces(io.BytesIO(text)) if piece]


def test_a_text_of_64_kib_is_one_document_and_one_byte_more_makes_two():
    assert cut(b"a" * MAX_DOCUMENT_BYTES) == [b"a" * MAX_DOCUMENT_BYTES]
    assert cut(b"a" * (MAX_DOCUMENT_BYTES + 1)) == [b"a" * MAX_DOCUMENT_BYTES, b"a"]


@pytest.mark.parametrize("mark", [b"\n\n", b"\r\n\r\n", b"\n", b" "])
def test_a_text_is_cut_behind_the_last_break_of_the_best_kind(mark):
    worse = {b"\n\n": b"\n", b"\r\n\r\n": b"\n", b"\n": b" ", b" ": b"x"}[mark]
    head = b"a" * HALF + mark + b"b" * 100 + mark + b"c" * 100 + worse + b"d" * 100
    first, second = cut(head + b"e" * MAX_DOCUMENT_BYTES)[:2]
    assert first.endswith(b"b" * 100 + mark) and second.startswith(b"c")


def test_a_break_in_the_first_half_does_not_count():
    first, *_ = cut(b"a" * 100 + b"\n\n" + b"b" * MAX_DOCUMENT_BYTES)
    assert len(first) == MAX_DOCUMENT_BYTES


@pytest.mark.parametrize("shift", range(4))
def test_no_character_is_cut(shift):
    text = ("x" * shift + "\N{GRINNING FACE}" * MAX_DOCUMENT_BYTES).encode()
    found = cut(text)
    assert b"".join(found) == text
    assert all(piece.decode() for piece in found)
    assert all(len(piece) > MAX_DOCUMENT_BYTES - 4 for piece in found[:-1])


@pytest.mark.parametrize("read_bytes", [1000, MAX_DOCUMENT_BYTES, 2**20])
def test_cuts_do_not_depend_on_how_a_file_is_read(monkeypatch, read_bytes):
    text = b"".join(b"%d\n" % (n * n) + b"\n" * (n % 97 == 0) for n in range(50_000))
    expected = cut(text)
    monkeypatch.setattr(documents, "_READ_BYTES", read_bytes)
    assert cut(text) == expected
    assert b"".join(expected) == text and len(expected) > 5


class Endless(io.RawIOBase):
    """A file without an end."""

    def read(self, size: int = -1) -> bytes:
        assert 0 < size <= 2**20
        return b"one line of text\n" * (size // 17)


def test_a_file_is_read_as_its_documents_are_taken():
    found = list(itertools.islice(pieces(Endless()), 100))
    assert all(HALF < len(piece) <= MAX_DOCUMENT_BYTES for piece in found)


pytest.importorskip("justhtml", reason="the extra data is not installed")


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<p>H<sub>2</sub>O  is <b>wa</b>ter </p>\n<p>two", "H2O is water\n\ntwo"),
        ("<title>T</title><h1>Head</h1>a<br>b &amp; &lt;c&gt;", "T\n\nHead\n\na\nb & <c>"),
        ("<ul><li>a<li>b</ul><div><div>c</div></div>d", "a\nb\nc\nd"),
        ("<table><tr><td>1<td>2</tr><tr><td> 3 </td> <td>4</table>", "1\t2\n3\t4"),
        ("a<pre>\nx\n  y</pre>z", "a\nx\n  y\nz"),
        ("a<script>if (1 < 2) '</p>'</script><style>b{}</style><!-- c -->d", "ad"),
        ("<template>a<template>b</template>c</template>d<noscript><b>e</b></noscript>", "d"),
        ("</script></template>a <textarea><b></textarea>", "a\n<b>"),
        ("a <br> b", "a\nb"),
        ("", ""),
    ],
)
def test_a_page_gives_its_visible_text(page: str, text: str) -> None:
    assert html_text(page) == text


def test_deep_nesting_takes_no_longer_than_its_length() -> None:
    """A tree of these elements takes minutes to build."""
    assert html_text("<div>" * 50_000 + "x" + "</p>" * 1000) == "x"
