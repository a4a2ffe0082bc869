"""What swarm-peer makes sure of between its options and its network."""

from __future__ import annotations

from peers.options import Options
from swarm.config import PeerConfig
from swarm.errors import SwarmError
from swarm.peer.kept_settings import with_kept
from swarm.peer.state_directory import StateDirectory
from swarm.peer.way_in import require_way_in


def prepared(config: PeerConfig, state: StateDirectory, options: Options) -> PeerConfig:
    """The configuration with what the state directory keeps, once the start makes sense.

    Raises:
        ConfigError, StateError: it does not, and the directory is given free; see `require_way_in`.
    """
    try:
        require_way_in(
            state,
            has_file=options.run is not None,
            has_addresses=bool(config.network.initial_peers),
            run_id=options.run_id,
        )
        return with_kept(config, state.settings_path)
    except SwarmError:
        state.close()
        raise
