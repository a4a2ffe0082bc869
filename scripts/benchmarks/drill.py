"""Kills -9 random peers of a local swarm at random moments of the round. Run as `drill`."""

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rehearsal import RUN_FILE, add_common, rehearse, settings

from swarm.emulation.fault_plan import At, FaultPlan, Kill
from swarm.emulation.fault_runner import Bounds, FaultRunner
from swarm.emulation.fault_verdict import quiet_rounds, rounds_hit, rounds_of, spread
from swarm.emulation.local_swarm import LocalSwarm, summary

WARM_UP_ROUNDS = 4
MEAN_GAP_S = 2.0
"""Approximate seconds from the return of a victim to the next kill."""
ABSENCE_S = (0.01, 6.0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/benchmarks/drill",
        description="A swarm of real processes on this machine; one after another is killed -9 at "
        "a random moment of the round and started again on its state.",
        epilog="Exit status: 0 if all peers agreed and every round ended, else 1.",
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=200, help="without kills: length of the run")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0, help="of victims and moments")
    parser.add_argument("--hang-after", type=float, default=180.0, metavar="S")
    add_common(parser)
    return parser.parse_args()


def plan_of(kills: int, seed: int) -> FaultPlan:
    """A plan of one kill at a time. The next kill waits until the victim contributes again."""
    if not kills:
        return FaultPlan(seed=seed)
    at = At(every_s=MEAN_GAP_S, times=kills)
    kill = Kill(kind="kill", peer="random", at=at, for_s=ABSENCE_S)
    return FaultPlan(seed=seed, max_down=1, fault=(kill,))


def drill(runner: FaultRunner, kills: int) -> None:
    """Runs until all kills are over. Ends early at a hang, or when a peer ends by itself."""
    swarm = runner.swarm
    runner.prepare()
    swarm.start()
    if not kills:
        runner.run(swarm.finished, float("inf"))
        return
    histories = [peer.events for peer in swarm.peers]
    if runner.run(lambda: len(rounds_of([h() for h in histories])) >= WARM_UP_ROUNDS, 600.0):
        runner.begin()
        runner.run(lambda: len(runner.happened) == kills and runner.all_back(), float("inf"))


def verdict_of(runner: FaultRunner) -> dict[str, Any]:
    """The figures for a script."""
    histories = [peer.events() for peer in runner.swarm.peers]
    whole = summary(runner.swarm)
    quiet = quiet_rounds(runner.happened, histories)
    usual_s = statistics.median(r.seconds for r in quiet) if quiet else None
    hit = [found for fault in runner.happened if (found := rounds_hit(fault, histories))]
    extra = [sum(r.seconds - usual_s for r in rounds) for rounds in hit if usual_s is not None]
    inconsistent = sum(count > 1 for count in whole["digests_per_height"])
    return {
        "passed": not (inconsistent or runner.hangs or runner.ended),
        "peers": whole["peers"],
        "kills": len(runner.happened),
        "rounds": whole["rounds"],
        "manifests": len(whole["digests_per_height"]),
        "merges": whole["merges"],
        "inconsistent": inconsistent,
        "hangs": runner.hangs,
        "ended": runner.ended,
        "quiet_rounds": len(quiet),
        "round_s": spread([r.seconds for r in quiet]),
        "hit_round_s": spread([rounds[0].seconds for rounds in hit]),
        "extra_s_per_kill": spread(extra),
        "rounds_until_back": spread([float(len(rounds)) for rounds in hit]),
        "tokens_total": whole["tokens_total"],
        "tokens_lost": whole["tokens_lost"],
        "seconds": whole["seconds"],
    }


def drilled(
    arguments: argparse.Namespace, folder: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Drills a swarm and reports."""
    swarm = LocalSwarm(
        folder / "swarm",
        RUN_FILE,
        arguments.peers,
        options=["--linger", "86400"],
        founder_options=[] if arguments.kills else settings(f"run.rounds={arguments.rounds}"),
    )
    plan = plan_of(arguments.kills, arguments.seed)
    runner = FaultRunner(swarm, plan, say=say, bounds=Bounds(manifest_s=arguments.hang_after))
    with swarm:
        drill(runner, arguments.kills)
    return verdict_of(runner)


def main() -> int:
    return rehearse("drill", parse(), drilled)


if __name__ == "__main__":
    sys.exit(main())
