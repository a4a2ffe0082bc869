"""Named links, and where each of their figures comes from.

Round trips are between two peers that both have the link: twice that of the line to a server
nearby, and the backbone between. Where a figure is ours it says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.emulation.links import Bursts, Link

ROUND = "a round figure of ours, no measurement"
FCC_2024 = "the FCC's benchmark for broadband since 14 March 2024 (Section 706 Report)"
FCC_2015 = "the FCC's benchmark for broadband from 2015 to March 2024"
FIOS = (
    "Verizon Fios 940/880 by Verizon's own tests, October 2019 (verizon.com, Network Performance)"
)
SPEEDTEST_2020 = "world's mean, Speedtest Global Index, September 2020"
OOKLA_5G = "world's median over 5G, third quarter of 2021 (Ookla, State of 5G, 20 December 2021)"
FIXED_MS = "10 ms to a server, fixed lines (world's median, Speedtest, November 2022)"
MOBILE_MS = "28 ms to a server, mobile (world's median, Speedtest, November 2022)"
DSL_MS = "37 ms to a server over DSL (FCC, Measuring Broadband America 2016, Verizon)"
US_MS = "45 ms across the USA (Verizon's service level for its backbone)"
ATLANTIC_MS = "90 ms from New York to London (Verizon's service level for its backbone)"
PATCHBAY = "preset of iroh's n0-computer/patchbay 2920b8c, lab.rs"
PATCHBAY_RATES = "iroh's n0-computer/patchbay 2920b8c, docs/reference/patterns.md"
STARLINK_MS = "50 ms to anchors in Europe (median, UCLouvain; APNIC blog, 28 November 2022)"
HANDOVERS = (
    "1 % in all as the preset of patchbay; half of the packets (Kassem et al., IMC 2022: up to "
    "50 % at handovers) for 0.3 s of each 15 s (arXiv 2310.09242: links are chosen anew every 15 "
    "s), at 833 packets a second; the 0.3 s follow from the 1 %"
)
IN_FLIGHT = (
    "within what was measured in aeroplanes (Rula et al., WWW 2018, as F. Michel's QUIC-FEC, IFIP "
    "Networking 2019, has it): p 1 to 8 %, r 8 to 50 %, 90 to 100 % lost in the bad state"
)
FEW_BURSTS = (
    "0.1 % in all as home-100-20-loss, in bursts of 3 packets: r = 33 %, of the middle of what "
    "in-flight cites; that it fits a line on the ground is ours"
)


@dataclass(frozen=True)
class Profile:
    """A named link.

    Attributes:
        link: its figures.
        rates: where its rates come from.
        rtt: where its round trip does.
        loss: where its losses do; "" of a link without any.
    """

    link: Link
    rates: str
    rtt: str
    loss: str = ""


def _round(link: Link) -> Profile:
    return Profile(link, ROUND, ROUND, ROUND if link.loss_pct else "")


PROFILES = {
    "lan": _round(Link(1000, 1000, 1)),
    "datacentre": _round(Link(1000, 1000, 10)),
    "home-100": _round(Link(40, 100, 30)),
    "home-20": _round(Link(20, 20, 50)),
    "lossy": _round(Link(20, 20, 100, loss_pct=1.0)),
    "fibre": Profile(Link(945, 944, 65), FIOS, f"{FIXED_MS}, twice; {US_MS}"),
    "home-100-20": Profile(
        Link(20, 100, 100), FCC_2024, f"{ATLANTIC_MS}, and 10 ms for both lines: {ROUND}"
    ),
    "home-100-20-loss": Profile(
        Link(20, 100, 100, loss_pct=0.1), FCC_2024, f"as home-100-20: {ATLANTIC_MS}", ROUND
    ),
    "home-100-20-bursty": Profile(
        Link(20, 100, 100, bursts=Bursts(p_pct=0.0333, r_pct=33.3)),
        FCC_2024, f"as home-100-20: {ATLANTIC_MS}", FEW_BURSTS,
    ),
    "home-25-3": Profile(Link(3, 25, 120), FCC_2015, f"{DSL_MS}, twice; {US_MS}"),
    "home-world": Profile(
        Link(45.74, 85.73, 110), SPEEDTEST_2020, f"{FIXED_MS}, twice; {ATLANTIC_MS}"
    ),
    "mobile": Profile(Link(11.22, 35.96, 100), SPEEDTEST_2020, f"{MOBILE_MS}, twice; {US_MS}"),
    "5g": Profile(Link(21.08, 166.13, 100), OOKLA_5G, f"{MOBILE_MS}, twice; {US_MS}"),
    "wifi-bad": Profile(
        Link(20, 20, 80, loss_pct=2.0), f"{PATCHBAY}, WifiBad", f"{PATCHBAY}, WifiBad",
        f"{PATCHBAY}, WifiBad",
    ),
    "satellite": Profile(
        Link(10, 100, 100, bursts=Bursts(p_pct=0.0082, r_pct=0.4, lost_bad_pct=50.0)),
        f"{PATCHBAY_RATES}: satellite around 100/10 Mbit/s", f"{STARLINK_MS}, twice", HANDOVERS,
    ),
    "in-flight": Profile(
        Link(10, 10, 200, bursts=Bursts(p_pct=1.0, r_pct=50.0, lost_bad_pct=90.0)),
        f"{IN_FLIGHT}; 0.3 to 10 Mbit/s", f"{IN_FLIGHT}; 100 to 400 ms one way", IN_FLIGHT,
    ),
}  # fmt: skip
"""By name. Six of a kind that loses packets: at random, or in bursts."""
LINKS = {name: profile.link for name, profile in PROFILES.items()}
"""By the name that `--link` takes."""
