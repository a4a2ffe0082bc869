"""An outer optimizer on agreed values, for measurements: Nesterov's momentum over coded deltas.

A part of the shared tensors whose deltas are averaged has a momentum u beside its value v. Once a
round has agreed on the bytes B of its delta, everybody computes the same:

    u' = rb(mu u + dec B),    t = rb(dec B + mu u'),    v' = can(v + eta t),

with rb = can, then the nearest bf16, ties to even, and can as `swarm.deltas.arithmetic.canonical`.
mu and eta are multiples of 1/256 with at most 8 significant bits: their products with a bf16 number
have 16 significant bits and are multiples of 2^-115, so they are exact in fp32, fused or not, and
each of the three lines rounds in one addition, and once more to bf16. Sums are multiples of 2^-123,
so no subnormal comes about: the same bits on every processor.

Of a delta d that is the same in each round, u goes to d / (1 - mu), t as well, and the value moves
by eta d / (1 - mu) a round: by d, a *gain* of 1, where eta = 1 - mu.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.codecs import Buffer, Read, bytes_of, check_chunk, values_in
from swarm.codings import elements_bytes
from swarm.deltas.arithmetic import canonical
from swarm.deltas.means import mean_of_deltas
from swarm.deltas.units import Delta, agreed_elements, decode_run, encode_run, runs
from swarm.experts import UnitLayout

UNIT = 256
"""mu and eta are multiples of 1/256."""


@dataclass(frozen=True)
class Outer:
    """Settings of the outer optimizer.

    Attributes:
        momentum: mu x 256; from 0 to 255.
        rate: eta x 256; from 1 to 256.
    """

    momentum: int
    rate: int

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < UNIT or not 0 < self.rate <= UNIT:
            raise ValueError(f"mu = {self.momentum}/256, eta = {self.rate}/256: not within [0, 1)")

    @property
    def gain(self) -> float:
        """How far a value moves a round by a delta that stays the same, in that delta."""
        return self.rate / (UNIT - self.momentum)


def outer_step(v: Tensor, u: Tensor, by: Tensor, outer: Outer) -> tuple[Tensor, Tensor]:
    """A value and its momentum after a delta: the same bits on every processor.

    Args:
        v: agreed values, fp32 [n].
        u: their momentum, bf16 [n], canonical.
        by: decoded elements of the delta, fp32 [n].
        outer: what is done with them.

    Returns:
        v', fp32 [n], whose range has still to be looked at, and u', bf16 [n].

    Raises:
        OverflowError: if a momentum left the range of bf16.
    """
    mu, eta = outer.momentum / UNIT, outer.rate / UNIT
    ahead = _rounded(u.float() * mu + by)
    move = _rounded(ahead.float() * mu + by)
    if not all(math.isfinite(bound.item()) for bound in torch.aminmax(move)):
        raise OverflowError("a momentum is too large for bf16")
    return canonical(v + move.float() * eta), ahead


def _rounded(values: Tensor) -> Tensor:
    return canonical(values).to(torch.bfloat16)


@dataclass(frozen=True)
class Stepped:
    """One run of what a round makes of a part: delta, value, momentum, and what is left over.

    `left` is g = t - dec(B), fp32: what the coding lost of the mean. How far the value moves is
    no measure of it here.
    """

    delta: Buffer
    value: Buffer
    momentum: Buffer
    left: Buffer


def stepped(
    layout: UnitLayout,
    base: Read,
    momentum: Read | None,
    deltas: Sequence[Delta],
    outer: Outer,
    *,
    remainder: Read | None = None,
    weights: Sequence[int] | None = None,
) -> Iterator[Stepped]:
    """The mean of deltas as `swarm.deltas.means.reduced`, and the outer step with it.

    Args:
        layout: of the part; its values are fp32.
        base: of v.
        momentum: of u; None: zeros.
        deltas: of the contributors, in this order.
        outer: what is done with their mean.
        remainder: of g; None: nothing.
        weights: of the mean.
    """
    wanted, before = (
        mean_of_deltas(layout, deltas, remainder, weights),
        agreed_elements(layout, base),
    )
    for start, stop in runs(layout):
        mean = wanted(start, stop)
        delta = encode_run(mean, layout.coding)
        if len(deltas) == 1 and remainder is None:
            offset = elements_bytes(start, layout.coding)
            delta = deltas[0].read(offset, elements_bytes(stop, layout.coding) - offset)
        by = decode_run(delta, stop - start, layout.coding)
        if momentum is None:
            u = torch.zeros(stop - start, dtype=torch.bfloat16)
        else:
            u = values_in(momentum(2 * start, 2 * (stop - start)), "bf16")
        value, ahead = outer_step(before(start, stop), u, by, outer)
        check_chunk(layout, start, value)
        yield Stepped(delta, bytes_of(value), bytes_of(ahead), bytes_of(mean.sub_(by)))
