"""Engines of several workers compared: the fastest that fits, and why not another. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from swarm.train.adam_moments import MOMENT_BYTES
from swarm.train.hardware import Machine
from swarm.train.options import EngineKind, EngineOptions
from swarm.train.round_memory import HostPeaks
from swarm.train.sizes import Need
from swarm.train.step_time import StepTime

FORMATS = tuple(MOMENT_BYTES)
"""Of moments; smaller ones are for where nothing fits with larger ones, however fast."""


@dataclass(frozen=True)
class Rung:
    """One engine, and what it takes on a machine.

    Attributes:
        options: of the engine, or of each of several workers.
        need: its predicted need for a step; of several workers that of the one that needs most.
        peaks: predicted host memory of the whole process, phase by phase.
        time: predicted seconds of a step, in parts.
        fits: whether the machine has all that.
    """

    options: EngineOptions
    need: Need
    peaks: HostPeaks
    time: StepTime
    fits: bool

    @property
    def cut(self) -> tuple[int, int, int]:
        """Over how many workers experts are dealt out, layers cut, and heads cut."""
        return self.options.ep, self.options.pp, self.options.tp

    @property
    def streams(self) -> bool:
        """Whether the weights are in host memory."""
        return self.options.kind is EngineKind.STREAMING


def by_speed(ladder: Sequence[Rung]) -> list[Rung]:
    """The fastest first, of each format of moments; of equally fast ones those that cut least.

    Streaming comes last: it is for models that fit in no other way.
    """

    def key(rung: Rung) -> tuple[bool, int, float, int, int]:
        options, form = rung.options, FORMATS.index(rung.options.moments)
        return rung.streams, form, rung.time.total, prod(rung.cut), options.shards

    return sorted(ladder, key=key)


def least(ladder: Sequence[Rung]) -> Rung:
    """What needs least of the device."""
    return min(ladder, key=lambda rung: rung.need.crowded)


def that_need_less(ladder: Sequence[Rung], chosen: Rung) -> list[Rung]:
    """Those of which each needs less of the device than the chosen one and all before it.

    Streaming is one of them only where host memory suffices.
    """
    found = [chosen]
    for rung in ladder:
        is_one = rung.fits or not rung.streams
        if is_one and rung.need.crowded < found[-1].need.device:
            found.append(rung)
    return found[1:]


def best_of_each_cut(ladder: Sequence[Rung], chosen: Rung) -> list[Rung]:
    """The other ways to cut a model, those that fit first, the fastest of them first.

    Args:
        ladder: as `by_speed` puts it.
        chosen: one of it.

    Returns:
        Of each way the first engine that fits, else the one that needs least.
    """
    ways: dict[tuple[tuple[int, int, int], bool], list[Rung]] = {}
    for rung in ladder:
        ways.setdefault((rung.cut, rung.streams), []).append(rung)
    del ways[chosen.cut, chosen.streams]
    best = [next((rung for rung in way if rung.fits), least(way)) for way in ways.values()]
    fitting = by_speed([rung for rung in best if rung.fits])
    return fitting + by_speed([rung for rung in best if not rung.fits])


def why_not(chosen: Rung, others: Sequence[Rung], machine: Machine) -> str:
    """The end of a sentence: the next best way, and one that would be faster.

    Args:
        chosen: the engine that is taken.
        others: as `best_of_each_cut` gives them.
        machine: what each worker has.
    """
    words = ""
    seconds = chosen.time.total
    fitting = [rung for rung in others if rung.fits]
    alike = [rung for rung in fitting if rung.options.moments == chosen.options.moments]
    for rung in alike[:1]:
        words += f"; next best: {name_of(rung.options)}, {rung.time.total:.3g} s a step instead of "
        words += f"{seconds:.3g}, since {rung.time.longest_part(than=chosen.time)}"
    rounded = [rung for rung in fitting if rung not in alike and rung.time.total < seconds]
    for rung in sorted(rounded, key=lambda rung: rung.time.total)[:1]:
        words += f"; faster, with {rung.options.moments} moments: {name_of(rung.options)}, "
        words += f"{rung.time.total:.3g} s"
    missing = [rung for rung in others if not rung.fits and rung.time.total < seconds]
    for rung in sorted(missing, key=lambda rung: rung.time.total)[:1]:
        words += f"; faster, if it did fit: {name_of(rung.options)}, {_lack(rung, machine)}"
    return words


def name_of(options: EngineOptions) -> str:
    """How a model lies on several workers, in words."""
    if options.kind is EngineKind.STREAMING:
        return "streaming from one host copy"
    words = []
    if options.tp > 1:
        words.append(f"heads and experts cut over {options.tp}")
    elif options.ep > 1:
        words.append(f"experts dealt out over {options.ep}")
    if options.pp > 1:
        words.append(f"a pipeline of {options.pp} stages")
    if options.shards > 1:
        words.append(f"masters and moments cut over {options.shards}")
    return ", ".join(words) or "the whole model on each"


def _lack(rung: Rung, machine: Machine) -> str:
    bounds = [
        ("host memory", rung.peaks.highest, machine.usable_host),
        ("disk", rung.need.disk, machine.disk_bytes),
    ]
    if machine.device != "cpu":
        bounds.insert(0, ("GPU memory", rung.need.crowded, machine.usable_device))
    kind, needed, there = max(bounds, key=lambda bound: bound[1] - bound[2])
    return f"{needed / 1e9:,.1f} GB of {kind} needed, {max(there, 0) / 1e9:,.1f} usable"
