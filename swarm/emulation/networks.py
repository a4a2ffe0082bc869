"""Which emulated network this machine and user can have."""

from __future__ import annotations

from collections.abc import Callable

from swarm.emulation.links import LINKS, Links
from swarm.emulation.namespaces import NamespaceLinks, why_not_here
from swarm.emulation.proxies import ProxyLinks


def open_links(name: str, say: Callable[[str], None], seed: int = 0) -> Links:
    """Opens the network of this name: namespaces where possible, else proxies.

    Args:
        name: of a link, see `LINKS`.
        say: told when it is not the real thing, and why.
        seed: of lost packets.
    """
    why_not = why_not_here()
    if why_not is None:
        return NamespaceLinks(LINKS[name], seed)
    lossless = " without packet loss" if LINKS[name].loss_pct else ""
    say(f"--link {name}: {why_not}; peers are joined by TCP proxies{lossless} instead")
    return ProxyLinks(LINKS[name])
