"""The findings of swarm-doctor with their remedies, computed from its measurements. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from statistics import median

from swarm.config.amounts import LinkRates
from swarm.model.link_plan import carried_mbit
from swarm.protocol.timing.fitness import Fitness, LinkVerdict, cap_advice
from swarm.train.engine.hardware import Processor

CLOCK_LIMIT_S = 3.0
"""Largest difference of clocks at which peers do not refuse each other's pings (hivemind)."""
CLOCK_NEAR_S = 1.0
LONG_RTT_MS = 1000.0
FEW_FILES = 1024


class Level(Enum):
    """How bad a finding is."""

    GOOD = "good"  # nothing to do
    WARNING = "warning"  # the peer can take part, but not as well as it could
    FAULT = "fault"  # the peer cannot take part


class Nat(Enum):
    """Address translation between this machine and the other peers, as the others see it."""

    NONE = "none"  # others see an address of this machine
    SAME_PORT = "same_port"  # translated: all others see one port
    OTHER_PORTS = "other_ports"  # translated: each peer sees another port
    TRANSLATED = "translated"  # translated: only one peer could be asked
    UNKNOWN = "unknown"  # no peer could be asked


@dataclass(frozen=True)
class Local:
    """This machine and its state directory."""

    disk_free_bytes: int | None
    """None if it could not be read."""
    open_files: int
    """Limit of open files of this process."""
    state_fault: str | None
    """Why the state directory cannot be written."""
    state_in_use: bool
    version: str
    computes_with: Processor = field(default_factory=Processor)
    congestion: str | None = None
    """TCP's congestion control here. None if the system does not name it."""
    congestion_known: tuple[str, ...] = ()
    """The congestion controls that the kernel has loaded."""


@dataclass(frozen=True)
class Sight:
    """One peer's view of this machine.

    Attributes:
        peer_id: id of the peer.
        rtt_ms: round trip to the peer.
        clock_offset_s: the peer's clock minus ours.
        version: version of the peer's software.
        seen_at: transport address from which our connection comes, as the peer sees it.
        dialled: whether the peer was asked to dial us, at the host of `seen_at`.
        dial_fault: why the peer could not dial us.
        door_fault: why the peer could not dial our port for blobs, if it was asked to.
    """

    peer_id: str
    rtt_ms: float
    clock_offset_s: float
    version: str
    seen_at: str
    dialled: bool
    dial_fault: str | None
    door_fault: str | None = None


@dataclass(frozen=True)
class Needs:
    """The needs of a run, for a peer on this machine.

    Attributes:
        name: name of the run.
        disk_bytes: size of the state directory.
        engine: the engine that was planned for this machine, in words.
        engine_fits: whether this machine has the memory for that engine.
        link: judgement of the measured link for the run. None if it was not measured.
        held_bytes: bytes of the run that the state directory already has.
    """

    name: str
    disk_bytes: float
    engine: str
    engine_fits: bool
    link: LinkVerdict | None
    held_bytes: int = 0


@dataclass(frozen=True)
class Examined:
    """All measurements.

    Attributes:
        local: this machine.
        network_fault: why there is no connection at all.
        addresses: addresses on which this machine listens. Empty in client mode.
        sights: views of the peers that answered.
        down_mbit: best download rate from any of these peers.
        up_mbit: best upload rate to any of these peers.
        needs: needs of the run, if a run was named or found.
        refused: why swarm-peer would refuse to start with these options.
        door_port: the port for blobs; 0: none, or any free port.
        door_taken: why this machine cannot listen on this port.
    """

    local: Local
    network_fault: str | None
    addresses: tuple[str, ...]
    sights: tuple[Sight, ...]
    down_mbit: float | None
    up_mbit: float | None
    needs: Needs | None
    refused: tuple[str, ...] = ()
    door_port: int = 0
    door_taken: str | None = None


@dataclass(frozen=True)
class Finding:
    """The result for one topic, and the remedy if there is a problem."""

    topic: str
    level: Level
    text: str
    remedy: str = ""


def findings_of(examined: Examined) -> tuple[Finding, ...]:
    """All findings, in a fixed order of topics."""
    found = [*_of_local(examined.local), *_of_refused(examined.refused)]
    if examined.network_fault:
        found.append(
            Finding(
                "network", Level.FAULT, examined.network_fault,
                "check --initial-peers, and that this machine may open TCP connections to it",
            )
        )  # fmt: skip
    elif examined.sights:
        found += [
            _of_clock(examined.sights),
            _of_reachability(examined.addresses, examined.sights),
            *_of_door(examined),
            _of_latency(examined.sights),
            _of_versions(examined.local.version, examined.sights),
            _of_rates(examined.down_mbit, examined.up_mbit),
        ]
    else:
        found.append(
            Finding(
                "network", Level.WARNING, "no peer was asked",
                "name one with --initial-peers to have clock, reachability and rates checked",
            )
        )  # fmt: skip
    if examined.needs:
        found += _of_needs(examined.needs, examined.local)
    return tuple(found)


