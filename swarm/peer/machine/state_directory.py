"""The files of a peer on this machine, and settings kept for later starts."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pydantic import TypeAdapter

from swarm import durable, errors
from swarm.config import PeerConfig, RunConfig, validate_config
from swarm.network.rounds.record_file import with_digest, without_digest
from swarm.network.wire.address_book import Remembered, freshest
from swarm.protocol.records.life_events import UNCHANGED, abridged
from swarm.protocol.training import SavedWork
from swarm.protocol.values.invitation import Credential, credential_bytes, credential_of
from swarm.protocol.values.manifest import IS_RUN_ID, Digest, Manifest, PeerId, decode_manifest

logger = logging.getLogger(__name__)

IDENTITY_FILE = "identity.key"
SETTINGS_FILE = "settings"
MAX_KNOWN_PEERS = 64
MAX_ENTERED_BY = 64
MAX_EVENTS_BYTES = 128 * 2**20
"""Limit of an events file; one older file of about this size is kept. A round has 1 to 2 kB of
events, and a quarter of an hour has 15 kB."""
MUCH_BYTES = 10**9
"""The log names earlier runs once all of them together have this size."""
_clock = time.time
"""The clock of events. A drill gives one peer a wrong clock by replacing `time.time` after `_clock`
is bound. So the times of events stay right, and events of several peers can be compared."""


_OFFER: TypeAdapter[SavedWork] = TypeAdapter(SavedWork)
_IS_DIGEST = re.compile("[0-9a-f]{64}")
_IS_HEX = re.compile("[0-9a-f]+")


@dataclass(frozen=True)
class RunDirectory:
    """The files of one run. Only one object may append to its events."""

    path: Path
    _applied: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """Fields of the newest `applied` line in the file; the next line omits equal ones."""

    @property
    def config_path(self) -> Path:
        """Canonical JSON of the run configuration."""
        return self.path / "config.json"

    @property
    def record_path(self) -> Path:
        """The round protocol's record."""
        return self.path / "record"

    def record_age_s(self) -> float:
        """Seconds since the record was last written, by the wall clock; the tip is no newer."""
        try:
            return max(0.0, time.time() - self.record_path.stat().st_mtime)
        except FileNotFoundError:
            return 0.0

    @property
    def private_path(self) -> Path:
        """The engine's private state."""
        return self.path / "private"

    @property
    def offer_path(self) -> Path:
        """The submitted offer, if the private state is older."""
        return self.path / "offer"

    def read_offer(self) -> SavedWork | None:
        """The newest offer that was saved without private state; None if there is none.

        Raises:
            CorruptState: the offer cannot be read.
        """
        try:
            content = without_digest(self.offer_path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise errors.CorruptState(f"{self.offer_path} cannot be read: {error}") from error
        if content is None:
            raise errors.CorruptState(f"{self.offer_path} is damaged")
        return _OFFER.validate_json(content)

    def write_offer(self, work: SavedWork) -> None:
        """Saves an offer, which is durable when this returns.

        Raises:
            StateError: the disk is full or cannot be written.
        """
        try:
            durable.write_file(self.offer_path, with_digest(_OFFER.dump_json(work)))
        except OSError as error:
            raise errors.StateError(f"{self.offer_path}: cannot be written: {error}") from error

    @property
    def events_path(self) -> Path:
        """One JSON object a line, appended for every round."""
        return self.path / "events.jsonl"

    def read_config(self) -> RunConfig:
        """The run's configuration.

        Raises:
            StateError: it belongs to another user; CorruptState: missing or damaged.
        """
        path = self.config_path
        try:
            return validate_config(RunConfig, json.loads(path.read_bytes()), source=str(path))
        except errors.ConfigError as error:
            raise errors.CorruptState(str(error)) from error
        except (OSError, ValueError) as error:
            raise errors.unreadable(path, error) from error

    def write_config(self, run: RunConfig) -> None:
        """Saves the run's configuration, in the form that every peer derives."""
        durable.make_folder(self.path)
        durable.write_file(self.config_path, run.canonical_json())

    def read_founding(self) -> Manifest:
        """Manifest 0; raises as `read_config`."""
        try:
            return decode_manifest((self.path / "founding").read_bytes())
        except (OSError, errors.BadManifest) as error:
            raise errors.unreadable(self.path / "founding", error) from error

    def write_founding(self, manifest: Manifest) -> None:
        """Saves manifest 0, from which the run id is computed."""
        durable.write_file(self.path / "founding", manifest.encoded)

    def read_text_folder(self) -> str | None:
        """The absolute path of the folder with the run's text; None if there is none."""
        try:
            return os.fsdecode((self.path / "text").read_bytes()) or None
        except FileNotFoundError:
            return None

    def write_text_folder(self, folder: str | None) -> None:
        """Saves the path of the folder with the run's text."""
        durable.write_file(self.path / "text", os.fsencode(folder or ""))

    def read_credential(self) -> Credential | None:
        """The credential with which this peer joined the run; None without one or if damaged."""
        return credential_of(_read_text(self.path / "credential").encode())

    def write_credential(self, credential: Credential) -> None:
        """Saves the credential with which this peer joined."""
        content = credential_bytes(credential)
        durable.write_file(self.path / "credential", content, mode=0o600)

    def read_vouched(self) -> Digest | None:
        """The head for which a person vouched when this peer joined; None without one."""
        digest = _read_text(self.path / "vouched").strip()
        return digest if _IS_DIGEST.fullmatch(digest) else None

    def write_vouched(self, digest: Digest) -> None:
        """Saves the head for which a person vouches."""
        durable.write_file(self.path / "vouched", f"{digest}\n".encode())

    def read_entered_by(self) -> tuple[PeerId, ...]:
        """Peers at given addresses through which this peer entered the run; newest first.

        Their addresses may still belong to the run long after these peers have left it.
        """
        return tuple(_read_text(self.path / "entered_by").split()[:MAX_ENTERED_BY])

    def add_entered_by(self, peers: Iterable[PeerId]) -> None:
        """Saves peers through which this peer entered the run, the newest `MAX_ENTERED_BY`."""
        before = self.read_entered_by()
        kept = tuple(dict.fromkeys([*peers, *before]))[:MAX_ENTERED_BY]
        if kept != before:
            durable.make_folder(self.path)
            durable.write_file(self.path / "entered_by", "".join(f"{p}\n" for p in kept).encode())

    def append_event(self, kind: str, /, **fields: Any) -> None:
        """Appends one line to the run's events, even after a line that a kill cut short.

        An `applied` line is `abridged`, except the first of a file, which must be complete.

        Raises:
            OSError: the disk refused the write.
        """
        is_applied = kind == "applied"
        written = abridged(fields, self._applied) if is_applied else fields
        line = json.dumps({"event": kind, "time": round(_clock(), 3), **written})
        content = line.encode() + b"\n"
        if durable.append_lines(self.events_path, content, most_bytes=MAX_EVENTS_BYTES):
            self._applied.clear()
        elif is_applied:
            self._applied.update({name: fields[name] for name in UNCHANGED if name in fields})


class StateDirectory:
    """A peer's directory, locked against a second process until `close`."""

    def __init__(self, path: Path) -> None:
        """Opens (or makes) the directory and locks it.

        Raises:
            StateLocked: another living process uses the directory.
            StateError: the directory cannot be made or written.
        """
        self.path = path.expanduser()
        try:
            durable.make_folder(self.path, mode=0o700)
            self._lock: IO[str] = (self.path / "lock").open("a+")
        except OSError as error:
            why = f"--state-dir {self.path}: {error.strerror}"
            raise errors.no_access(error) or errors.StateError(why) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise errors.StateLocked(
                f"--state-dir {self.path} is in use by another process",
                hint="give every peer on a machine its own --state-dir",
            ) from error

    @classmethod
    def unlocked(cls, path: Path) -> StateDirectory:
        """The directory for reading only: nothing is created, and another process may use it."""
        state = cls.__new__(cls)
        state.path = path.expanduser()
        return state

    def close(self) -> None:
        """Releases the directory."""
        self._lock.close()

    @property
    def identity_path(self) -> Path:
        """The peer's key."""
        return self.path / IDENTITY_FILE

    @property
    def data_path(self) -> Path:
        """Folder of cached tokens."""
        return self.path / "data"

    @property
    def port(self) -> int | None:
        """The port of the first start; None, with a warning, if the file has no valid port."""
        text = _read_text(self.path / "port").strip()
        if re.fullmatch("[0-9]{1,5}", text) and 0 < int(text) < 2**16:
            return int(text)
        if text:
            logger.warning("%s holds no port: a free one is taken", self.path / "port")
        return None

    @port.setter
    def port(self, port: int) -> None:
        durable.write_file(self.path / "port", f"{port}\n".encode())

    @property
    def known_peers(self) -> tuple[Remembered, ...]:
        """Addresses of peers, the last to answer first; invalid lines are skipped."""
        lines = (line.split() for line in _read_text(self.path / "known_peers").splitlines())
        return tuple(
            Remembered(words[0], float(words[1]) if len(words) > 1 else 0.0)
            for words in lines
            if len(words) == 1 or (len(words) == 2 and words[1].isdigit())
        )

    @known_peers.setter
    def known_peers(self, addresses: Iterable[Remembered]) -> None:
        kept = freshest(addresses, limit=MAX_KNOWN_PEERS)
        lines = (f"{text} {answered_at:.0f}\n" for text, answered_at in kept)
        durable.write_file(self.path / "known_peers", "".join(lines).encode())

    @property
    def settings_path(self) -> Path:
        """The file of settings that later starts need not repeat."""
        return self.path / SETTINGS_FILE

    @property
    def line_path(self) -> Path:
        """The saved measurement of the link; see `link_monitor`."""
        return self.path / "line"

    @property
    def run_ids(self) -> tuple[str, ...]:
        """The runs that this peer has a record of, sorted."""
        return _runs_in(self.path)

    @property
    def current_run(self) -> str | None:
        """Id of the run that this peer was in last, or was joining, possibly without a record.

        If that id is lost: the id of the only run here.
        """
        return _current_run(self.path)

    @current_run.setter
    def current_run(self, run_id: str) -> None:
        durable.write_file(self.path / "current_run", f"{run_id}\n".encode())

    def name_earlier_runs(self) -> None:
        """Logs the size of earlier runs if it is large; only a person removes them."""
        current = self.current_run
        folders = [self.run(run).path for run in self.run_ids if run != current]
        taken = {folder: durable.bytes_on_disk(folder) for folder in folders}
        if (together := sum(taken.values())) >= MUCH_BYTES:
            logger.info(
                "earlier runs take %.1f GB: %s; remove the folders of those that you do not need",
                together / 1e9,
                ", ".join(f"{folder} {size / 1e9:.1f} GB" for folder, size in taken.items()),
            )

    @property
    def last_run(self) -> str | None:
        """The run whose state can be read: the current one, unless this peer still joins it."""
        return _last_run(self.path)

    def read_gathering(self) -> tuple[str, str] | None:
        """Name and private key of the run that this peer is about to found, if there is one."""
        words = _read_text(self.path / "gathering").split()
        is_whole = len(words) == 2 and all(map(_IS_HEX.fullmatch, words)) and len(words[1]) == 64
        return (words[0], words[1]) if is_whole else None

    def write_gathering(self, name: str, secret: str) -> None:
        """Saves name and key until the run is founded."""
        durable.write_file(self.path / "gathering", f"{name} {secret}\n".encode(), mode=0o600)

    def end_gathering(self) -> None:
        """Removes name and key once the run is founded, since its peers no longer need the key."""
        (self.path / "gathering").unlink(missing_ok=True)

    def run(self, run_id: str) -> RunDirectory:
        """The directory of one run.

        Raises:
            StateError: this is no run id, and as a path it could lead out of this directory.
        """
        return _run_directory(self.path, run_id)


def current_run_of(path: Path, run_id: str | None) -> tuple[str, RunDirectory]:
    """The run of a state directory that another process may use; nothing is written.

    Args:
        path: the state directory.
        run_id: id of the wanted run. None for the run that the peer was in last.

    Raises:
        StateError: there is no such run.
    """
    chosen = run_id or _last_run(path)
    if chosen is None:
        here = ", ".join(_runs_in(path))
        raise errors.StateError(
            f"--state-dir {path} knows of no run" if not here else f"--state-dir {path} has {here}",
            hint="name one with --run-id" if here else "name the --state-dir of a peer of the run",
        )
    return chosen, _run_directory(path, chosen)


def _current_run(path: Path) -> str | None:
    run_id = _read_text(path / "current_run").strip()
    if IS_RUN_ID.fullmatch(run_id):
        return run_id
    here = _runs_in(path)
    return here[0] if len(here) == 1 else None


def _last_run(path: Path) -> str | None:
    current, here = _current_run(path), _runs_in(path)
    return current if current in here or len(here) != 1 else here[0]


def _runs_in(path: Path) -> tuple[str, ...]:
    found = (folder.parent.name for folder in path.glob("runs/*/record"))
    return tuple(sorted(name for name in found if IS_RUN_ID.fullmatch(name)))


def _run_directory(path: Path, run_id: str) -> RunDirectory:
    if not IS_RUN_ID.fullmatch(run_id):
        raise errors.StateError(
            f"{run_id[:80]!r} is no run id",
            hint="a run id is a name of letters, digits and _.-, then - and 16 hex digits",
        )
    return RunDirectory(path / "runs" / run_id)


def _read_text(path: Path) -> str:
    """The file's text, with marks in place of invalid bytes; "" if there is no file."""
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""


KEPT = (
    ("peer", "name"),
    ("network", "identity_path"),
    ("network", "host_maddrs"),
    ("network", "announce_maddrs"),
    ("network", "client_mode"),
    ("network", "direct_port"),
    ("network", "max_upload_mbit"),
    ("network", "max_download_mbit"),
    ("network", "data_quota_gb"),
)
"""Section and field of the kept settings: this peer's identity, its addresses, and the limits of
its link. To forget these at a later start would be costly."""
_KEY = "network.identity_path"


def with_kept(config: PeerConfig, path: Path) -> PeerConfig:
    """The configuration, completed with settings of an earlier start.

    One log line names the settings of earlier starts.

    Args:
        config: configuration of this start.
        path: the file of kept settings, which is not changed; a damaged one is ignored with a
            warning.
    """
    given, kept = _given(config), _kept(config, path)
    values = config.model_dump(exclude_unset=True)
    for key, value in {**kept, **given}.items():
        section, _, field = key.partition(".")
        values.setdefault(section, {})[field] = value
    try:
        whole = validate_config(PeerConfig, values, source=str(path))
    except errors.ConfigError as error:
        logger.warning("kept settings are ignored: %s", error)
        return config
    if earlier := {key: value for key, value in kept.items() if key not in given}:
        said = ", ".join(f"{key}={json.dumps(value)}" for key, value in sorted(earlier.items()))
        logger.info("settings kept from an earlier start: %s", said)
    return whole


def keep(config: PeerConfig, path: Path) -> None:
    """Keeps this start's settings for later starts, once the network has started with them.

    Args:
        config: configuration of this start, without kept settings.
        path: the file of kept settings.
    """
    given = _given(config)
    values = {**_kept(config, path), **given}
    if given and values != _read(path):
        durable.write_file(path, json.dumps(values).encode())


def _given(config: PeerConfig) -> dict[str, object]:
    given = {
        f"{section}.{field}": getattr(getattr(config, section), field)
        for section, field in KEPT
        if field in getattr(config, section).model_fields_set
    }
    if path_of_key := given.get(_KEY):  # a later start may run in another folder
        given[_KEY] = str(Path(path_of_key).expanduser().absolute())
    return given


def _kept(config: PeerConfig, path: Path) -> dict[str, object]:
    """The kept settings. A listening address given now overrides an earlier client mode."""
    listens = "host_maddrs" in config.network.model_fields_set
    before = _read(path)
    return {k: v for k, v in before.items() if not (listens and k == "network.client_mode")}


def identity_path_of(folder: Path, given: str | None) -> Path:
    """The path of a peer's key: given now, given to an earlier start, or the default.

    Args:
        folder: the state directory; nothing is written.
        given: the path that a person named now, if any.
    """
    path = given or _read(folder / SETTINGS_FILE).get(_KEY)
    return Path(path).expanduser() if isinstance(path, str) else folder / IDENTITY_FILE


def credential_to(
    run: RunConfig, given: Credential | None, directory: RunDirectory
) -> Credential | None:
    """The credential for joining: the given one, or the saved one if an invitation is needed."""
    is_open = run.run.admission == "open"
    return given or (None if is_open else directory.read_credential())


def kept_credential(given: Credential | None, directory: RunDirectory) -> Credential | None:
    """The given credential of this peer, which is then saved, or else the saved credential [R8].

    The invitation's private key is no longer needed, and is not stored.
    """
    if given is None:
        return directory.read_credential()
    directory.write_credential(given)
    return given


def _read(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("kept settings are ignored: %s: %s", path, error)
        return {}
    names = {f"{section}.{field}" for section, field in KEPT}
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if key in names}
