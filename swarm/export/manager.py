"""The exports of a run in one folder: adds exports, links `latest` to the newest, removes old ones.

Each export is a folder with all files for Transformers, the hub and a reader.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from swarm import durable
from swarm.data.tokenizer import readable_json, write_json
from swarm.errors import ConfigError, StateError, StateLocked
from swarm.export.card import CARD_FILE, CURVE_FILE, card, curve
from swarm.export.facts import ExportFacts
from swarm.model.huggingface import save_model
from swarm.protocol.values.manifest import Digest

FACTS_FILE = "swarm_export.json"
GENERATION_FILE = "generation_config.json"

Extra = Callable[[Path, ExportFacts], None]
"""A further step on an export's folder, for example one that adds files after all others."""


def nothing_more(folder: Path, facts: ExportFacts) -> None:
    """An `Extra` that adds nothing."""


def write_export(folder: Path, facts: ExportFacts, extras: Sequence[Extra] = ()) -> None:
    """Writes one agreed model into a folder: weights, configuration, tokenizer and model card.

    The tokenizer's files set `split_special_tokens`, so text that spells a special token stays
    text. Takes memory for two shards.

    Args:
        folder: folder to write, made if missing. Files of an earlier export are replaced.
        facts: the model and its facts.
        extras: further writers, in this order.

    Raises:
        CorruptState: a blob of the model is missing.
        BadBlob: a blob does not have the size of its unit.
        OSError: the disk refused.
    """
    model, form = facts.model, facts.form
    run, tokenizer = model.run, model.tokenizer()
    save_model(
        folder,
        run,
        model.tensors(),
        eos_token_id=tokenizer.end_of_text,
        max_shard_bytes=form.max_shard_bytes,
        dtype=form.dtype,
    )
    write_json(folder / GENERATION_FILE, generation_config(tokenizer.end_of_text))
    tokenizer.save(folder, model_max_length=run.data.sequence_length)
    write_facts(folder, facts)
    for extra in extras:
        extra(folder, facts)
    sync_tree(folder)


def write_facts(folder: Path, facts: ExportFacts) -> None:
    """Writes the facts of an export, for people and for programs. Raises OSError."""
    durable.write_file(folder / FACTS_FILE, readable_json(facts.as_json()).encode())
    picture = folder / CURVE_FILE
    if facts.losses:
        drawn = curve(facts.losses, "held-out loss, nats per token")
        durable.write_file(picture, drawn.encode())
    else:
        picture.unlink(missing_ok=True)
    durable.write_file(folder / CARD_FILE, card(facts).encode())


def generation_config(end_of_text: int) -> dict[str, Any]:
    """The contents of generation_config.json: the end-of-text token and the padding token.

    Source: Transformers 5.23 `GenerationConfig`; missing settings have their defaults, which mean
        greedy decoding.
    """
    return {"bos_token_id": None, "eos_token_id": end_of_text, "pad_token_id": end_of_text}


def sync_tree(folder: Path) -> None:
    """Makes all files below a folder and their names durable. Raises OSError."""
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            durable.sync_folder(path)
        elif not path.is_symlink():
            durable.sync_file(path)
    durable.sync_folder(folder)


LATEST = "latest"
PARTIAL, REMOVED, NEW_LINK = ".partial-", ".removed-", ".latest.new"
BLOBS = ".blobs"
"""Folder of the blobs of the newest export, so that the next export fetches only changed blobs."""
_NAME = re.compile(r"^round-(\d{6,12})$")


@dataclass(frozen=True)
class Kept:
    """An existing export."""

    path: Path
    round: int
    manifest: Digest


