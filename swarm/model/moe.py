"""Router and experts of one layer; owned and frozen experts lie in separate tensors.

Shapes: N tokens, D hidden size, I inner size of an expert, E experts, K experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarm.config import ModelConfig
from swarm.model.rows import plan_rows
from swarm.model.swiglu import PAD_ROWS_BF16, Setting, mix_experts

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class Routing(NamedTuple):
    """What a router decided.

    Attributes:
        logits_NE: fp32.
        probabilities_NE: their softmax.
        weight_NK: weight of each chosen expert.
        expert_NK: the chosen experts, the most probable first.
    """

    logits_NE: Tensor
    probabilities_NE: Tensor
    weight_NK: Tensor
    expert_NK: Tensor


class Router(nn.Module):
    """Drop-less softmax top-k router; fp32 whatever the compute type."""

    def __init__(self, model: ModelConfig, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.num_experts, model.hidden_size, device=device))
        self.top_k, self.renormalise = model.num_experts_per_tok, model.norm_topk_prob

    def forward(self, x_ND: Tensor) -> Routing:
        """Routes every token to its most probable experts."""
        logits_NE = F.linear(x_ND.float(), self.weight)
        probabilities_NE = logits_NE.softmax(-1)
        weight_NK, expert_NK = probabilities_NE.topk(self.top_k, dim=-1)
        if self.renormalise:
            weight_NK = weight_NK / weight_NK.sum(-1, keepdim=True)
        return Routing(logits_NE, probabilities_NE, weight_NK, expert_NK)


@dataclass(frozen=True)
class DenseStack:
    """Matrices of frozen experts, stored as one [E, out, in] tensor of fp32 or bf16."""

    tensor: Tensor

    def dense(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """See `swiglu.Stack`; a view where the type is right already."""
        return self.tensor[rows].to(dtype)


class ExpertBank(nn.Module):
    """The experts of one layer.

    Owned experts are fp32 parameters `owned.gate_proj` and so on, one [owned, out, in] tensor
    per projection whose row k is the expert `owned_experts[k]`. Frozen experts are buffers
    `frozen_gate_proj` and so on. All start uninitialised.
    """

    def __init__(
        self, model: ModelConfig, frozen: torch.dtype, compute: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        inner, hidden = model.moe_intermediate_size, model.hidden_size
        shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden)}
        shapes["down_proj"] = (hidden, inner)
        self.num_experts, self.compute = model.num_experts, compute
        self.owned_experts: tuple[int, ...] = ()
        self.owned = nn.ParameterDict()
        for projection in PROJECTIONS:
            out, into = shapes[projection]
            empty = torch.empty(0, out, into, device=device)
            self.owned[projection] = nn.Parameter(empty)
            stored = torch.empty(self.num_experts, out, into, dtype=frozen, device=device)
            self.register_buffer(f"frozen_{projection}", stored, persistent=False)
        self._number(())

    def _number(self, owned: tuple[int, ...]) -> None:
        frozen = [expert for expert in range(self.num_experts) if expert not in owned]
        self.owned_experts = owned
        self.row_of = {
            expert: row for experts in (owned, frozen) for row, expert in enumerate(experts)
        }
        order = torch.tensor([*owned, *frozen])
        device = self.get_buffer("frozen_gate_proj").device
        self.register_buffer("group_of", order.argsort().to(device), persistent=False)

    @torch.no_grad()
    def own(self, owned: tuple[int, ...]) -> None:
        """Moves rows between the storages; experts that stay where they are keep their bits.

        A newly owned expert's master is its frozen value in fp32; a newly frozen one is its
        master rounded to the frozen type. Replaces the parameters, unless nothing changes.

        Cost: one projection of one layer exists twice at a time.
        """
        if owned == self.owned_experts:
            return
        frozen = [expert for expert in range(self.num_experts) if expert not in owned]
        for projection in PROJECTIONS:
            stored, masters = self._stored(projection), self._masters(projection)
            new_stored = stored.new_empty(len(frozen), *stored.shape[1:])
            new_masters = masters.new_empty(len(owned), *stored.shape[1:])
            for experts, target in ((owned, new_masters), (frozen, new_stored)):
                for row, expert in enumerate(experts):
                    target[row].copy_(self.matrix(expert, projection))
            self.owned[projection] = nn.Parameter(new_masters)
            self.register_buffer(f"frozen_{projection}", new_stored, persistent=False)
        self._number(owned)

    def _stored(self, projection: str) -> Tensor:
        return self.get_buffer(f"frozen_{projection}")

    def _masters(self, projection: str) -> nn.Parameter:
        return self.get_parameter(f"owned.{projection}")

    def matrix(self, expert: int, projection: str) -> Tensor:
        """The live storage of one matrix, detached: an fp32 master, or the frozen form."""
        owned = expert in self.owned_experts
        stack: Tensor = self._masters(projection) if owned else self._stored(projection)
        return stack[self.row_of[expert]].detach()

    def forward(self, x_ND: Tensor, routing: Routing) -> Tensor:
        """Returns the mixed outputs of each token's experts, fp32 [N, D]."""
        pad = self.compute is torch.bfloat16 and x_ND.device.type == "cpu"
        plan = plan_rows(
            self.get_buffer("group_of")[routing.expert_NK],
            self.num_experts,
            len(self.owned_experts),
            PAD_ROWS_BF16 if pad else 1,
        )
        gate, up, down = (DenseStack(self._stored(projection)) for projection in PROJECTIONS)
        setting = Setting(plan, (gate, up, down), self.compute)
        masters = [self._masters(projection) for projection in PROJECTIONS]
        return mix_experts(x_ND, routing.weight_NK, masters, setting)


class SparseMLP(nn.Module):
    """Router and experts: what stands where a dense transformer has one feed-forward net."""

    def __init__(
        self, model: ModelConfig, frozen: torch.dtype, compute: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.gate = Router(model, device)
        self.experts = ExpertBank(model, frozen, compute, device)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Routing]:
        """Returns fp32 [B, T, D] and what the router decided."""
        x_ND = x_BTD.flatten(0, 1)
        routing = self.gate(x_ND)
        return self.experts(x_ND, routing).view_as(x_BTD), routing
