"""The outer optimizer of a run: what becomes of the mean of what peers did in a round."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from swarm.config.section import Codec, Coding, Section

UNIT = 256
"""Both settings are in 1/256: products with them are exact, see `swarm.deltas.arithmetic`."""


class OuterConfig(Section):
    """Nesterov's momentum over the rounds, for shared tensors that move by deltas; off by default.

    A delta that is the same in each round moves a value by rate / (256 - momentum) of it a round in
    the long run, its *gain*: by just the delta where rate is 256 - momentum.
    """

    momentum: Annotated[int, Field(ge=0, lt=UNIT)] = 0
    """mu, in 1/256: so much of the momentum before stays. 0: there is no outer optimizer."""
    rate: Annotated[int, Field(ge=1, le=UNIT)] = UNIT
    """eta, in 1/256: so much of the mean with its momentum moves the agreed value. It has a gain of
    1 in the long run if it is 256 - momentum, and more if it is larger."""

    @property
    def is_on(self) -> bool:
        """Whether agreed values have a momentum."""
        return self.momentum > 0

    @property
    def gain(self) -> float:
        """How far a value moves a round by a delta that stays the same, in that delta."""
        return self.rate / (UNIT - self.momentum)

    def check(self, shared: Codec, coding: Coding) -> None:
        """Whether it can be used for shared tensors of this type and coding.

        Raises:
            ValueError: with the key, what is wrong and what to do.
        """
        if not self.is_on and self.rate != UNIT:
            raise ValueError(
                f"outer.rate: {self.rate} has no use without a momentum; leave it out, or set "
                f"outer.momentum to {UNIT - self.rate}"
            )
        if self.is_on and coding == "none":
            raise ValueError(
                "outer.momentum: needs wire.shared_coding, such as b2: it is a momentum of the "
                "deltas that rounds agree on"
            )
        if self.is_on and shared != "fp32":
            raise ValueError(
                'outer.momentum: needs wire.shared = "fp32": what is below half a unit in the last '
                "place of bf16 would be lost"
            )