def can_take_part(findings: Sequence[Finding]) -> bool:
    """Whether no finding keeps this machine from taking part."""
    return all(finding.level is not Level.FAULT for finding in findings)


def verdict_of(examined: Examined, findings: Sequence[Finding]) -> bool | None:
    """Whether this machine can take part. None if no peer could be asked."""
    if not can_take_part(findings):
        return False
    return True if examined.sights else None


def nat_of(addresses: Sequence[str], seen_at: Sequence[str]) -> Nat:
    """The kind of address translation in front of this machine.

    Args:
        addresses: concrete addresses on which this machine listens.
        seen_at: transport addresses from which peers see its connections come.
    """
    seen = [(parts[2], parts[4]) for text in seen_at if len(parts := text.split("/")) >= 5]
    if not seen or not addresses:
        return Nat.UNKNOWN
    own = {address.split("/")[2] for address in addresses}
    if all(host in own for host, _ in seen):
        return Nat.NONE
    if len(seen) == 1:
        return Nat.TRANSLATED
    return Nat.SAME_PORT if len({port for _, port in seen}) == 1 else Nat.OTHER_PORTS


def _of_local(local: Local) -> list[Finding]:
    if local.state_fault:
        state = Finding(
            "state directory", Level.FAULT, local.state_fault,
            "name another one with --state-dir, or free space and set its permissions",
        )  # fmt: skip
    elif local.state_in_use:
        state = Finding("state directory", Level.GOOD, "a peer is running with it now")
    else:
        state = Finding("state directory", Level.GOOD, "can be written")
    files = Finding("open files", Level.GOOD, f"limit {local.open_files}")
    if local.open_files < FEW_FILES:
        files = Finding(
            "open files", Level.WARNING, f"limit {local.open_files}, below {FEW_FILES}",
            f"ulimit -n {FEW_FILES} before the start",
        )  # fmt: skip
    device = Finding("device", Level.GOOD, local.computes_with.text or "not looked at")
    if remedy := local.computes_with.remedy:
        device = Finding("device", Level.WARNING, local.computes_with.text, remedy)
    return [state, files, device, *_of_congestion(local)]


def _of_refused(refused: Sequence[str]) -> list[Finding]:
    remedy = "change that; swarm-peer would end with it"
    return [Finding("options", Level.FAULT, "; ".join(refused), remedy)] if refused else []


def _of_congestion(local: Local) -> list[Finding]:
    """Finds no warning, because the best control depends on packet loss, which is unknown here.

    Loss-based controls (reno, cubic) take any loss for congestion. But if all peers send at once
    over lines without loss, bbr uses less of the lines (scripts/README.md, "what rounds use of a
    line"). There is no finding if the system does not name its control.
    """
    text = local.congestion
    if text is None:
        return []
    if text == "bbr":
        text = "bbr: right for a line that loses packets, as by radio; on others cubic is faster"
    elif text in ("reno", "cubic"):
        link = LinkRates(inf, inf, rtt_ms=100.0, loss_pct=0.1)
        setting = "sysctl -w net.core.default_qdisc=fq net.ipv4.tcp_congestion_control=bbr"
        load = "" if "bbr" in local.congestion_known else "modprobe tcp_bbr && "
        text += (
            ": right for a line that loses no packets; at 0.1 % loss and 100 ms it sends "
            f"{carried_mbit(link, 2)[0]:.1f} Mbit/s over a connection, and bbr hardly less than "
            f"without ({load}{setting} as root, in /etc/sysctl.d to keep it)"
        )
    return [Finding("congestion control", Level.GOOD, text)]


def _of_clock(sights: Sequence[Sight]) -> Finding:
    offset_s = median(sight.clock_offset_s for sight in sights)
    direction = "behind" if offset_s > 0 else "ahead of"
    text = f"{abs(offset_s):.2f} s {direction} the clocks of {len(sights)} peers"
    remedy = "set this machine's clock, best by NTP (timedatectl set-ntp true)"
    if abs(offset_s) > CLOCK_LIMIT_S:
        return Finding("clock", Level.FAULT, f"{text}; the limit is {CLOCK_LIMIT_S:.0f} s", remedy)
    if abs(offset_s) > CLOCK_NEAR_S:
        return Finding("clock", Level.WARNING, text, remedy)
    return Finding("clock", Level.GOOD, text)


