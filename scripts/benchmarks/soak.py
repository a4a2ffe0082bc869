"""A local swarm under random faults for a given time. See scripts/benchmarks/soak."""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rehearsal import RUN_FILE, add_common, killing, rehearse, settings

from swarm import load_run
from swarm.emulation.fault_plan import At, Cut, Fault, FaultPlan, Kill, Pause
from swarm.emulation.fault_runner import Bounds, FaultRunner
from swarm.emulation.fault_verdict import fault_reports, goodput, quiet_rounds, rounds_of, spread
from swarm.emulation.links import LINKS
from swarm.emulation.local_swarm import LocalSwarm, summary
from swarm.emulation.networks import open_links

SETTINGS = settings("round.local_steps=10", "merging.interval_steps=80")
"""A merge after every eighth round."""
HOME = settings(
    'wire.shared_coding="b2"',
    'wire.experts="bf16"',
    'wire.experts_coding="b1"',
    "round.experts_every=5",
    "round.stagger=true",
    'round.overlap="round"',
)
"""Codings, slices and overlap of spes_7b_home."""
STEP_S = 0.9
"""A local step as a timed wait. With averaging, a round takes about 10 s."""
WARM_UP_ROUNDS = 4
STARTING_S = 100.0
"""Longest start, including undisturbed rounds. The rest of three minutes is for the end."""
RETURN_S = 60.0
"""Seconds after the last fault within which all peers must contribute again."""
LEAST_GOODPUT = {"exact": 0.88, "home": 0.94}
"""The least goodput for each value of --wire."""
FORMULA = """\
goodput = tokens in committed rounds / (pace x time lived). Counted from the end of the warm-up
(4 undisturbed rounds) to the last round. Pace: tokens a second of one peer in an undisturbed round,
averaging included: the median of tokens / contributors / seconds over the warm-up, or what local
steps alone allow if that is less. Time lived: of every peer, from each time that it says it has
started until it is killed, without pauses. A peer that is cut off, catching up, late or waiting
counts as one that could have trained.

Exit status: 0, or 1 on divergence (two digests at one height), a hang, a peer that ended on its
own, or goodput below 88 % (94 % with --wire home)."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/benchmarks/soak",
        description="Real peers on this machine, compute as timed waits, rounds of about 10 s. A "
        "random peer is killed (-9, started again) or paused every --every seconds on average, and "
        "half as often links are cut.",
        epilog=FORMULA,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="of faults (default: 30)")
    parser.add_argument("--peers", type=int, default=6, help="(default: 6)")
    parser.add_argument("--every", type=float, default=60.0, metavar="S", help="(default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="of victims and moments")
    parser.add_argument("--link", choices=list(LINKS), default="home-100", help="between peers")
    parser.add_argument(
        "--wire",
        choices=list(LEAST_GOODPUT),
        default="exact",
        help="exact, or the codings, slices and overlapping rounds of the run files for home links",
    )
    add_common(parser)
    return parser.parse_args()


def plan_of(every_s: float, seed: int) -> FaultPlan:
    """Kills and pauses, together one per `every_s`, and half as many cuts."""
    often, rare = At(every_s=2 * every_s), At(every_s=4 * every_s)
    faults: list[Fault] = [
        Kill(kind="kill", peer="random", at=often, for_s=(1.0, 15.0)),
        Pause(kind="pause", peer="random", at=often, for_s=(2.0, 20.0)),
        Cut(kind="cut", peer="random", at=rare, for_s=(2.0, 15.0)),
        Cut(kind="cut", peer="random", to="random", at=rare, for_s=(5.0, 30.0)),
    ]
    return FaultPlan(seed=seed, step_s=STEP_S, fault=tuple(faults))


def soak(runner: FaultRunner, minutes: float) -> None:
    """Runs the swarm. Afterwards the runner has the hangs and other failures."""
    swarm = runner.swarm
    runner.prepare()
    swarm.start()

    def is_warm() -> bool:
        return len(rounds_of([peer.events() for peer in swarm.peers])) >= WARM_UP_ROUNDS

    if not runner.run(is_warm, STARTING_S):
        return
    begun_s = time.monotonic()
    runner.begin(60 * minutes)
    if not runner.run(lambda: time.monotonic() - begun_s >= 60 * minutes, float("inf")):
        return
    runner.stop_faults()
    runner.run(runner.all_back, RETURN_S)


def soaked(
    arguments: argparse.Namespace, folder: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Soaks a swarm and reports."""
    began_s = time.time()
    links = open_links([arguments.link], say, arguments.seed)
    options = [*SETTINGS, *(HOME if arguments.wire == "home" else ())]
    swarm = LocalSwarm(
        folder / "swarm", RUN_FILE, arguments.peers, founder_options=options, links=links
    )
    plan = plan_of(arguments.every, arguments.seed)
    runner = FaultRunner(swarm, plan, say=say, bounds=Bounds(manifest_s=90.0, return_s=120.0))
    with killing(swarm):
        soak(runner, arguments.minutes)
        present = [peer.index for peer in swarm.peers if peer.alive]
    return verdict_of(runner, present, began_s, LEAST_GOODPUT[arguments.wire])


def verdict_of(
    runner: FaultRunner, present: list[int], began_s: float, least_goodput: float
) -> dict[str, Any]:
    """The verdict of `swarm-local --json` with a soak's own figures."""
    swarm, faults = runner.swarm, runner.happened
    histories = [peer.events() for peer in swarm.peers]
    whole = summary(swarm, present)
    step_tokens = load_run(RUN_FILE).train.batch_tokens
    found = goodput(faults, histories, WARM_UP_ROUNDS, step_tokens / STEP_S)
    divergences = sum(count > 1 for count in whole["digests_per_height"])
    is_low = found.share is None or found.share < least_goodput
    failed = divergences or runner.hangs or runner.ended or is_low
    return {
        **whole,
        "passed": not failed,
        "divergences": divergences,
        "hangs": runner.hangs,
        "ended": runner.ended,
        "goodput": None if found.share is None else round(found.share, 4),
        "committed_tokens": found.committed_tokens,
        "possible_tokens": round(found.possible_tokens),
        "peer_tokens_per_s": round(found.tokens_per_s, 2),
        "round_s": spread([r.seconds for r in rounds_of(histories)]),
        "quiet_round_s": spread([r.seconds for r in quiet_rounds(faults, histories)]),
        "faults": fault_reports(faults, histories, began_s),
    }


def main() -> int:
    return rehearse("soak", parse(), soaked)


if __name__ == "__main__":
    sys.exit(main())
