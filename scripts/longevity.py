"""Runs a month of a peer's life in virtual time and reports failures. See scripts/longevity."""

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict

from swarm.emulation.longevity.audit import Scale
from swarm.emulation.longevity.runner import MUTANTS, Job, Outcome, run_job
from swarm.emulation.longevity.scenarios import SCENARIOS, SHORT


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/longevity",
        description="A month of a peer's life in virtual time, by its own classes.",
        epilog="""Without --days each scenario takes its short form, as in CI. Exit status: 0 if all
was sound (with --mutant: if the fault was shown), else 1.""",
    )
    parser.add_argument("--days", type=float, help="of virtual time, for each scenario")
    parser.add_argument("--rounds", type=int, default=10_000, help="of the run in these days")
    parser.add_argument("--scenario", action="append", choices=sorted(SCENARIOS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory", action="store_true", help="trace allocations: half the speed")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="one JSON object last on stdout")
    parser.add_argument(
        "--mutant", metavar="NAME", choices=sorted(MUTANTS), help="put a fault back"
    )
    parser.add_argument("--list-mutants", action="store_true")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    if arguments.list_mutants:
        for name, mutant in MUTANTS.items():
            print(f"{name:32} {mutant.scenario:12} {mutant.fault}")
        return 0
    names = arguments.scenario or list(SCENARIOS)
    if arguments.mutant:
        names = [MUTANTS[arguments.mutant].scenario]
    jobs = [
        Job(
            name,
            Scale(arguments.days, arguments.rounds) if arguments.days else SHORT[name],
            arguments.seed,
            arguments.memory,
            arguments.mutant,
        )
        for name in names
    ]
    outcomes = []
    with ProcessPoolExecutor(arguments.processes) as pool:
        for outcome in pool.map(run_job, jobs):
            tell(outcome)
            outcomes.append(outcome)
    if arguments.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes]))
    if arguments.mutant:
        shown_by = MUTANTS[arguments.mutant].shown_by
        is_caught = any(shown_by in problem for each in outcomes for problem in each.problems)
        print(f"mutant {arguments.mutant}: {'caught' if is_caught else 'NOT CAUGHT'}")
        return int(not is_caught)
    return int(any(outcome.problems for outcome in outcomes))


def tell(outcome: Outcome) -> None:
    print(
        f"{outcome.scenario:12} {outcome.days:6.2f} days in {outcome.seconds:7.1f} s: "
        f"{'sound' if not outcome.problems else f'{len(outcome.problems)} faults'}",
        flush=True,
    )
    for problem in outcome.problems:
        print(f"  {problem}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
