"""Decisions of people: `RunConfig` (all peers of a run agree), `PeerConfig` (this machine).

Both are frozen values. Nothing here reads a file, the environment or a global: programs in
`peers/` collect text and overrides and hand them in.
"""

from swarm.config.parse import (
    COMMAND_LINE,
    parse_config,
    parse_override,
    valid_keys,
    validate_config,
)
from swarm.config.peer_settings import (
    ComputeSection,
    CorpusSection,
    NetworkSection,
    PeerConfig,
    PeerSection,
)
from swarm.config.run_settings import (
    MUON_SCALE,
    DataConfig,
    LossConfig,
    MergingConfig,
    ModelConfig,
    Optimizer,
    OptimizerConfig,
    OwnershipConfig,
    PhaseConfig,
    RoundConfig,
    RoutingConfig,
    RunConfig,
    RunSection,
    TrainConfig,
    WireConfig,
)
from swarm.config.section import Codec, Coding, RunName

__all__ = [
    "COMMAND_LINE",
    "MUON_SCALE",
    "Codec",
    "Coding",
    "ComputeSection",
    "CorpusSection",
    "DataConfig",
    "LossConfig",
    "MergingConfig",
    "ModelConfig",
    "NetworkSection",
    "Optimizer",
    "OptimizerConfig",
    "OwnershipConfig",
    "PeerConfig",
    "PeerSection",
    "PhaseConfig",
    "RoundConfig",
    "RoutingConfig",
    "RunConfig",
    "RunName",
    "RunSection",
    "TrainConfig",
    "WireConfig",
    "parse_config",
    "parse_override",
    "valid_keys",
    "validate_config",
]
