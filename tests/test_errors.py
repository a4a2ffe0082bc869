"""The tree of errors: distinct exit codes, and a correct drawing."""

import inspect
import re

import pytest

from swarm import errors
from swarm.config import RunConfig, parse_config


def kinds(root: type[errors.SwarmError] = errors.SwarmError) -> list[type[errors.SwarmError]]:
    below = [kind for child in root.__subclasses__() for kind in kinds(child)]
    ours = [kind for kind in below if kind.__module__ == errors.__name__]
    return [root, *ours]


def test_each_branch_has_its_own_exit_code_and_its_leaves_share_it() -> None:
    branches = [kind for kind in kinds() if kind.__base__ is errors.SwarmError]
    codes = [kind.exit_code for kind in branches]
    assert len(set(codes)) == len(codes)
    # 0 is success, 1 any other error, 2 also click's own. Shells use 126 and up.
    assert all(2 <= code < 126 for code in codes)
    for branch in branches:
        assert {kind.exit_code for kind in kinds(branch)} == {branch.exit_code}


def test_the_drawing_names_every_error_with_its_exit_code() -> None:
    drawn = inspect.getdoc(errors) or ""
    for kind in kinds():
        line = next((n for n in drawn.splitlines() if re.search(rf"\b{kind.__name__}\b", n)), "")
        assert line, kind.__name__
        code = re.search(r"\((\d+)\)", line)
        if code:
            assert int(code[1]) == kind.exit_code, kind.__name__


def test_an_error_says_what_to_do_next() -> None:
    assert str(errors.ConfigError("x is wrong")) == "x is wrong"
    assert str(errors.ConfigError("x is wrong", hint="use y")) == "x is wrong (use y)"


def test_what_an_error_quotes_is_shortened_and_the_rest_stays() -> None:
    path = "/" + "/".join(["folder"] * 50)
    for value in ("[" * 9000, "[ " * 9000):
        text = str(errors.ConfigError(f"{path}: name = {value}: too long", hint="shorten it"))
        assert len(text) < 2100 and text.startswith(f"{path}: name = [")
        assert text.endswith(": too long (shorten it)") and "characters) …" in text
    shown = f"a {'b' * 120}… (161 characters) …{'b' * 120} c"
    assert errors.shortened(f"a {'b' * 401} c") == shown
    assert errors.shortened("b" * 400) == "b" * 400


def test_a_configuration_with_a_name_of_brackets_gives_a_line_that_people_read() -> None:
    with pytest.raises(errors.ConfigError) as refused:
        parse_config(RunConfig, f"[run]\nname = '{'[' * 9000}'", source="file")
    assert len(str(refused.value)) < 1000 and "run.name" in str(refused.value)


@pytest.mark.parametrize("kind", kinds(errors.HostileInput))
def test_refused_input_has_the_word_it_is_counted_under(kind: type[errors.HostileInput]) -> None:
    refused = kind("size", "12 bytes")
    assert refused.reason == "size" and str(refused) == "12 bytes"
