"""swarm-local: a whole swarm on this machine, for a first look, for tests and for drills."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import click

from peers.options import Options, option, options, program
from swarm.emulation.local_swarm import LocalPeer, LocalSwarm, applied, summary
from swarm.errors import SwarmError

STALL_S = 600.0
"""Without a new manifest anywhere for so long, the swarm is given up."""


@dataclass
class Progress:
    """Prints one line for each round that the first peer has applied."""

    rounds_total: int
    as_json: bool
    seen: int = 0
    last_s: float = field(default_factory=time.monotonic)

    def __call__(self, swarm: LocalSwarm) -> None:
        """Looks at the peers' histories.

        Raises:
            SwarmError: nothing has happened for too long.
        """
        histories = [peer.events() for peer in swarm.peers]
        manifests = max((applied(events) for events in histories), key=len, default=[])
        losses = {
            event["digest"]: event["val_loss"]
            for events in histories
            for event in events
            if event["event"] == "validation"
        }
        for event in manifests[self.seen :]:
            self.last_s = time.monotonic()
            digests = [e["digest"] for events in histories for e in applied(events)]
            here = digests.count(event["digest"])
            loss = losses.get(event["digest"])
            click.echo(
                f"round {event['round']}/{self.rounds_total} {event['kind']:<7} "
                f"digest {event['digest'][:12]} at {here} of {len(swarm.peers)} peers"
                + (f"  held-out loss {loss:.4f}" if loss else ""),
                err=self.as_json,
            )
        self.seen = len(manifests)
        if time.monotonic() - self.last_s > STALL_S:
            raise SwarmError(f"no round within {STALL_S:.0f} s; logs in {swarm.folder}")


@program("swarm-local")
@options("run", "state_dir", "rounds", "peers", "settings", "as_json", "log_format")
@option(
    "--export", dest="export_to", type=click.Path(path_type=Path), help="Exports the model there."
)
@option("--monitor/--no-monitor", default=False, help="Shows swarm-monitor while it trains.")
def main(options: Options, export_to: Path | None, monitor: bool) -> None:
    """Trains a swarm of several peers on this machine: real processes, real network, one run.

    The last line with --json is one JSON object; its fields are described in README.md.
    """
    run = options.run_config()
    assert options.run is not None, "run_config would have refused"
    settings = [word for setting in options.run_settings() for word in ("--set", setting)]
    with tempfile.TemporaryDirectory(prefix="swarm-local-") as temporary:
        # The default of --state-dir is a single peer's home: a local swarm does not belong there.
        given = options.state_dir != Options().state_dir
        folder = options.state_dir.expanduser() if given else Path(temporary)
        swarm = LocalSwarm(
            folder,
            options.run,
            run.run.peers,
            options=["--linger", "86400"],
            founder_options=settings,
        )
        with swarm:
            _train(swarm, run.run.rounds, options.as_json, monitor)
            if export_to:
                _export(swarm.peers[0], export_to, options.as_json)
        verdict = summary(swarm)
    if options.as_json:
        click.echo(json.dumps(verdict))
    else:
        click.echo(
            f"{verdict['rounds']} rounds, {verdict['merges']} merges, held-out loss "
            f"{verdict['val_loss_first']:.3f} -> {verdict['val_loss_last']:.3f} nats/token, "
            f"{len(verdict['manifest_digests'])} digest, {verdict['tokens_lost']} tokens lost, "
            f"{verdict['bytes_sent_per_peer_per_round'] / 1e6:.2f} MB sent per peer and round, "
            f"{verdict['seconds']:.0f} s"
        )


def _train(swarm: LocalSwarm, rounds: int, as_json: bool, monitor: bool) -> None:
    swarm.start()
    shown = _monitor(swarm.peers[0]) if monitor else None
    try:
        swarm.wait_until(
            LocalSwarm.finished,
            what="the run",
            timeout_s=float("inf"),
            on_poll=None if shown else Progress(rounds, as_json),
        )
    finally:
        if shown:
            shown.terminate()
            shown.wait(10)


def _monitor(founder: LocalPeer) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "peers.monitor", "--initial-peers", founder.join_address()]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)


def _export(peer: LocalPeer, folder: Path, as_json: bool) -> None:
    command = [sys.executable, "-m", "peers.export", "--initial-peers", peer.join_address()]
    result = subprocess.run(
        [*command, "--out", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if as_json else None,
        timeout=STALL_S,
        check=False,
    )
    if result.returncode:
        raise SwarmError(f"swarm-export ended with status {result.returncode}")


if __name__ == "__main__":
    main()
