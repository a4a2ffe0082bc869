"""Parses text into configurations. Errors say what to do about them."""

from __future__ import annotations

import copy
import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from swarm.config.peer_settings import PeerConfig
from swarm.config.run_settings import RunConfig
from swarm.config.section import explained, first_problem, key_of
from swarm.errors import ConfigError

AnyConfig = TypeVar("AnyConfig", RunConfig, PeerConfig)
COMMAND_LINE = "command line"
"""The name of overrides and flags in errors, in place of a file's name."""


def parse_config(
    kind: type[AnyConfig], text: str, *, source: str, overrides: Sequence[str] = ()
) -> AnyConfig:
    """Reads a configuration from TOML text, then applies `section.field=value` overrides.

    Args:
        kind: `RunConfig` or `PeerConfig`.
        text: TOML.
        source: what errors call the text, usually its path.
        overrides: as given with `--set`; the value is TOML, bare words are strings. If the text is
            valid without overrides, errors name `COMMAND_LINE` instead of `source`.

    Raises:
        ConfigError: names source, key, value, what is allowed and the nearest valid key.
    """
    try:
        in_file = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{source}: not valid TOML: {error}") from error
    values = copy.deepcopy(in_file)
    for override in overrides:
        _apply(values, override)
    try:
        return validate_config(kind, values, source=source)
    except ConfigError:
        if overrides and _is_sound(kind, in_file):  # so the file is not to blame
            source = COMMAND_LINE
        return validate_config(kind, values, source=source)


def validate_config(kind: type[AnyConfig], values: Mapping[str, Any], *, source: str) -> AnyConfig:
    """Builds a configuration from plain values; see `parse_config` for the errors."""
    try:
        return _built(kind, values)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_explain(kind, error)}") from error


def _built(kind: type[AnyConfig], values: Mapping[str, Any]) -> AnyConfig:
    # As JSON, so that a list may stand for a tuple while everything else is strict. A date
    # becomes a string, which only a name may be.
    return kind.model_validate_json(json.dumps(values, default=str))


def _is_sound(kind: type[AnyConfig], values: Mapping[str, Any]) -> bool:
    try:
        _built(kind, values)
    except ValidationError:
        return False
    return True


def parse_override(override: str) -> tuple[str, str, Any]:
    """Section, field and value of `section.field=value`, where the value is TOML or a bare word.

    Raises:
        ConfigError: the text is not of this form.
    """
    key, equals, raw = override.partition("=")
    path = key.strip().replace("-", "_").split(".")
    if not equals or len(path) != 2 or not all(path):
        raise ConfigError(f"--set {override!r}: expected section.field=value, as run.rounds=8")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw.strip()
    return path[0], path[1], value


def _apply(values: dict[str, Any], override: str) -> None:
    name, field, value = parse_override(override)
    section = values.setdefault(name, {})
    if not isinstance(section, dict):
        raise ConfigError(f"--set {override!r}: {name} is a list, which only the file can set")
    section[field] = value


def _explain(kind: type[BaseModel], error: ValidationError) -> str:
    problem = first_problem(error)
    path = [part for part in problem["loc"] if isinstance(part, str)]
    key = key_of(problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key}{_nearest(kind, path)}"
    contents = _contents(kind, path) if problem["type"] == "missing" else ""
    return explained(key, problem) + contents


def valid_keys(kind: type[BaseModel], prefix: str = "") -> list[str]:
    """All `section.field` keys of a configuration, in the order of their definition."""
    keys = []
    for name, field in kind.model_fields.items():
        annotation = field.annotation
        if get_origin(annotation) is tuple and get_args(annotation):
            annotation = get_args(annotation)[0]
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            keys += valid_keys(annotation, f"{prefix}{name}.")
        else:
            keys.append(f"{prefix}{name}")
    return keys


def _nearest(kind: type[BaseModel], path: list[str]) -> str:
    keys = valid_keys(kind)
    if len(path) == 1:
        sections = list(kind.model_fields)
        close = difflib.get_close_matches(path[0], sections, n=1)
        return f"; did you mean {close[0]}?" if close else f"; valid keys: {', '.join(sections)}"
    by_field = {key.rsplit(".", 1)[-1]: key for key in reversed(keys)}
    close = [by_field[path[-1]]] if path[-1] in by_field else []
    close += difflib.get_close_matches(".".join(path), keys, n=1, cutoff=0.5)
    close += [by_field[name] for name in difflib.get_close_matches(path[-1], by_field, n=1)]
    if close:
        return f"; did you mean {close[0]}?"
    siblings = [key for key in keys if key.startswith(f"{path[0]}.")]
    return f"; valid keys: {', '.join(siblings)}"


def _contents(kind: type[BaseModel], path: list[str]) -> str:
    fields = [key for key in valid_keys(kind) if key.startswith(".".join(path) + ".")]
    return f"; it has {', '.join(fields)}" if fields else ""
