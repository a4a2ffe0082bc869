"""Kills -9 random peers of a local swarm at random moments of the round. See scripts/drill."""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from swarm.emulation.fault_plan import At, FaultPlan, Kill
from swarm.emulation.fault_runner import Bounds, FaultRunner
from swarm.emulation.fault_verdict import quiet_rounds, rounds_hit, rounds_of, spread
from swarm.emulation.local_swarm import LocalSwarm, summary

RUN = """
[run]
name = "drill"
rounds = {rounds}
seed = 7
[model]
hidden_size = 32
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
num_experts = 8
num_experts_per_tok = 2
moe_intermediate_size = 32
[data]
sequence_length = 32
validation_tokens = 512
[train]
batch_tokens = 128
micro_batch_sequences = 2
compute = "fp32"
[optimizer]
lr = 1e-3
[round]
local_steps = 6
reform_after_s = 600.0 # one dead peer of several is no reason to reform
[merging]
alpha = 0.01
top_k = 4
interval_steps = 24 # a merge after every fourth round
decay_steps = 1_000_000
[wire]
part_bytes = 16384
"""
WITHOUT_END = 1_000_000
WARM_UP_ROUNDS = 4
MEAN_GAP_S = 2.0
"""Between the return of one victim and the next kill, about."""
ABSENCE_S = (0.01, 6.0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/drill",
        description="A swarm of real processes on this machine; one after another is killed -9 at "
        "a random moment of the round and started again on its state.",
        epilog="Exit status: 0 if all peers agreed and every round ended, else 1.",
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=200, help="without kills: length of the run")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0, help="of victims and moments")
    parser.add_argument("--hang-after", type=float, default=180.0, metavar="S")
    parser.add_argument("--state-dir", type=Path, help="kept; by default a temporary folder")
    parser.add_argument("--json", action="store_true", help="one JSON object last on stdout")
    return parser.parse_args()


def plan_of(kills: int, seed: int) -> FaultPlan:
    """One kill at a time; the next waits for the victim to contribute again."""
    if not kills:
        return FaultPlan(seed=seed)
    at = At(every_s=MEAN_GAP_S, times=kills)
    kill = Kill(kind="kill", peer="random", at=at, for_s=ABSENCE_S)
    return FaultPlan(seed=seed, max_down=1, fault=(kill,))


def drill(runner: FaultRunner, kills: int) -> None:
    """Runs until all kills are over; it ends early at a hang or when a peer ends on its own."""
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


def verdict_of(runner: FaultRunner) -> dict[str, object]:
    """What a script wants to know."""
    histories = [peer.events() for peer in runner.swarm.peers]
    whole = summary(runner.swarm)
    quiet = quiet_rounds(runner.happened, histories)
    usual_s = statistics.median(r.seconds for r in quiet) if quiet else 0.0
    hit = [found for fault in runner.happened if (found := rounds_hit(fault, histories))]
    extra = [sum(r.seconds - usual_s for r in rounds) for rounds in hit]
    return {
        "peers": whole["peers"],
        "kills": len(runner.happened),
        "rounds": whole["rounds"],
        "manifests": len(whole["digests_per_height"]),
        "merges": whole["merges"],
        "inconsistent": sum(count > 1 for count in whole["digests_per_height"]),
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


def main() -> int:
    arguments = parse()
    folder = arguments.state_dir or Path(tempfile.mkdtemp(prefix="swarm-drill-"))
    folder.mkdir(parents=True, exist_ok=True)
    run_file = folder / "run.toml"
    run_file.write_text(RUN.format(rounds=WITHOUT_END if arguments.kills else arguments.rounds))
    swarm = LocalSwarm(folder / "swarm", run_file, arguments.peers, options=["--linger", "86400"])
    began_s = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began_s:7.1f} s  {text}", file=sys.stderr, flush=True)

    plan = plan_of(arguments.kills, arguments.seed)
    runner = FaultRunner(swarm, plan, say=say, bounds=Bounds(manifest_s=arguments.hang_after))
    with swarm:
        drill(runner, arguments.kills)
    verdict = verdict_of(runner)
    for name, value in verdict.items():
        print(f"{name:18} {value}", file=sys.stderr if arguments.json else sys.stdout)
    if arguments.json:
        print(json.dumps(verdict))
    failed = bool(verdict["inconsistent"] or verdict["hangs"] or verdict["ended"])
    if failed or arguments.state_dir:
        say(f"states and logs are in {folder}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
