#!/usr/bin/env python
"""Writes the lists of configs/README.md from the classes that check configurations.

python scripts/describe_config.py          # rewrites configs/README.md
python scripts/describe_config.py --check  # exit status 1 if it is not current
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from swarm.config import PeerConfig, RunConfig
from swarm.emulation.fault_plan import KINDS, At, FaultPlan

README = Path(__file__).parents[1] / "configs" / "README.md"
MARK = "<!-- What follows is written by scripts/describe_config.py. -->\n"
WIDTH = 118
"""Characters of a line of the page."""
SHORT = 120
"""A meaning of more characters loses sentences on the page."""
SENTENCE_END = re.compile(r"(?<=\.) ")
VALUE = re.compile(r"[\w\"`]+: ")
"""The beginning of a sentence that says what one value does."""
QUOTE = '"'
TYPES = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false"}


def meanings(kind: type[BaseModel]) -> dict[str, str]:
    """The docstrings of the fields of a class and of its base classes."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not issubclass(base, BaseModel) or base is BaseModel:
            continue
        (body,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                found[field.target.id] = inspect.cleandoc(str(text.value.value)).replace("\n", " ")
    return found


def sections(kind: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel], bool]]:
    """Name and class of each section of a configuration, and whether the section is a list."""
    for name, field in kind.model_fields.items():
        annotation = field.annotation
        is_list = get_origin(annotation) is tuple
        inner = get_args(annotation)[0] if is_list else annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield name, inner, is_list


def type_of(schema: dict[str, Any]) -> list[str]:
    """The page's words for the type in a JSON schema, or the values that it allows."""
    if "anyOf" in schema:
        inner = [type_of(one) for one in schema["anyOf"] if one.get("type") != "null"]
        return list(dict.fromkeys(name for names in inner for name in names))
    if "const" in schema or "enum" in schema:
        return [f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")])]
    return [TYPES.get(schema.get("type", ""), "list")]


def value_of(kind: type[BaseModel], key: str, meaning: str) -> str:
    """The default in TOML, or the type where there is none, and values that no meaning names."""
    field = kind.model_fields[key]
    names = type_of(kind.model_json_schema()["properties"][key])
    if field.is_required() or field.default is None:
        kinds = " or ".join(names)
        return f" ({kinds}, required)" if field.is_required() else f" ({kinds})"
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    default = f"`{json.dumps(value)}`"
    others = names if names[0].startswith("`") else []
    others = [o for o in others if o != default and f"{o.strip('`').strip(QUOTE)}: " not in meaning]
    return f" = {' or '.join([default, *others])}"


def summary(meaning: str) -> str:
    """The first sentences of a meaning as far as they are short, and those about single values.

    The docstring has the rest.
    """
    first, *others = SENTENCE_END.split(meaning)
    said, is_short = first, True
    for sentence in others:
        is_value = VALUE.match(sentence) is not None
        is_short = is_short and (is_value or len(said) + len(sentence) < SHORT)
        if is_short or is_value:
            said += f" {sentence}"
    return said


def item(text: str) -> str:
    """An item of a list of the page, wrapped. A name or value in quotes stays on one line."""
    quoted = re.sub(r"`[^`]+`", lambda match: match[0].replace(" ", "\0"), f"- {text}")
    lines = textwrap.wrap(
        quoted, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines).replace("\0", " ") + "\n"


def items(kind: type[BaseModel], keys: list[str]) -> str:
    """An item of a list for each of these keys of a class.

    Raises:
        LookupError: a key has no docstring.
    """
    known = meanings(kind)
    for key in keys:
        if key not in known:
            raise LookupError(f"{kind.__name__}.{key} has no docstring")
    return "".join(
        item(f"`{key}`{value_of(kind, key, known[key])}: {summary(known[key])}") for key in keys
    )


def configuration(title: str, kind: type[BaseModel]) -> Iterator[str]:
    """The chapter about one configuration, with a list for each section."""
    yield f"\n## {title}\n"
    for name, section, is_list in sections(kind):
        head = f"[[{name}]]" if is_list else f"[{name}]"
        yield f"\n### `{head}`\n\n{first_line(section)}\n\n"
        yield items(section, list(section.model_fields))


def faults() -> Iterator[str]:
    """The chapter about plans of faults."""
    yield "\n## Plans of faults (`configs/faults`)\n\n### At the top\n\n"
    yield items(FaultPlan, [key for key in FaultPlan.model_fields if key != "fault"])
    yield f"\n### `[[fault]]`, `at`\n\n{first_line(At)}\n\n" + items(At, list(At.model_fields))
    yield "\n### `[[fault]]`, by `kind`\n\nEach kind with the keys of its own.\n\n"
    for name, kind in KINDS.items():
        keys = [key for key in kind.model_fields if key not in ("kind", "at")]
        known = meanings(kind)
        texts = [
            f"`{key}`" + (f" ({known[key].rstrip('.')})" if key in known else "") for key in keys
        ]
        own = f" {', '.join(texts)}." if texts else ""
        yield item(f"`{name}`: {first_line(kind)}{own}")


def first_line(kind: type[BaseModel]) -> str:
    """The first line of a class's docstring."""
    return (kind.__doc__ or "").strip().splitlines()[0]


def described(text: str) -> str:
    """A text of configs/README.md with its lists regenerated; the text before them is kept."""
    by_hand = text.partition(MARK)[0]
    chapters = [
        *configuration("Run files (`configs/runs`)", RunConfig),
        *configuration("Files of one machine (`configs/peers`)", PeerConfig),
        *faults(),
    ]
    return by_hand + MARK + "".join(chapters)


def main() -> int:
    """Rewrites the page, or checks whether it is current."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    arguments = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    current = described(text)
    if arguments.check:
        return int(text != current)
    README.write_text(current, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
