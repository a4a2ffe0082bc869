"""The interface for researchers: `import swarm` gives these names.

Files: `load_run`, `load_peer`, `load_export`, `load_state`. Training: `build_model`, `Peer` with a
`PeerObserver`; `read_invitation` for a `Wanted`. Looking and planning: `look`, `plan_run`. Each
`SwarmError` names the next action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from swarm.config import PeerConfig, RunConfig, parse_config
from swarm.errors import BadBlob, SwarmError
from swarm.experts import all_shapes, lacking
from swarm.model.initial_weights import initial_tensors
from swarm.model.pretrained import open_checkpoint
from swarm.model.transformer import Transformer
from swarm.monitor.snapshot import Snapshot
from swarm.network.runs.signed_invitations import read_invitation
from swarm.peer.guest import look
from swarm.peer.machine.engine_plan import RunPlan, plan_run
from swarm.peer.session import Peer
from swarm.peer.status.observing import PeerObserver, RoundReport
from swarm.peer.text.agreed_model import open_state
from swarm.peer.text.run_request import Wanted
from swarm.protocol.values.manifest import Manifest
from swarm.run_files import find_file, read_text
from swarm.train.engine.engine import StepStats

__all__ = [
    "Manifest",
    "Peer",
    "PeerConfig",
    "PeerObserver",
    "RoundReport",
    "RunConfig",
    "RunPlan",
    "Snapshot",
    "State",
    "StepStats",
    "SwarmError",
    "Wanted",
    "build_model",
    "load_export",
    "load_peer",
    "load_run",
    "load_state",
    "look",
    "plan_run",
    "read_invitation",
]


@dataclass(frozen=True)
class State:
    """The state of a run in a peer's state directory.

    Attributes:
        run: the run's configuration.
        manifest: the newest agreed state: round, step, members, digests.
        weights: every tensor of that state by Hugging Face name, in its agreed type.
    """

    run: RunConfig
    manifest: Manifest
    weights: Mapping[str, Tensor]


def load_run(file: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a run file: the configuration on which all peers of a run agree.

    Args:
        file: path of the file, or the name of a file that comes with swarm, such as `demo`.
        overrides: settings, written as after `--set`, such as `round.local_steps=5`.

    Raises:
        ConfigError: the file cannot be read, or a setting is wrong. Names the nearest key.
    """
    path = find_file(Path(file), "runs")
    return parse_config(RunConfig, read_text(path, "runs"), source=str(path), overrides=overrides)


def load_peer(file: Path | str | None = None, overrides: Sequence[str] = ()) -> PeerConfig:
    """Reads the configuration of one machine: device, memory, network, folder with text.

    Args:
        file: path of the file, or the name of a file that comes with swarm, such as `laptop`. None:
            only the defaults.
        overrides: settings, written as after `--set`, such as `corpus.folder=/home/me/books`.

    Raises:
        ConfigError: the file cannot be read, or a setting is wrong. Names the nearest key.
    """
    path = find_file(Path(file), "peers") if file else None
    text, source = (read_text(path, "peers"), str(path)) if path else ("", "overrides")
    return parse_config(PeerConfig, text, source=source, overrides=overrides)


def build_model(run: RunConfig, weights: Mapping[str, Tensor] | None = None) -> Transformer:
    """A run's whole model on the CPU, all of it trained: a `torch.nn.Module` in fp32.

    `model(ids)` maps token ids [B, T] to logits [B, T, V]. `model.losses(tokens, run.loss)` takes
    tokens [B, T + 1], where each token predicts the next token.

    Args:
        run: sizes and variants.
        weights: tensors by Hugging Face name, as `load_export` gives. None for weights drawn from
            the run's seed.

    Raises:
        BadBlob: the weights do not fit this model: a tensor is missing, is unknown to the model,
            or has another shape.
    """
    if weights is None:
        weights = initial_tensors(run, all_shapes(run.model))
    elif missing := lacking(run.model, weights.keys()):
        raise BadBlob("missing", missing)
    model = Transformer(run.model, owned=range(run.model.num_experts))
    model.write(weights)
    return model


def load_export(folder: Path | str, run: RunConfig) -> Mapping[str, Tensor]:
    """The weights in an exported model, such as `swarm-export` or Transformers writes.

    Args:
        folder: folder with config.json and model.safetensors, or shards and their index.
        run: the run whose model the export must have.

    Returns:
        Every tensor of the run's model by Hugging Face name, for `build_model` and, in a run with
        `run.initial = "given"`, for `Peer.found`. Each tensor is read on access.

    Raises:
        CorruptState: a file is missing or damaged.
        ConfigError: the export is of another model. The message names the differences.
    """
    return open_checkpoint(Path(folder), run)


def load_state(folder: Path | str, run_id: str | None = None) -> State:
    """The newest agreed state on the disk of a peer that is not running.

    Args:
        folder: state directory of the peer. Nothing in it is changed.
        run_id: id of the run. None for the run that the peer was in last.

    Raises:
        StateError: the directory has no run, or its peer is running.
        CorruptState: the state is damaged.
    """
    directory, model = open_state(Path(folder), run_id)
    try:
        return State(model.run, model.manifest, dict(model.tensors()))
    finally:
        directory.close()
