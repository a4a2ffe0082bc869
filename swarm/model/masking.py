"""Masks of a micro-batch: for attention within documents, and for the loss.

Attention within documents needs no mask, because each document is computed as its own sequence. So
any kernel for causal attention works, and computes fewer products than over the whole window.
Documents of similar lengths are computed together. Torch's fused kernel with a mask takes longer
than the whole window without one (`scripts/benchmarks/bench_documents.py`). cuDNN's kernels, which
torch prefers on some GPUs, are not used, because they need a new plan for each number of documents
and width.

Shapes: B sequences, T tokens of a sequence, N = B * T, D hidden size, H heads, C size of a head;
S documents of one width, W their width, M places in all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.backends import cuda


class Tokens:
    """All tokens of a micro-batch. The base class for processes that share a micro-batch.

    Attributes:
        ways: number of processes that share the micro-batch.
    """

    ways = 1

    def shape(self, sequences: int, length: int) -> tuple[int, int]:
        """The first dimensions of the residual stream of a number of sequences."""
        return sequences, length

    def own(self, x_NX: Tensor) -> Tensor:
        """The part of a tensor over all tokens that belongs to this process's tokens, [n, ...]."""
        return x_NX

    def routed(self, weight_nK: Tensor, expert_nK: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (fp32) and experts of all tokens, [N, K], from each process's own."""
        return weight_nK, expert_nK

    def mean(self, part: Tensor) -> Tensor:
        """The mean over the processes, in fp32. Its gradient goes to all of them."""
        return part


ALL = Tokens()


class Documents(NamedTuple):
    """The documents of a micro-batch, grouped by width.

    Attributes:
        widths: (S, W) of each group.
        token_M: int64, the token of the micro-batch at each place. Places after a document's end
            repeat its last token, and no token of the document sees them.
        place_N: int64, the place of each token.
    """

    widths: tuple[tuple[int, int], ...]
    token_M: Tensor
    place_N: Tensor

    def to(self, device: torch.device) -> Documents:
        """The same documents, with tensors on the given device."""
        return Documents(
            self.widths,
            self.token_M.to(device, non_blocking=True),
            self.place_N.to(device, non_blocking=True),
        )

    def apply(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], *given: Tensor) -> Tensor:
        """Attention within each document.

        Args:
            attend: causal attention of queries, keys and values [S, H, W, C].
            given: queries, keys and values of the micro-batch, [B, H, T, C].

        Returns:
            The attended values, [B, H, T, C].
        """
        packed = [self._packed(x_BHTC).split([s * w for s, w in self.widths]) for x_BHTC in given]
        parts = []
        with _without_plans() if given[0].is_cuda else contextlib.nullcontext():
            for size, *part in zip(self.widths, *packed, strict=True):
                q, k, v = (x_MHC.unflatten(0, size).transpose(1, 2) for x_MHC in part)
                parts.append(attend(q, k, v).transpose(1, 2).flatten(0, 1))
        out_NHC: Tensor = _Unpack.apply(  # type: ignore[no-untyped-call]
            torch.cat(parts), self.token_M, self.place_N
        )
        sequences, _, length, _ = given[0].shape
        out_BHTC: Tensor = out_NHC.unflatten(0, (sequences, length)).transpose(1, 2)
        return out_BHTC

    def _packed(self, x_BHTC: Tensor) -> Tensor:
        x_NHC = x_BHTC.transpose(1, 2).flatten(0, 1)
        packed_MHC: Tensor = _Pack.apply(  # type: ignore[no-untyped-call]
            x_NHC, self.token_M, self.place_N
        )
        return packed_MHC


@contextlib.contextmanager
def _without_plans() -> Iterator[None]:
    """Keeps attention away from cuDNN, which builds a permanent plan for each new shape.

    The switch holds for the whole process. Only forward reads it, because backward uses the kernel
    of forward. Only one thread at a time runs forward, because autograd's thread computes layers
    again while its caller waits. If two threads did run forward, either kernel would be right.
    """
    before = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        cuda.enable_cudnn_sdp(before)


