"""Router and experts of one layer; owned and frozen experts lie in separate tensors.

Shapes: N tokens, D hidden size, I inner size of an expert, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarm.config import ModelConfig
from swarm.model.frozen import DenseStack, FrozenFormat, FrozenStack, empty_stack
from swarm.model.rows import Plan, plan_rows
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


@dataclass
class Recall:
    """A layer's routing, kept so that computing the layer again for backward decides the same.

    Attributes:
        expert_NK: the chosen experts; None until the layer has run once.
        plan: their rows, sorted; with it nothing waits for the device a second time.
    """

    expert_NK: Tensor | None = None
    plan: Plan | None = None


class Router(nn.Module):
    """Drop-less softmax top-k router; fp32 whatever the compute type."""

    def __init__(self, model: ModelConfig, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.num_experts, model.hidden_size, device=device))
        self.top_k, self.renormalise = model.num_experts_per_tok, model.norm_topk_prob

    def forward(self, x_ND: Tensor, recall: Recall | None = None) -> Routing:
        """Routes every token to its most probable experts, or to those of `recall`."""
        logits_NE = F.linear(x_ND.float(), self.weight)
        probabilities_NE = logits_NE.softmax(-1)
        weight_NK, expert_NK = probabilities_NE.topk(self.top_k, dim=-1)
        if recall is not None:
            # Gathered the first time too: both passes must keep the same tensors for backward.
            expert_NK = expert_NK if recall.expert_NK is None else recall.expert_NK
            weight_NK = probabilities_NE.gather(-1, expert_NK)
        if self.renormalise:
            weight_NK = weight_NK / weight_NK.sum(-1, keepdim=True)
        return Routing(logits_NE, probabilities_NE, weight_NK, expert_NK)


class ExpertBank(nn.Module):
    """The experts of one layer.

    Owned experts are fp32 parameters `owned.gate_proj` and so on, one [owned, out, in] tensor
    per projection whose row k is the expert `owned_experts[k]`. Frozen experts are the stacks
    `frozen["gate_proj"]` and so on, in ascending order. All start uninitialised.
    """

    def __init__(
        self, model: ModelConfig, form: FrozenFormat, compute: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.num_experts, self.compute, self.form = model.num_experts, compute, form
        self.owned_experts: tuple[int, ...] = ()
        self.owned = nn.ParameterDict()
        self.frozen: dict[str, FrozenStack] = {}
        for projection, (out, into) in matrix_shapes(model).items():
            empty = torch.empty(0, out, into, device=device)
            self.owned[projection] = nn.Parameter(empty)
            shape = (self.num_experts, out, into)
            self.frozen[projection] = empty_stack(form, shape, device)
        self._number(())

    def _number(self, owned: tuple[int, ...]) -> None:
        frozen = [expert for expert in range(self.num_experts) if expert not in owned]
        self.owned_experts = owned
        self.row_of = {
            expert: row for experts in (owned, frozen) for row, expert in enumerate(experts)
        }
        order = torch.tensor([*owned, *frozen])
        device = self._masters("gate_proj").device
        self.register_buffer("group_of", order.argsort().to(device), persistent=False)

    @torch.no_grad()
    def own(self, owned: tuple[int, ...]) -> None:
        """Moves rows between the storages; experts that stay where they are keep their bits.

        A newly owned expert's master is its frozen value in fp32; a newly frozen one is its
        master rounded to the frozen format. Replaces the parameters, unless nothing changes.

        Cost: one projection of one layer exists twice at a time.
        """
        if owned == self.owned_experts:
            return
        frozen = [expert for expert in range(self.num_experts) if expert not in owned]
        for projection in PROJECTIONS:
            masters = self._masters(projection)
            new_masters = masters.new_empty(len(owned), *masters.shape[1:])
            shape = (len(frozen), *masters.shape[1:])
            new_frozen = empty_stack(self.form, shape, masters.device)
            for experts, target in ((owned, DenseStack(new_masters)), (frozen, new_frozen)):
                for row, expert in enumerate(experts):
                    stack, old_row = self.place(expert, projection)
                    target.put(row, stack.get(old_row))
            self.owned[projection] = nn.Parameter(new_masters)
            self.frozen[projection] = new_frozen
        self._number(owned)

    def hold(self, owned: tuple[int, ...], frozen: Mapping[str, FrozenStack]) -> None:
        """Takes these stacks for its frozen experts; the caller sets the parameters besides."""
        self.frozen = dict(frozen)
        self._number(owned)

    def _masters(self, projection: str) -> nn.Parameter:
        return self.get_parameter(f"owned.{projection}")

    def place(self, expert: int, projection: str) -> tuple[FrozenStack, int]:
        """Where one matrix lies: a stack, of fp32 masters or of the frozen form, and the row."""
        owned = expert in self.owned_experts
        masters = DenseStack(self._masters(projection).detach())
        return masters if owned else self.frozen[projection], self.row_of[expert]

    def forward(self, x_ND: Tensor, routing: Routing, recall: Recall | None = None) -> Tensor:
        """Returns the mixed outputs of each token's experts, fp32 [N, D]."""
        plan = recall.plan if recall else None
        if plan is None:
            pad = self.compute is torch.bfloat16 and x_ND.device.type == "cpu"
            plan = plan_rows(
                self.get_buffer("group_of")[routing.expert_NK],
                self.num_experts,
                len(self.owned_experts),
                PAD_ROWS_BF16 if pad else 1,
            )
        if recall:
            recall.expert_NK, recall.plan = routing.expert_NK, plan
        gate, up, down = (self.frozen[projection] for projection in PROJECTIONS)
        setting = Setting(plan, (gate, up, down), self.compute)
        masters = [self._masters(projection) for projection in PROJECTIONS]
        return mix_experts(x_ND, routing.weight_NK, masters, setting)


def matrix_shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Shape [out, in] of each of an expert's matrices."""
    inner, hidden = model.moe_intermediate_size, model.hidden_size
    return {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}


class SparseMLP(nn.Module):
    """Router and experts: what stands where a dense transformer has one feed-forward net."""

    def __init__(
        self, model: ModelConfig, form: FrozenFormat, compute: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.gate = Router(model, device)
        self.experts = ExpertBank(model, form, compute, device)

    def forward(self, x_BTD: Tensor, recall: Recall | None = None) -> tuple[Tensor, Routing]:
        """Returns fp32 [B, T, D] and what the router decided."""
        x_ND = x_BTD.flatten(0, 1)
        routing = self.gate(x_ND, recall)
        return self.experts(x_ND, routing, recall).view_as(x_BTD), routing
