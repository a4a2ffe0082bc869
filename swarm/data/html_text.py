"""The text of an HTML page, as a browser copies it from the screen."""

from __future__ import annotations

import re

_HIDDEN = frozenset({"iframe", "noembed", "noframes", "noscript", "script", "style", "template"})
_PARAGRAPHS = frozenset({"h1", "h2", "h3", "h4", "h5", "h6", "p"})
"""A blank line stands before and after them."""
_BLOCKS = frozenset(
    re.findall(
        r"\w+",
        """address article aside blockquote body center dd details dialog dir div dl dt fieldset
        figcaption figure footer form head header hgroup hr html legend li main menu nav ol optgroup
        option pre search section summary table tbody textarea tfoot thead title tr ul""",
    )
)
_CELLS = frozenset({"td", "th"})
_KEEP_SPACE = frozenset({"pre", "textarea"})
_MARKS = ("", " ", "\t", "\n", "\n\n")
"""What sets words off, the weakest first."""
_SPACE = re.compile("[ \t\n\f\r]+")


def html_text(page: str) -> str:
    """The visible text of a page: what scripts, styles and markup say is left out.

    Takes time in proportion to the page's length, however deep its elements are nested: only tags
    are looked at, no tree is made.

    Source: HTML Standard, "the innerText getter"; all elements have their default style.

    Raises:
        ImportError: the package justhtml is not installed.
    """
    import justhtml  # optional: only folders with .html files need it

    lines = _Lines()
    for event, value in justhtml.stream(page):
        if event == "start":
            lines.begin(str(value[0]))
        elif event == "text":
            lines.text(str(value))
        elif event == "end":
            lines.end(str(value))
    return "".join(lines.written)


class _Lines:
    """The text so far, and what the next word is set off by."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self._before = ""
        """What stands before the next word: nothing, a space, a tab or line ends."""
        self._hidden = self._kept_space = 0
        """Elements around this place that are not shown, or whose spaces count."""
        self._is_first_in_pre = False

    def begin(self, tag: str) -> None:
        """An element begins."""
        self._hidden += tag in _HIDDEN
        if tag == "br":
            self._write("\n")
        elif tag in _CELLS:
            self._set_off("\t")
        else:
            self._break(tag)
        self._kept_space += tag in _KEEP_SPACE
        self._is_first_in_pre = tag in _KEEP_SPACE

    def end(self, tag: str) -> None:
        """An element ends."""
        self._hidden -= tag in _HIDDEN and self._hidden > 0
        self._kept_space -= tag in _KEEP_SPACE and self._kept_space > 0
        self._break(tag)

    def text(self, text: str) -> None:
        """A stretch of text."""
        if self._hidden:
            return
        if self._kept_space:
            # The parser of a browser leaves the line end out with which such an element begins.
            self._write(text.removeprefix("\n") if self._is_first_in_pre else text)
        else:
            for number, word in enumerate(_SPACE.split(text)):
                if number:
                    self._set_off(" ")
                self._write(word)
        self._is_first_in_pre = False

    def _break(self, tag: str) -> None:
        if tag in _PARAGRAPHS or tag in _BLOCKS:
            self._set_off("\n\n" if tag in _PARAGRAPHS else "\n")

    def _set_off(self, by: str) -> None:
        """The next word is set off at least so far; nothing is set off from the beginning."""
        at_line_start = not self.written or (by == " " and self.written[-1].endswith("\n"))
        if not at_line_start:
            self._before = max(self._before, by, key=_MARKS.index)

    def _write(self, text: str) -> None:
        if text and not self._hidden:
            before = self._before.lstrip(" ") if text == "\n" else self._before
            self.written += [before, text]
            self._before = ""
