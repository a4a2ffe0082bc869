#!/usr/bin/env python
"""What share of a named link the rounds of a swarm use that waits for them.

Peers in namespaces of their own take one local step a round, so nearly all of it is transfers. The
use is what a peer sent in a round, over what its uplink carries in the time that it waited for the
round; control, reducing and voting are in that time. Needs root (see swarm-local --link).

    .venv/bin/python scripts/bench_link.py --link home-100-20 --rounds 5
    .venv/bin/python scripts/bench_link.py --link home-100-20 --rounds 5 --max-upload 18.5mbit
    .venv/bin/python scripts/bench_link.py --link fibre,home-100,home-100,home-20 --rounds 5
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from rehearsal import add_common, folder_of, report, settings, teller

from swarm.emulation.link_profiles import LINKS
from swarm.emulation.local_swarm import LocalSwarm, applied
from swarm.emulation.namespaces import NamespaceLinks, why_not_here
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
    parser.add_argument("--link", default="home-100-20", help="or several, in turn: A,B,...")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden-size", type=int, default=768, help="of the model (default: 768)")
    parser.add_argument("--max-upload", help="as swarm-peer takes it")
    add_common(parser)
    return parser.parse_args()


def model_of(hidden_size: int) -> list[str]:
    """Two layers with eight experts; as large a share of shared tensors as the 7B has, in parts
    of which no peer has noticeably more than another."""
    return [
        f"wire.part_bytes={hidden_size**2}",
        f"model.hidden_size={hidden_size}", f"model.moe_intermediate_size={hidden_size * 5 // 6}",
        "model.num_attention_heads=8", "model.num_key_value_heads=8",
    ]  # fmt: skip


def main() -> int:
    arguments = parse()
    if why := why_not_here():
        sys.exit(why)
    folder, say, names = folder_of(arguments, "link"), teller(), arguments.link.split(",")
    if unknown := set(names) - LINKS.keys():
        sys.exit(f"--link: no {', '.join(sorted(unknown))}; there are {', '.join(LINKS)}")
    rounds, each = arguments.rounds, [LINKS[name] for name in names]
    links = NamespaceLinks(each)
    swarm = LocalSwarm(
        folder / "swarm",
        find_file(Path("demo"), "runs"),
        arguments.peers,
        options=["--max-upload", arguments.max_upload] if arguments.max_upload else [],
        founder_options=settings(f"run.rounds={rounds}", *STEPS, *model_of(arguments.hidden_size)),
        links=links,
    )

    def histories() -> list[list[dict[str, Any]]]:
        found = [applied(peer.events()) for peer in swarm.peers]
        return [[event for event in events if event["kind"] == "quorum"] for events in found]

    try:
        swarm.start()
        swarm.wait_until(
            lambda _: all(len(events) >= rounds for events in histories()),
            what=f"{rounds} rounds",
            timeout_s=rounds * ROUND_S,
        )
        done = histories()
        events = [event for history in done for event in history]
        packets = dict(links.packets)
    finally:
        swarm.kill()
        links.close()
    say(f"measured {rounds} rounds")
    of_rounds = [
        [
            e["blob_bytes_sent"] * 8 / 1e6 / each[peer % len(each)].up_mbit / e["wait_s"]
            for peer, e in enumerate(of_peers)
        ]
        for of_peers in zip(*(history[:rounds] for history in done), strict=True)
    ]
    used = [share for shares in of_rounds for share in shares]
    verdict = {
        "link": arguments.link,
        "max_upload": arguments.max_upload,
        "sent_megabytes": [
            round(statistics.mean(e["blob_bytes_sent"] for e in history) / 1e6, 1)
            for history in done
        ],
        "wait_s": [round(e["wait_s"], 1) for e in events],
        "uplink_used": round(statistics.mean(used), 3),
        "uplink_used_least": round(min(used), 3),
        "uplink_used_by_round": [round(statistics.mean(shares), 3) for shares in of_rounds],
        "not_counted": sum(not e["counted"] for e in events),
        "packets": packets,
    }
    report(verdict, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
