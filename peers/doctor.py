"""swarm-doctor: checks whether this machine can take part in a run, and names remedies."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict

import click

from peers.actions.findings import Examined, Finding, Level, findings_of, nat_of, verdict_of
from peers.command_line.options import Options, options, program
from peers.peer import PEER_OPTIONS, in_effect
from swarm.errors import NobodyReachable
from swarm.protocol.records.printable import printable

VERDICTS = {
    True: "This machine can take part.",
    False: "This machine cannot take part.",
    None: "Nothing here keeps this machine from taking part, but no peer was asked whether it can: "
    "name one with --initial-peers.",
}
CODES = {True: 0, False: 1, None: NobodyReachable.exit_code}
MARKS = {Level.GOOD: "green", Level.WARNING: "yellow", Level.FAULT: "red"}


@program("swarm-doctor")
@options(*PEER_OPTIONS, "as_json")
@click.pass_context
def main(context: click.Context, given: Options) -> None:
    """Says whether this machine can take part in a run, and if not what to do.

    The options are those of swarm-peer: only the name in a command changes. The program asks the
    peers at --initial-peers, or those in the state directory, whether they can dial this machine,
    and compares clocks, rates and latency. It publishes nothing. With --run it also says whether
    that run fits this machine. Exit codes: 0, it can take part; 1, it cannot; 3, nobody was asked.
    """
    if given.print_config:
        click.echo(in_effect(given, given.print_config))
        return
    if given.log_level is None:
        logging.getLogger().setLevel(logging.ERROR)  # faults become findings
    from peers.actions.examination import examine  # loads torch and hivemind: not for --help

    examined = examine(given)
    findings = findings_of(examined)
    verdict = verdict_of(examined, findings)
    if given.as_json:
        click.echo(json.dumps(as_json(examined, findings)))
    else:
        for finding in findings:
            click.echo(line_of(finding))
        click.echo(VERDICTS[verdict])
    context.exit(CODES[verdict])


def line_of(finding: Finding) -> str:
    """A finding for people: one line, and a second line with the remedy."""
    mark = click.style(finding.level.value, fg=MARKS[finding.level])
    remedy = f"\n  do: {printable(finding.remedy)}" if finding.remedy else ""
    return f"{finding.topic}: {mark}: {printable(finding.text)}{remedy}"


def as_json(examined: Examined, findings: Sequence[Finding]) -> dict[str, object]:
    """The findings for scripts."""
    return {
        "can_take_part": verdict_of(examined, findings),
        "nat": nat_of(examined.addresses, [s.seen_at for s in examined.sights]).value,
        "down_mbit": examined.down_mbit,
        "up_mbit": examined.up_mbit,
        "addresses": list(examined.addresses),
        "findings": [asdict(finding) | {"level": finding.level.value} for finding in findings],
        "peers": [asdict(sight) for sight in examined.sights],
    }


if __name__ == "__main__":
    main()
