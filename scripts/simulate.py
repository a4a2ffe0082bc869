"""Runs simulated swarms under faults and reports every broken invariant. See scripts/simulate."""

import argparse
import json
import sys
import time

from swarm.emulation.simulator.batch import Tally, jobs_of, run_jobs
from swarm.emulation.simulator.fault_schedule import Outcome, run_schedule
from swarm.emulation.simulator.faults.extended import EXTENDED
from swarm.emulation.simulator.faults.faults import CLASSES
from swarm.emulation.simulator.faults.hostile import WORDS, class_letters
from swarm.emulation.simulator.mutants.extended_mutants import ALL_MUTANTS

PROGRESS_EVERY_S = 10.0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/simulate",
        description="Random faulty schedules of the round agreement, without any network.",
        epilog="""Classes of the base model: anything (A), minority (B: a majority is spared),
majority-death (C), haste (D: short time-outs), hasty-cuts (E: the same with cut links). Of the
extended model: lost-disks (F), many-peers (G: 8 to 12), clocks (H: sleep, clock jumps, one-way
links), slow-links (J: large blobs, adapted timers), moments (K), combined (L), deafness (M),
timed-rounds (N), deltas (R). Only by --classes: overlap (O: deltas in rounds that overlap with
local steps), timed-overlap (U), 64-peers (S: some seconds each), 256-peers (T: half a minute each),
vanishing-keys (V), liar (P: a member that lies, strangers that forge), double-votes (W),
liar-deltas (Y), overclaims (X: overstated work), absence (Q: a peer that was away for hundreds of
rounds). sliced-WORD, or a small letter: that class with slices (round.stagger). Exit status: 0 if
no invariant broke (with --mutant: if one did), else 1.""",
    )
    parser.add_argument("--schedules", type=int, default=2000, help="how many, over all classes")
    parser.add_argument("--seed", type=int, default=0, help="first seed of each class")
    parser.add_argument(
        "--extended",
        action="store_true",
        help="the classes of the extended model instead of those of the base model",
    )
    parser.add_argument("--classes", help="such as liar,clocks, or ABC; see below")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="one JSON object last on stdout")
    parser.add_argument("--replay", metavar="CLASS:SEED", help="one schedule with its trace")
    parser.add_argument("--mutant", metavar="NAME", help="remove a rule; stop when it is caught")
    parser.add_argument("--list-mutants", action="store_true")
    arguments = parser.parse_args()
    if arguments.classes is None:
        arguments.classes = "".join(EXTENDED if arguments.extended else CLASSES)
    try:
        arguments.classes = class_letters(arguments.classes)
    except KeyError as unknown:
        parser.error(f"--classes: {unknown} not among {', '.join(WORDS)} and their letters")
    if not arguments.classes:
        parser.error("--classes: name one at least")
    if arguments.mutant and arguments.mutant not in ALL_MUTANTS:
        parser.error(f"--mutant: no {arguments.mutant!r}; there are {', '.join(ALL_MUTANTS)}")
    return arguments


def main() -> int:
    arguments = parse()
    if arguments.list_mutants:
        for name, mutant in ALL_MUTANTS.items():
            print(f"{name:32} {mutant.rule}")
        return 0
    if arguments.replay:
        return replay(arguments.replay, arguments.mutant)
    return search(arguments)


def replay(name: str, mutant_name: str | None) -> int:
    named, _, seed = name.partition(":")
    (fault_class,) = class_letters(named)
    mutant = ALL_MUTANTS[mutant_name] if mutant_name else None
    outcome = run_schedule(
        fault_class,
        int(seed),
        tested=mutant,
        mix=mutant.mix if mutant else None,
        trace=print,
    )
    print(outcome)
    return int((outcome.violation is None) == bool(mutant))


def search(arguments: argparse.Namespace) -> int:
    tallies = {name: Tally() for name in arguments.classes}
    jobs = jobs_of(arguments.classes, arguments.schedules, arguments.seed, arguments.mutant)
    started = shown = time.monotonic()
    for done, outcome in enumerate(run_jobs(jobs, arguments.processes), 1):
        tallies[outcome.fault_class].add(outcome)
        if outcome.violation:
            report(outcome, arguments.mutant)
            if arguments.mutant:
                break
        if time.monotonic() - shown > PROGRESS_EVERY_S:
            shown = time.monotonic()
            rate = done / (shown - started)
            print(f"{done}/{len(jobs)} schedules, {rate:.1f}/s", file=sys.stderr, flush=True)
    seconds = time.monotonic() - started
    table(tallies, seconds)
    if arguments.json:
        print(json.dumps(summary(tallies, seconds)))
    violated = any(tally.violations for tally in tallies.values())
    return int(violated != bool(arguments.mutant))


def report(outcome: Outcome, mutant: str | None) -> None:
    where = f"{outcome.fault_class}:{outcome.seed}"
    command = f"scripts/simulate --replay {where}" + (f" --mutant {mutant}" if mutant else "")
    print(f"VIOLATION in {where}: {outcome.violation}\n  replay: {command}", flush=True)


def table(tallies: dict[str, Tally], seconds: float) -> None:
    print("class    runs  violations   rounds   merges  reforms  slowest recovery")
    for name, tally in tallies.items():
        print(
            f"{name:5} {tally.runs:7} {len(tally.violations):11} {tally.rounds:8} "
            f"{tally.merges:8} {tally.reforms:8} {tally.slowest_recovery_s:14.1f} s"
        )
    runs = sum(tally.runs for tally in tallies.values())
    print(f"{runs} schedules in {seconds:.1f} s, {runs / max(seconds, 1e-9):.1f}/s")


def summary(tallies: dict[str, Tally], seconds: float) -> dict[str, object]:
    return {
        "schedules": sum(tally.runs for tally in tallies.values()),
        "violations": sum(len(tally.violations) for tally in tallies.values()),
        "seconds": round(seconds, 1),
        "classes": {
            name: {
                "runs": tally.runs,
                "rounds": tally.rounds,
                "merges": tally.merges,
                "reforms": tally.reforms,
                "slowest_recovery_s": round(tally.slowest_recovery_s, 1),
                "violations": [
                    {"seed": outcome.seed, "violation": outcome.violation}
                    for outcome in tally.violations
                ],
            }
            for name, tally in tallies.items()
        },
    }


if __name__ == "__main__":
    sys.exit(main())
