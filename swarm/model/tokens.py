"""Which tokens of a micro-batch a process has outside of attention and the experts.

All of them, unless processes share a micro-batch (sequence parallel). Then each has a run of them:
its part of the residual stream, of norms, router and head. What is decided about all tokens, such
as an expert's capacity, is decided by their places in the whole micro-batch.

Shapes: B sequences, T tokens of a sequence, N = B * T, n of these tokens, K experts of a token.
"""

from __future__ import annotations

from torch import Tensor


class Tokens:
    """All tokens of a micro-batch; the base of what processes that share one have.

    Attributes:
        ways: processes that share it.
    """

    ways = 1

    def shape(self, sequences: int, length: int) -> tuple[int, int]:
        """The first dimensions of the residual stream of so many sequences."""
        return sequences, length

    def own(self, x_NX: Tensor) -> Tensor:
        """Of something of all tokens what belongs to those of this process, [n, ...]."""
        return x_NX

    def routed(self, weight_nK: Tensor, expert_nK: Tensor) -> tuple[Tensor, Tensor]:
        """Weights, fp32, and experts of all tokens, [N, K], from those of each process."""
        return weight_nK, expert_nK

    def mean(self, part: Tensor) -> Tensor:
        """The mean over the processes, in fp32; its gradient goes to all of them."""
        return part


ALL = Tokens()
