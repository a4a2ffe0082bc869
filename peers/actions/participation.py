"""The work of swarm-peer: it takes part, prints, and leaves when a person asks."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from types import FrameType

from peers.actions.printed import Printed, say_how_to_join
from peers.command_line.options import Options
from swarm.config import PeerConfig, RunConfig
from swarm.errors import ConfigError
from swarm.network.runs.signed_invitations import read_invitation
from swarm.peer.machine.local_faults import raise_file_limit, watch_for_unborn_threads
from swarm.peer.session import Peer
from swarm.peer.status.observing import PeerObserver
from swarm.peer.text.run_request import Wanted
from swarm.peer.training.leaving import Stop, Stopped

logger = logging.getLogger(__name__)


def leave_on_signals(stop: Stop) -> None:
    """Leaves in order, within a time-out, after a first Ctrl+C, SIGTERM or SIGHUP.

    After a second Ctrl+C or SIGTERM the peer ends at once. A second SIGHUP does not count: a closed
    terminal sends two, by its shell and by the kernel. A signal that nohup ignores stays ignored.
    """

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if not stop():
            stop.ask()
            if stop.ends_at_once:
                raise Stopped
            _say(
                f"leaving: this round and the hand-over may take {stop.leave_timeout_s:.0f} s; "
                "once more to leave at once\n"
            )
        elif number != signal.SIGHUP:
            _say("leaving at once\n")
            os._exit(130)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, on_signal)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be closed
        sys.stderr.write(line)


def observer_of(options: Options, observer: PeerObserver | None) -> PeerObserver:
    """`observer`, or else an observer that prints events, and draws them with --tensorboard.

    Raises:
        ConfigError: --tensorboard was given with another observer, or tensorboardX is missing.
    """
    if options.tensorboard is None:
        return observer or Printed()
    if observer:
        raise ConfigError("--tensorboard goes with swarm-peer alone", hint="leave it out")
    from peers.actions.tensorboard import Drawn  # an extra: imported only on request

    return Drawn(options.tensorboard)


def take_part(
    config: PeerConfig, run: RunConfig | None, options: Options, observer: PeerObserver | None
) -> None:
    """Takes part in a run until it is finished, or until a person stops this peer.

    Args:
        config: configuration of this machine.
        run: the configuration of the given run file, if there is one.
        options: the other given options.
        observer: notified of events, in place of a person.
    """
    wanted = Wanted(
        run=run,
        run_id=options.run_id,
        settings={} if run else options.asked_of_run(),
        invitation=read_invitation(options.invitation) if options.invitation else None,
        vouched=options.tip,
        beside_others=options.new_run,
        tokenizer=options.tokenizer,
        initialise_from=options.initialise_from,
    )
    # The network's thread must not wait long for the trainer (measured: steps take 1.0 to 1.3
    # times).
    sys.setswitchinterval(0.0002)
    raise_file_limit()
    watch_for_unborn_threads()
    stop = Stop(config.peer.leave_timeout_s)
    leave_on_signals(stop)
    watching = observer_of(options, observer)
    try:
        peer = Peer.start(options.state_dir, wanted, config=config, stop=stop, observer=watching)
    except Stopped:
        logger.info("stopped before the run began")
        return
    say_how_to_join(peer.addresses, peer.run_id)
    with peer:
        if peer.train().round >= peer.run.run.rounds and not stop():
            linger_s = config.peer.linger_s
            logger.info(
                "finished; serving others until nobody has fetched for %.0f s (Ctrl+C ends it)",
                linger_s,
            )
            peer.serve(linger_s)
