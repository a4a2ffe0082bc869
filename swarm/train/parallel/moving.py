"""Values of experts that go from one rank of a group to another when ownership changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from swarm.train.parallel.mesh import Move
from swarm.train.parallel.ranks import Ranks
from swarm.train.tensor_file import Form


def moved(
    group: Ranks,
    moves: Sequence[Move],
    give: Callable[[int], Sequence[Tensor]],
    forms: Callable[[int], Sequence[Form]],
) -> dict[int, list[Tensor]]:
    """Gives away what others take over, and takes what comes here; one operation, or none.

    Args:
        group: the ranks; the same `moves` are named by all of them.
        moves: experts that change their seat.
        give: the tensors of an expert that goes from here.
        forms: of the tensors of an expert that comes here.

    Returns:
        Expert -> its tensors, on the device of those that were given, or of the group.

    Raises:
        Disconnected: another rank is gone.
    """
    if not moves:
        return {}
    sent, received = [0] * group.size, [0] * group.size
    device, pieces = group.device, []
    for move in sorted(moves, key=lambda move: (move.taker, move.expert)):
        if move.giver == group.rank:
            for tensor in give(move.expert):
                device = tensor.device
                pieces.append(tensor.detach().contiguous().view(-1).view(torch.uint8))
                sent[move.taker] += len(pieces[-1])
    coming = [move for move in moves if move.taker == group.rank]
    coming.sort(key=lambda move: (move.giver, move.expert))
    for move in coming:
        received[move.giver] += sum(_num_bytes(form) for form in forms(move.expert))
    flat = torch.cat([*pieces, torch.empty(0, dtype=torch.uint8, device=device)])
    rest = group.exchange(flat[:, None], sent, received, "moves")[:, 0]
    found: dict[int, list[Tensor]] = {}
    for move in coming:
        for form in forms(move.expert):
            # A copy begins where any type may begin.
            piece, rest = rest[: _num_bytes(form)].clone(), rest[_num_bytes(form) :]
            found.setdefault(move.expert, []).append(piece.view(form[0]).view(form[1]))
    return found


def _num_bytes(form: Form) -> int:
    return math.prod(form[1]) * form[0].itemsize
