"""Train one mixture-of-experts model together, on machines that share nothing but the internet.

Scripts and notebooks need only the names below; `swarm.api` describes each of them. A name is
loaded when it is first used, so `import swarm` takes milliseconds and loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swarm.version import __version__

if TYPE_CHECKING:
    from swarm.api import (
        Manifest,
        Peer,
        PeerConfig,
        PeerObserver,
        RoundReport,
        RunConfig,
        RunPlan,
        Snapshot,
        State,
        StepStats,
        SwarmError,
        Wanted,
        build_model,
        load_export,
        load_peer,
        load_run,
        load_state,
        look,
        plan_run,
        read_invitation,
    )

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
    "__version__",
    "build_model",
    "load_export",
    "load_peer",
    "load_run",
    "load_state",
    "look",
    "plan_run",
    "read_invitation",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from swarm import api  # here, since it loads torch and hivemind

    return getattr(api, name)


def __dir__() -> list[str]:
    return __all__
