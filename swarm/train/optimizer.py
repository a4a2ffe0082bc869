"""Fused AdamW over what a peer owns, with moments that follow experts through ownership."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from swarm.config import OptimizerConfig
from swarm.experts import stacked_tensors

Moments = tuple[Tensor, Tensor]
"""AdamW's first and second moment of one parameter, fp32, of its shape."""


class OwnedAdamW:
    """AdamW of a changing set of parameters under one common count of updates.

    Weight decay applies to everything trained (norms and embeddings too) and, since nothing else is
    here, never to a frozen expert. Source: Loshchilov and Hutter, arXiv 1711.05101.

    Attributes:
        updates: how many updates bias correction counts. It is common to all parameters: an
            expert that is owned anew starts with zero moments under the count of the others, so its
            first update is about half of the learning rate and needs no warm-up of its own.
    """

    def __init__(self, settings: OptimizerConfig) -> None:
        self._settings = settings
        self._parameters: dict[str, nn.Parameter] = {}
        self._owned: tuple[int, ...] = ()
        self._adamw: torch.optim.AdamW | None = None
        self.updates = 0

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What is trained, in the order of the parameters' names."""
        return list(self._parameters.values())

    def follow(self, parameters: Mapping[str, nn.Parameter], owned: Sequence[int]) -> None:
        """Trains `parameters` from now on.

        Moments of shared tensors and of experts that stay keep every bit; those of experts
        that go are freed; those of new experts are zero.

        Args:
            parameters: by name; owned experts as stacks whose row k is expert `owned[k]`.
            owned: the experts behind the stacks' rows.
        """
        old = {name: self._moments(parameter) for name, parameter in self._parameters.items()}
        old_owned, self._owned = self._owned, tuple(owned)
        self._parameters = dict(sorted(parameters.items()))
        settings = self._settings
        self._adamw = torch.optim.AdamW(
            self._parameters.values(),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        for name, parameter in self._parameters.items():
            moments = old.pop(name, None)
            if stacked_tensors(name, owned):
                moments = _move_rows(moments, old_owned, self._owned, parameter)
            self._set_moments(parameter, moments or _zeros(parameter))

    def update(self, lr: float) -> None:
        """One AdamW update by the gradients, all of which must be there; then frees them."""
        assert self._adamw is not None, "nothing to train: call follow first"
        assert all(parameter.grad is not None for parameter in self.parameters)
        self._adamw.param_groups[0]["lr"] = lr
        self._adamw.step()
        self.updates += 1
        self.free_gradients()

    def free_gradients(self) -> None:
        """Drops all gradients without an update."""
        for parameter in self.parameters:
            parameter.grad = None

    def count_from(self, updates: int) -> None:
        """Sets the common count of updates, as for a peer that joins a run at a later step."""
        self.updates = updates
        for parameter in self.parameters:
            self._set_moments(parameter, self._moments(parameter))

    def masters(self) -> dict[str, Tensor]:
        """Views of all parameters by Hugging Face name, one for each owned expert's matrix."""
        detached = {name: parameter.detach() for name, parameter in self._parameters.items()}
        return _unstack(detached, self._owned)

    def moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Views of all first and second moments, named as `masters` are."""
        named = {name: self._moments(parameter) for name, parameter in self._parameters.items()}
        means = {name: mean for name, (mean, _) in named.items()}
        squares = {name: square for name, (_, square) in named.items()}
        return _unstack(means, self._owned), _unstack(squares, self._owned)

    def _moments(self, parameter: nn.Parameter) -> Moments:
        assert self._adamw is not None
        state = self._adamw.state[parameter]
        return cast(Moments, (state["exp_avg"], state["exp_avg_sq"]))

    def _set_moments(self, parameter: nn.Parameter, moments: Moments) -> None:
        assert self._adamw is not None
        # The fused kernel keeps its count beside the parameter, in fp32: exact up to 2^24 updates.
        step = torch.tensor(float(self.updates), dtype=torch.float32, device=parameter.device)
        self._adamw.state[parameter] = {
            "step": step,
            "exp_avg": moments[0],
            "exp_avg_sq": moments[1],
        }


def _unstack(named: Mapping[str, Tensor], owned: Sequence[int]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, tensor in named.items():
        rows = stacked_tensors(name, owned)
        tensors.update(zip(rows, tensor, strict=True) if rows else [(name, tensor)])
    return tensors


def _zeros(parameter: Tensor) -> Moments:
    return torch.zeros_like(parameter), torch.zeros_like(parameter)


def _move_rows(
    old: Moments | None, old_owned: Sequence[int], owned: Sequence[int], parameter: Tensor
) -> Moments:
    """Moments of a stack: an expert's old row where it had one, else zeros."""
    new = _zeros(parameter)
    if old is None:
        return new
    for row, expert in enumerate(owned):
        if expert in old_owned:
            for new_moment, old_moment in zip(new, old, strict=True):
                new_moment[row] = old_moment[old_owned.index(expert)]
    return new
