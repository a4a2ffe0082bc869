"""Settings that a peer keeps in its state directory, so that a later start need not repeat them."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from swarm import durable
from swarm.config import PeerConfig, RunConfig, validate_config
from swarm.errors import ConfigError
from swarm.peer.state_directory import IDENTITY_FILE, SETTINGS_FILE, RunDirectory
from swarm.protocol.invitation import Credential

logger = logging.getLogger(__name__)

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
"""Section and field: who this peer is, what others know it by, where it is for them, if anywhere,
and what its line may carry, since a person who forgets that at a later start pays for it."""
_KEY = "network.identity_path"


def with_kept(config: PeerConfig, path: Path) -> PeerConfig:
    """The configuration with what an earlier start was given and this one was not.

    One line of the log says what comes from earlier.

    Args:
        config: of this start.
        path: the file of kept settings, which is not changed; a damaged one is passed over with a
            warning.
    """
    given, kept = _given(config), _kept(config, path)
    values = config.model_dump(exclude_unset=True)
    for key, value in {**kept, **given}.items():
        section, _, field = key.partition(".")
        values.setdefault(section, {})[field] = value
    try:
        whole = validate_config(PeerConfig, values, source=str(path))
    except ConfigError as error:
        logger.warning("kept settings are passed over: %s", error)
        return config
    if earlier := {key: value for key, value in kept.items() if key not in given}:
        said = ", ".join(f"{key}={json.dumps(value)}" for key, value in sorted(earlier.items()))
        logger.info("settings kept from an earlier start: %s", said)
    return whole


def keep(config: PeerConfig, path: Path) -> None:
    """Keeps what this start was given for later ones, once it is known to do.

    Args:
        config: of this start, without what was kept.
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
    if path_of_key := given.get(_KEY):  # a later start may be made in another folder
        given[_KEY] = str(Path(path_of_key).expanduser().absolute())
    return given


def _kept(config: PeerConfig, path: Path) -> dict[str, object]:
    """A peer that is told where to listen does so, although it only dialled out before."""
    listens = "host_maddrs" in config.network.model_fields_set
    before = _read(path)
    return {k: v for k, v in before.items() if not (listens and k == "network.client_mode")}


def identity_path_of(folder: Path, given: str | None) -> Path:
    """Where the key of a state directory's peer is: as given now, or to an earlier start.

    Args:
        folder: the state directory; nothing is written.
        given: what a person named now, if anything.
    """
    path = given or _read(folder / SETTINGS_FILE).get(_KEY)
    return Path(path).expanduser() if isinstance(path, str) else folder / IDENTITY_FILE


def credential_to(
    run: RunConfig, given: Credential | None, directory: RunDirectory
) -> Credential | None:
    """With which a peer asks to be let into a run: given now, or before where nobody is without."""
    is_open = run.run.admission == "open"
    return given or (None if is_open else directory.read_credential())


def kept_credential(given: Credential | None, directory: RunDirectory) -> Credential | None:
    """With which this peer comes: given now, and kept from now on, or given before [R8].

    The invitation's private key is not needed any more, and nowhere kept.
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
        logger.warning("kept settings are passed over: %s: %s", path, error)
        return {}
    names = {f"{section}.{field}" for section, field in KEPT}
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if key in names}
