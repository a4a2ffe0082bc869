#!/usr/bin/env python
"""Writes the tables of configs/README.md from the classes that check configurations.

python scripts/describe_config.py          # rewrites configs/README.md
python scripts/describe_config.py --check  # exit status 1 if it is not current
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from swarm.config import PeerConfig, RunConfig
from swarm.emulation.fault_plan import KINDS, At, FaultPlan

README = Path(__file__).parents[1] / "configs" / "README.md"
MARK = "<!-- What follows is written by scripts/describe_config.py. -->\n"
HEAD = "| key | type | default | bounds | meaning |\n|---|---|---|---|---|\n"
NAMES = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false"}
BOUNDS = {
    "exclusiveMinimum": "> {}",
    "minimum": "≥ {}",
    "exclusiveMaximum": "< {}",
    "maximum": "≤ {}",
    "minLength": "{} character or more",
    "maxLength": "at most {} characters",
    "maxItems": "at most {}",
    "pattern": "`{}`",
}


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


def type_and_bounds(schema: dict[str, Any]) -> tuple[str, str]:
    """The table's text for the type and the bounds in a JSON schema."""
    if "anyOf" in schema:
        pairs = [type_and_bounds(one) for one in schema["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kind for kind, _ in pairs)), "; ".join(
            dict.fromkeys(bounds for _, bounds in pairs if bounds)
        )
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"`{json.dumps(value)}`" for value in values), ""
    if "prefixItems" in schema:
        pairs = [type_and_bounds(one) for one in schema["prefixItems"]]
        return f"[{', '.join(kind for kind, _ in pairs)}]", f"each {pairs[0][1]}"
    if schema.get("type") == "array":
        kind, bounds = type_and_bounds(schema["items"])
        return f"list of {kind}", bounds
    if "$ref" in schema:
        return f"table `{schema['$ref'].rpartition('/')[2].lower()}`", ""
    bounds = ", ".join(
        words.format(_number(schema[key])) for key, words in BOUNDS.items() if key in schema
    )
    return NAMES[schema["type"]], bounds


def _number(value: Any) -> str:
    if isinstance(value, int) and value >= 2**12 and value & (value - 1) == 0:
        return f"2^{value.bit_length() - 1}"
    return f"{value:,}" if isinstance(value, int | float) else str(value).replace("|", "\\|")


def default_of(kind: type[BaseModel], key: str) -> str:
    """The default in TOML, or a note that there is none."""
    field = kind.model_fields[key]
    if field.is_required():
        return "required"
    if field.default is None:
        return ""
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    return f"`{json.dumps(value)}`"


def rows(kind: type[BaseModel], keys: list[str], prefix: str = "") -> str:
    """A row of a table for each of these keys of a class.

    Raises:
        LookupError: a key has no docstring.
    """
    schema = kind.model_json_schema()["properties"]
    known = meanings(kind)
    lines = []
    for key in keys:
        if key not in known:
            raise LookupError(f"{kind.__name__}.{key} has no docstring")
        name, bounds = type_and_bounds(schema[key])
        cells = [f"`{prefix}{key}`", name, default_of(kind, key), bounds, known[key]]
        lines.append("| " + " | ".join(cells) + " |\n")
    return "".join(lines)


def configuration(title: str, kind: type[BaseModel]) -> Iterator[str]:
    """The chapter about one configuration, with a table for each section."""
    yield f"\n## {title}\n"
    for name, section, is_list in sections(kind):
        head = f"[[{name}]]" if is_list else f"[{name}]"
        yield f"\n### `{head}`\n\n{first_line(section)}\n\n{HEAD}"
        yield rows(section, list(section.model_fields), f"{name}.")


def faults() -> Iterator[str]:
    """The chapter about plans of faults."""
    yield "\n## Plans of faults (`configs/faults`)\n\n### At the top\n\n" + HEAD
    yield rows(FaultPlan, [key for key in FaultPlan.model_fields if key != "fault"])
    yield f"\n### `[[fault]]`, `at`\n\n{first_line(At)}\n\n{HEAD}" + rows(At, list(At.model_fields))
    yield "\n### `[[fault]]`, by `kind`\n\n| kind | what happens | its own keys |\n|---|---|---|\n"
    for name, kind in KINDS.items():
        keys = [key for key in kind.model_fields if key not in ("kind", "at")]
        known = meanings(kind)
        texts = [
            f"`{key}`" + (f": {known[key].rstrip('.')}" if key in known else "") for key in keys
        ]
        yield f"| `{name}` | {first_line(kind)} | {'; '.join(texts)} |\n"


def first_line(kind: type[BaseModel]) -> str:
    """The first line of a class's docstring."""
    return (kind.__doc__ or "").strip().splitlines()[0]


def described(text: str) -> str:
    """A text of configs/README.md with new tables. The text before the tables stays."""
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
