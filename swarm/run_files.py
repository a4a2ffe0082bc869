"""Files that come with swarm, in a clone and in a wheel: configurations by name, and pages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from swarm.errors import ConfigError

Kind = Literal["runs", "peers", "faults"]
_HERE = Path(__file__).parent / "configs"
PAGES = Path(__file__).parents[1]
"""Folder of the pages, which are named by their path below it, such as `peers/README.md`."""


def named_pages(text: str) -> list[Path]:
    """The paths of the pages that a text for people names."""
    return [PAGES / name for name in re.findall(r"[\w/]+\.md\b", text)]


def find_file(given: Path, kind: Kind) -> Path:
    """The file that a person means: the file at this path, or else the file with this name.

    Args:
        given: a path, or a name without folder and ending such as `demo`.
        kind: what the file configures: a run, a peer, or faults.

    Returns:
        `given` itself if no file that comes with swarm has this name.
    """
    is_name = given.name == str(given) and not given.suffix
    if not is_name or (given.exists() and not given.is_dir()):
        return given
    return next((path for path in _files(kind) if path.stem == given.name), given)


def read_text(path: Path, kind: Kind | None = None) -> str:
    """The text of a file that a person named.

    Args:
        path: path of the file.
        kind: kind of the file, if the person may give only its name. The error then lists the
            names.

    Raises:
        ConfigError: the file cannot be read. The message names the file, and a file in its folder
            with a similar name.
    """
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", hint=_similar(path, kind)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file") from error


def _similar(path: Path, kind: Kind | None) -> str:
    if kind and path.name == str(path) and not path.suffix:
        return f"by name there are {', '.join(sorted(file.stem for file in _files(kind)))}"
    beside = sorted(p.name for p in path.parent.glob(f"*{path.suffix}") if p.is_file())
    close = difflib.get_close_matches(path.name, beside, n=1)
    is_other = close and close[0] != path.name
    return f"did you mean {path.parent / close[0]}?" if is_other else ""


def _files(kind: Kind) -> Iterator[Path]:
    return (_HERE / kind).glob("*.toml")