def take_folder(lock: int, folder: Path, option: str) -> None:
    """Locks a folder against other exporters as long as a descriptor is open.

    Args:
        lock: the descriptor, which is of the folder or of a file in it.
        folder: the folder as the person named it.
        option: the option that named the folder.

    Raises:
        StateLocked: another process has locked the folder.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise StateLocked(
            f"{folder}: another swarm-export writes into it",
            hint=f"end it, or name another {option}",
        ) from error


class ExportManager:
    """See the module. Only one process at a time can open the folder."""

    def __init__(self, folder: Path, keep: int) -> None:
        """Opens the folder, and removes unfinished work of a killed process.

        Args:
            folder: folder of the exports, made if missing. Other files in it stay.
            keep: number of exports to keep, at least 1.

        Raises:
            StateLocked: another process has the folder open.
            StateError: the disk refused.
            ConfigError: another file is called `latest`.
        """
        assert keep >= 1
        self.folder, self._keep = folder, keep
        try:
            durable.make_folder(folder)
            self._lock: IO[str] = (folder / ".lock").open("a+")
        except OSError as error:
            raise StateError(f"{folder}: {error.strerror}", hint="name another folder") from error
        try:
            self._take()
            self._tidy()
        except BaseException:
            self._lock.close()
            raise

    def _take(self) -> None:
        take_folder(self._lock.fileno(), self.folder, "--output-dir")
        link = self.folder / LATEST
        if link.exists() and not link.is_symlink():
            raise ConfigError(f"{link} exists and is no link", hint="name another --output-dir")

    def close(self) -> None:
        """Unlocks the folder."""
        self._lock.close()

    @property
    def exports(self) -> list[Kept]:
        """The whole exports, by ascending round. Folders without facts are no exports."""
        found = (self._kept(path) for path in self.folder.iterdir())
        return sorted((one for one in found if one), key=lambda one: one.round)

    def _kept(self, path: Path) -> Kept | None:
        match = _NAME.match(path.name)
        facts = _facts_of(path) if match else None
        return Kept(path, int(match[1]), str(facts.get("manifest"))) if match and facts else None

    def require_run(self, run_id: str) -> None:
        """Refuses a folder with the exports of another run.

        Raises:
            ConfigError: names both runs.
        """
        for one in self.exports:
            other = (_facts_of(one.path) or {}).get("run_id")
            if other != run_id:
                raise ConfigError(
                    f"{one.path} is of the run {other}, not of {run_id}",
                    hint="name another --output-dir",
                )

    def add(self, round_number: int, write: Callable[[Path], None]) -> Path:
        """Puts an export in its place, links `latest` to it, and removes old ones.

        Args:
            round_number: round of the model, later than that of every existing export.
            write: fills an empty folder. If it raises, nothing of the new export stays.

        Raises:
            OSError: the disk refused. The existing exports do not change.
            StateError: another file has the export's name.
        """
        path = self.folder / f"round-{round_number:06d}"
        if path.exists():
            raise StateError(f"{path} already exists", hint="move it away, and start again")
        partial = self.folder / f"{PARTIAL}{path.name}"
        try:
            partial.mkdir()
            write(partial)
            sync_tree(partial)
            partial.rename(path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        durable.sync_folder(self.folder)
        self._link(path)
        self._remove_old()
        return path

    def _link(self, path: Path) -> None:
        new = self.folder / NEW_LINK
        new.unlink(missing_ok=True)
        new.symlink_to(path.name)
        new.replace(self.folder / LATEST)
        durable.sync_folder(self.folder)

    def _remove_old(self) -> None:
        """Removes all but the newest `keep` exports. `latest` links to the newest."""
        for one in self.exports[: -self._keep]:
            gone = self.folder / f"{REMOVED}{one.path.name}"
            one.path.rename(gone)
            durable.sync_folder(self.folder)
            shutil.rmtree(gone)

    def _linked(self) -> str | None:
        link = self.folder / LATEST
        return os.readlink(link) if link.is_symlink() else None

    def _tidy(self) -> None:
        try:
            for path in list(self.folder.iterdir()):
                if path.name.startswith((PARTIAL, REMOVED)):
                    shutil.rmtree(path)
            (self.folder / NEW_LINK).unlink(missing_ok=True)
            exports = self.exports
            if exports and self._linked() != exports[-1].path.name:
                self._link(exports[-1].path)
            self._remove_old()
        except OSError as error:
            raise StateError(f"{self.folder}: {error.strerror}") from error


def _facts_of(path: Path) -> dict[str, Any] | None:
    try:
        facts = json.loads((path / FACTS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None
