"""The text of HTML pages is what a reader sees, in lines and paragraphs."""

import pytest

from swarm.data.html_text import html_text

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
