"""swarm-peer: trains in a run; founds it with --run, joins it with only --initial-peers."""

from __future__ import annotations

import logging
import os
import signal
import sys
from types import FrameType

import click

from peers.options import Options, as_toml, flags_of, options, program
from swarm.config import PeerConfig
from swarm.network.invitations import read_invitation
from swarm.peer.entering import Stopped
from swarm.peer.leaving import Stop
from swarm.peer.local_faults import raise_file_limit
from swarm.peer.observing import PeerObserver
from swarm.peer.peer import Peer
from swarm.peer.wanted import Wanted

logger = logging.getLogger(__name__)


class Printed(PeerObserver):
    """Prints what people, and scripts, need to know of a peer: the line with which others join."""

    def on_address(self, address: str) -> None:
        """Prints it at once, before any other address."""
        click.echo(f"swarm-peer --initial-peers {address}")
        sys.stdout.flush()

    def on_notice(self, line: str) -> None:
        """Prints it."""
        click.echo(line)


def leave_on_signals(stop: Stop) -> None:
    """Ctrl+C and SIGTERM: the first leaves cleanly within a time-out, the second at once."""

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        if stop():
            sys.stderr.write("leaving at once\n")
            os._exit(130)
        stop.ask()
        sys.stderr.write(
            f"leaving: this round and the hand-over may take {stop.leave_timeout_s:.0f} s; "
            "once more to leave at once\n"
        )

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)


@program("swarm-peer")
@options(
    "run", "config", "run_id", "tip", "invitation", "state_dir", "rounds", "peers", "settings",
    "tokenizer", *flags_of(PeerConfig),
    "print_config", "log_format",
)  # fmt: skip
@click.pass_obj
def main(observer: PeerObserver | None, options: Options) -> None:
    """Trains one peer of a swarm.

    \b
    Found a run:    swarm-peer --run configs/runs/demo.toml
    Join a run:     swarm-peer --initial-peers ADDRESS
    Go on with one: swarm-peer --state-dir DIR

    Every start prints the line with which others join, and which text they need. The first Ctrl+C
    or SIGTERM finishes the round and hands the experts over, within --leave-timeout; the second
    leaves at once.
    """  # noqa: D301 - click reads the backspace
    config = options.peer_config()
    run = options.run_config() if options.run else None
    if options.print_config:
        click.echo(as_toml(*([run] if run else []), config))
        return
    wanted = Wanted(
        run=run,
        run_id=options.run_id,
        settings={} if run else options.asked_of_run(),
        invitation=read_invitation(options.invitation) if options.invitation else None,
        vouched=options.tip,
        tokenizer=options.tokenizer,
    )
    # The network's thread must not wait long for the trainer's (measured: x1.0-1.3 on a step).
    sys.setswitchinterval(0.0002)
    raise_file_limit()
    stop = Stop(config.peer.leave_timeout_s)
    leave_on_signals(stop)
    watching = observer or Printed()
    try:
        peer = Peer.start(options.state_dir, wanted, config=config, stop=stop, observer=watching)
    except Stopped:
        logger.info("stopped before the run began")
        return
    with peer:
        if peer.train().round >= peer.run.run.rounds and not stop():
            linger_s = config.peer.linger_s
            logger.info("finished; serving others for %.0f s (Ctrl+C ends it)", linger_s)
            peer.serve(linger_s)


if __name__ == "__main__":
    main()
