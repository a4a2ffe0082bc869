#!/usr/bin/env python
"""The share of a named link that rounds use, in a swarm that waits for its rounds.

Peers in separate namespaces take one local step per round, so nearly all of a round is transfers.
The use is the bytes that a peer sent in a round, divided by the bytes that its uplink carries in
the seconds of the round. These seconds include the step, control, reducing and voting. The data
phase lasts from the first roster until the last peer has the manifest. Its use is that of the line
that needs longest. Needs root (see swarm-local --link).

    .venv/bin/python scripts/benchmarks/bench_link.py --link home-100-20 --rounds 5
    python scripts/benchmarks/bench_link.py --link home-100-20 --rounds 5 --max-upload 18.5mbit
    python scripts/benchmarks/bench_link.py --link fibre,home-100,home-100,home-20 --rounds 5
    python scripts/benchmarks/bench_link.py --link home-20,home-20,home-20 --link 10/1mbit,60ms
"""

import argparse
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from rehearsal import add_common, folder_of, killing, report, settings, teller, tidy

from peers.command_line.command import ending_as_ctrl_c
from swarm.config.amounts import link_rates
from swarm.emulation.links import LINKS, Link
from swarm.emulation.local_peer import Event
from swarm.emulation.local_swarm import LocalSwarm, applied
from swarm.emulation.networks import NamespaceLinks, why_not_here
from swarm.errors import ConfigError
from swarm.run_files import find_file

ROUND_S = 300.0
STEPS = (
    "round.local_steps=1", "train.batch_tokens=64", "train.micro_batch_sequences=1",
    "merging.alpha=0", "data.validation_bytes=64",
)  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--link",
        action="append",
        help="named ones, which peers have in turn: A,B,... (default: home-100-20); or one by its "
        "rates, as swarm-plan takes it; may be given several times",
    )
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--slower",
        type=float,
        default=1.0,
        help="divides all rates, for lines that this machine cannot fill; round trips stay",
    )
    parser.add_argument("--hidden-size", type=int, default=768, help="of the model (default: 768)")
    parser.add_argument("--max-upload", help="as swarm-peer takes it")
    parser.add_argument(
        "--congestion",
        default="cubic",
        help="TCP's congestion control, as cubic (default, and that of most machines) or bbr",
    )
    add_common(parser)
    return parser.parse_args()


def model_of(hidden_size: int) -> list[str]:
    """Two layers with eight experts.

    The share of shared tensors is the 7B's, in parts that spread evenly over the peers.
    """
    return [
        f"wire.part_bytes={hidden_size**2}",
        f"model.hidden_size={hidden_size}", f"model.moe_intermediate_size={hidden_size * 5 // 6}",
        "model.num_attention_heads=8", "model.num_key_value_heads=8",
    ]  # fmt: skip


def links_of(text: str, slower: float) -> list[Link]:
    """The links of one --link, with divided rates.

    Raises:
        ConfigError: there is no such link.
    """
    names = text.split(",")
    if set(names) <= LINKS.keys():
        found = [LINKS[name] for name in names]
    else:
        rates = link_rates(text)
        found = [Link(rates.up_mbit, rates.down_mbit, rates.rtt_ms, rates.loss_pct)]
    return [
        replace(link, up_mbit=link.up_mbit / slower, down_mbit=link.down_mbit / slower)
        for link in found
    ]


_OF_A_ROUND = re.compile(
    r"(\S+) (?:DEBUG topic=round (?:roster closed with|height (\d+) decided with)"
    r"|DEBUG round=\S+ kind=\S+ height=(\d+) )"
)


def rosters_closed_at(logs: Sequence[str]) -> dict[int, float]:
    """The time when the first roster of each height was closed, from the logs of all peers.

    Times are seconds since the epoch, rounded down. If this convener or the next closes a roster
    again, all bytes of the first roster, or the rest of them, are moved again.
    """
    found: dict[int, float] = {}
    for log in logs:
        height = 1
        for match in filter(None, map(_OF_A_ROUND.match, log.splitlines())):
            if before := match[2] or match[3]:
                height = max(height, int(before) + 1)
            else:
                at_s = datetime.fromisoformat(match[1]).timestamp()
                found[height] = min(at_s, found.get(height, at_s))
    return found


@dataclass(frozen=True)
class DataPhase:
    """The transfers of a round.

    Attributes:
        seconds: time from its first roster until the last peer had the manifest.
        used: used share of the line that needs the longest.
    """

    seconds: float
    used: float