def _of_reachability(addresses: Sequence[str], sights: Sequence[Sight]) -> Finding:
    topic, nat = "reachability", nat_of(addresses, [sight.seen_at for sight in sights])
    asked = [sight for sight in sights if sight.dialled]
    able = [sight for sight in asked if sight.dial_fault is None]
    if not addresses:
        return Finding(topic, Level.GOOD, "client mode: only dials out, so nobody joins through it")
    port = addresses[0].split("/")[4]
    if able:
        where = _dialled_at(able, port)
        text = f"{len(able)} of {len(asked)} peers can dial it at {where} (NAT: {nat.value})"
        return Finding(topic, Level.GOOD, text)
    why = asked[0].dial_fault if asked else "no peer was asked to"
    return Finding(
        topic, Level.WARNING, f"no peer can dial it (NAT: {nat.value}): {why}",
        f"open TCP port {port} and forward it to this machine, name the outer address with "
        "--announce-maddrs, or use --client-mode",
    )  # fmt: skip


def _of_door(examined: Examined) -> list[Finding]:
    """Without the second port, blobs share libp2p's connection, and votes wait behind blobs."""
    topic, port = "port for blobs", examined.door_port
    asked = [sight for sight in examined.sights if sight.dialled]
    if not (port and examined.addresses and asked):
        return []
    if examined.door_taken:
        text = f"{examined.door_taken}; a peer takes a free one, which a firewall may keep closed"
        return [Finding(topic, Level.WARNING, text, "end what has it, or choose --direct-port")]
    able = [sight for sight in asked if sight.door_fault is None]
    if able:
        where = _dialled_at(able, str(port))
        return [Finding(topic, Level.GOOD, f"{len(able)} of {len(asked)} can dial it at {where}")]
    return [
        Finding(
            topic, Level.WARNING,
            f"no peer can dial port {port}, so blobs may have to share one connection with votes, "
            f"which wait behind them: {asked[0].door_fault}",
            f"open TCP port {port}, too, and forward it to this machine; --direct-port takes "
            "another",
        )
    ]  # fmt: skip


def _dialled_at(sights: Sequence[Sight], port: str) -> str:
    """The addresses that these peers have dialled: the hosts where they see this machine."""
    hosts = sorted({"/".join(sight.seen_at.split("/")[:3]) for sight in sights})
    return " and ".join(f"{host}/tcp/{port}" for host in hosts)


def _of_latency(sights: Sequence[Sight]) -> Finding:
    rtt_ms = sorted(sight.rtt_ms for sight in sights)
    text = f"{rtt_ms[0]:.0f} to {rtt_ms[-1]:.0f} ms to {len(sights)} peers"
    if rtt_ms[0] > LONG_RTT_MS:
        return Finding("latency", Level.WARNING, text, "use a wired or less loaded link")
    return Finding("latency", Level.GOOD, text)


def _of_versions(version: str, sights: Sequence[Sight]) -> Finding:
    others = sorted({sight.version for sight in sights} - {version})
    if others:
        return Finding(
            "version", Level.WARNING, f"{version} here, {', '.join(others)} at other peers",
            "install the version of the others",
        )  # fmt: skip
    return Finding("version", Level.GOOD, f"{version}, as the others")


def _of_rates(down_mbit: float | None, up_mbit: float | None) -> Finding:
    if down_mbit is None or up_mbit is None:
        return Finding("rate", Level.WARNING, "not measured: no peer took part", "try again later")
    text = f"{down_mbit:.3g} Mbit/s down, {up_mbit:.3g} Mbit/s up"
    if advice := cap_advice(up_mbit):
        text += f"; {advice}"
    return Finding("rate", Level.GOOD, text)


def _of_needs(needs: Needs, local: Local) -> list[Finding]:
    remedy = "stop other programs, own fewer experts with --capacity, or see swarm-plan"
    memory = Finding("memory", Level.GOOD, needs.engine)
    if not needs.engine_fits:
        memory = Finding("memory", Level.FAULT, needs.engine, remedy)
    found = [_of_disk(needs, local.disk_free_bytes), memory]
    if needs.link:
        levels = {Fitness.HOPELESS: Level.FAULT, Fitness.ENOUGH: Level.GOOD}
        level = levels.get(needs.link.fitness, Level.WARNING)
        remedy = "" if level is Level.GOOD else "use a faster link, or a run with more local steps"
        found.append(Finding("link", level, needs.link.text, remedy))
    return found


def _of_disk(needs: Needs, free_bytes: int | None) -> Finding:
    remedy = "free space, or name a directory on another disk with --state-dir"
    if free_bytes is None:
        return Finding("disk", Level.WARNING, "could not be read", remedy)
    needed = needs.disk_bytes
    text = f"{free_bytes / 1e9:.1f} GB free, {needs.name} needs about {needed / 1e9:.1f} GB"
    if needs.held_bytes:
        text += f", of which {needs.held_bytes / 1e9:.1f} GB are here"
    if free_bytes + needs.held_bytes < needed:
        return Finding("disk", Level.FAULT, text, remedy)
    return Finding("disk", Level.GOOD, text)
