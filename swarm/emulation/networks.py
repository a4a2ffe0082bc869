"""Which emulated network this machine and user can have."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swarm.emulation.link_profiles import LINKS
from swarm.emulation.links import Links
from swarm.emulation.namespaces import NamespaceLinks, why_not_here
from swarm.emulation.proxies import ProxyLinks


def open_links(names: Sequence[str], say: Callable[[str], None], seed: int = 0) -> Links:
    """Opens the network of these names: namespaces where possible, else proxies.

    Args:
        names: of links, see `LINKS`; the peers have them in turn.
        say: told when it is not the real thing, and why.
        seed: of lost packets.
    """
    links = [LINKS[name] for name in names]
    why_not = why_not_here()
    if why_not is None:
        return NamespaceLinks(links, seed)
    lossless = " without packet loss" if any(link.mean_loss_pct for link in links) else ""
    shown = ",".join(names)
    say(f"--link {shown}: {why_not}; peers are joined by TCP proxies{lossless} instead")
    return ProxyLinks(links)