def data_phases(
    link_of: Sequence[Link], done: Sequence[Sequence[Event]], closed_at: Mapping[int, float]
) -> list[DataPhase]:
    """The data phase of each round with a known roster that all peers report.

    The bytes that a peer reports are those since its previous manifest. They include bytes for
    peers that got the previous manifest later, so the time until the last of these peers had it
    counts too. For the first round that all peers report, this time is unknown.
    """
    by_height = [{event["height"]: event for event in history} for history in done]
    found, rests_s = list[DataPhase](), [0.0] * len(done)
    for height in sorted(set.intersection(*map(set, by_height))):
        events = [history[height] for history in by_height]
        had_at = [event["time"] for event in events]
        if height in closed_at:
            seconds = max(had_at) - closed_at[height]
            each = zip(link_of, events, rests_s, strict=True)
            used = max(needed_s(link, event) / (seconds + rest_s) for link, event, rest_s in each)
            found.append(DataPhase(seconds, used))
        rests_s = [max(had_at) - had_s for had_s in had_at]
    return found


def needed_s(link: Link, event: Event) -> float:
    """Seconds that a peer's line needs for the blobs of a round, in the slower direction."""
    up_bytes, down_bytes = float(event["blob_bytes_sent"]), float(event["blob_bytes_received"])
    return max(up_bytes / link.up_mbit, down_bytes / link.down_mbit) * 8e-6


def whole_s(event: Event) -> float:
    """Seconds in which a peer moved the reported bytes of a round.

    These are all seconds since its previous manifest. In the first round, the seconds before its
    steps belong to the start.
    """
    is_first = event["round"] == 1
    return float(event["training_s"] + event["wait_s"] if is_first else event["seconds"])


def measure(
    arguments: argparse.Namespace, each: Sequence[Link], folder: Path
) -> tuple[list[list[Event]], dict[int, float], dict[str, int]]:
    """Each peer's reports of its rounds, `rosters_closed_at`, and the fate of packets."""
    rounds, links = arguments.rounds, NamespaceLinks(each, congestion=arguments.congestion)
    swarm = LocalSwarm(
        folder / "swarm",
        find_file(Path("demo"), "runs"),
        arguments.peers,
        options=[
            *("--log-level", "debug"),
            *(("--max-upload", arguments.max_upload) if arguments.max_upload else ()),
        ],
        founder_options=settings(f"run.rounds={rounds}", *STEPS, *model_of(arguments.hidden_size)),
        links=links,
    )

    def histories() -> list[list[Event]]:
        found = [applied(peer.events()) for peer in swarm.peers]
        return [[event for event in events if event["kind"] == "quorum"] for events in found]

    with killing(swarm):
        swarm.start()
        swarm.wait_until(
            lambda _: all(len(events) >= rounds for events in histories()),
            what=f"{rounds} rounds",
            timeout_s=rounds * ROUND_S,
        )
        logs = [peer.log_path.read_text() for peer in swarm.peers]
        found = [history[:rounds] for history in histories()]
        return found, rosters_closed_at(logs), links.packets


def main() -> int:
    arguments = parse()
    if why := why_not_here():
        sys.exit(why)
    folder, say = folder_of(arguments, "link"), teller()
    given: list[str] = arguments.link or ["home-100-20"]
    try:
        each = [link for text in given for link in links_of(text, arguments.slower)]
    except ConfigError as error:
        sys.exit(f"--link: {error}; names are {', '.join(LINKS)}")
    with ending_as_ctrl_c():
        done, closed_at, packets = measure(arguments, each, folder)
    say(f"measured {arguments.rounds} rounds")
    link_of = [each[peer % len(each)] for peer in range(len(done))]
    of_rounds = [
        [
            event["blob_bytes_sent"] * 8e-6 / link.up_mbit / whole_s(event)
            for link, event in zip(link_of, events, strict=True)
        ]
        for events in zip(*done, strict=True)
    ]
    phases = data_phases(link_of, done, closed_at)
    used = [share for shares in of_rounds for share in shares]
    verdict = {
        "link": " ".join(given),
        "slower": arguments.slower,
        "max_upload": arguments.max_upload,
        "congestion": arguments.congestion,
        "sent_megabytes": [
            round(statistics.mean(event["blob_bytes_sent"] for event in history) / 1e6, 1)
            for history in done
        ],
        "wait_s": [round(event["wait_s"], 1) for history in done for event in history],
        "data_phase_s": [round(phase.seconds, 1) for phase in phases],
        "data_phase_used": [round(phase.used, 3) for phase in phases],
        "uplink_used": round(statistics.mean(used), 3),
        "uplink_used_least": round(min(used), 3),
        "uplink_used_by_round": [round(statistics.mean(shares), 3) for shares in of_rounds],
        "not_counted": sum(not event["counted"] for history in done for event in history),
        "packets": packets,
    }
    report(verdict, arguments)
    tidy(folder, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