class _Pack(torch.autograd.Function):
    """Tokens to places. Places after a document's end get no gradient, so nothing is added up."""

    @staticmethod
    def forward(ctx: Any, x_NHC: Tensor, token_M: Tensor, place_N: Tensor) -> Tensor:
        ctx.save_for_backward(place_N)
        return x_NHC.index_select(0, token_M)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (place_N,) = ctx.saved_tensors
        return gradients[0].index_select(0, place_N), None, None


class _Unpack(torch.autograd.Function):
    """Places to tokens."""

    @staticmethod
    def forward(ctx: Any, x_MHC: Tensor, token_M: Tensor, place_N: Tensor) -> Tensor:
        ctx.save_for_backward(place_N)
        ctx.places = len(token_M)
        return x_MHC.index_select(0, place_N)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (place_N,) = ctx.saved_tensors
        dout_NHC = gradients[0]
        dx_MHC = dout_NHC.new_zeros((ctx.places, *dout_NHC.shape[1:]))
        return dx_MHC.index_copy_(0, place_N, dout_NHC), None, None


def documents_of(starts_BT: Tensor) -> Documents | None:
    """The documents of a micro-batch. None if every sequence is one document.

    Args:
        starts_BT: bool, the first tokens of documents. A sequence's first token always begins a
            document, because the sequence has nothing before it.
    """
    sequences, length = starts_BT.shape
    if not starts_BT[:, 1:].any():
        return None
    starts_BT = starts_BT.clone()
    starts_BT[:, 0] = True
    start_X = starts_BT.flatten().nonzero()[:, 0]
    size_X = start_X.diff(append=start_X.new_tensor([sequences * length]))
    width_X = torch.tensor([min(_width(size), length) for size in size_X.tolist()])
    widths, tokens = [], []
    place_N = torch.empty(sequences * length, dtype=torch.int64)
    first = 0
    for width in sorted(set(width_X.tolist())):
        start_S, size_S = start_X[width_X == width], size_X[width_X == width]
        offset_W = torch.arange(width)
        inside_SW = offset_W < size_S[:, None]
        token_SW = start_S[:, None] + torch.minimum(offset_W, size_S[:, None] - 1)
        place_SW = first + torch.arange(len(start_S) * width).view(token_SW.shape)
        place_N[token_SW[inside_SW]] = place_SW[inside_SW]
        widths.append((len(start_S), width))
        tokens.append(token_SW.flatten())
        first += token_SW.numel()
    return Documents(tuple(widths), torch.cat(tokens), place_N)


WASTE = 1.5
"""Upper bound of places per token; see `_width`."""


def _width(size: int) -> int:
    """The computed width of a document: 2, 3, 4, 6, 8, 12, 16, ... and 1.

    So there are few widths, and less than half of a document's size is added.
    """
    step = 1 << max((size - 1).bit_length() - 2, 0)
    return -(-size // step) * step


class Masked(NamedTuple):
    """Masks of one micro-batch, on the computing device.

    Attributes:
        documents: attention stays within each document. None: a token attends to its whole
            sequence.
        scored_BT: bool, predictions in the cross-entropy and the output z-loss. None: all.
        mean_over: divisor of sums: scored predictions of the step per micro-batch.
            So the mean over micro-batches is a mean over predictions. None: the predictions of this
            micro-batch.
    """

    documents: Documents | None = None
    scored_BT: Tensor | None = None
    mean_over: float | None = None

    def scored(
        self, hidden_BTD: Tensor, labels_BT: Tensor, tokens: Tokens = ALL
    ) -> tuple[Tensor, Tensor, float]:
        """The scored predictions.

        Args:
            hidden_BTD: inputs of the head, for the tokens of this process.
            labels_BT: labels of all tokens.
            tokens: the tokens of this process.

        Returns:
            Inputs of the head, [N, D], and labels, [N], of this process, and the divisor of its
            sums. With this divisor, the mean over the processes is the mean over all predictions.
        """
        hidden_ND, labels_N = hidden_BTD.flatten(0, 1), tokens.own(labels_BT.flatten())
        if self.scored_BT is None:
            return hidden_ND, labels_N, (self.mean_over or labels_BT.numel()) / tokens.ways
        scored_N = tokens.own(self.scored_BT.flatten())
        mean_over = self.mean_over or int(self.scored_BT.sum())
        return hidden_ND[scored_N], labels_N[scored_N], mean_over / tokens.ways


UNMASKED = Masked()
