"""Router and experts of one layer. Owned and frozen experts are in separate tensors.

Shapes: N tokens, D hidden size, I inner size of an expert, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarm.config import ModelConfig
from swarm.model.attention import Attention
from swarm.model.frozen import DenseStack, FrozenFormat, FrozenStack, empty_stack
from swarm.model.masking import ALL, Tokens
from swarm.model.routing import RoutingControls, expert_capacity, gaussian, within_capacity
from swarm.model.similarity import Pair, shared_tokens, similarity
from swarm.model.swiglu import PAD_ROWS_BF16, Plan, Setting, mix_experts, plan_rows

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
Here = tuple[tuple[int, ...], tuple[int, ...]]
"""The owned and the frozen experts that a bank holds."""


class Routing(NamedTuple):
    """The decision of a router.

    Attributes:
        logits_NE: fp32, without noise. Where processes share the tokens, only this process's.
        probabilities_NE: the scores by which experts are chosen, summing to 1. Same tokens.
        weight_NK: weight of each chosen expert, 0 if it was dropped.
        expert_NK: the chosen experts, the best first.
        kept_NK: the choices within capacity. None if nothing is ever dropped.
        similarity: CKA of P pairs of experts [P]. None if it was not measured.
        pair_P2: int64 [P, 2], these pairs. None if not measured.
    """

    logits_NE: Tensor
    probabilities_NE: Tensor
    weight_NK: Tensor
    expert_NK: Tensor
    kept_NK: Tensor | None = None
    similarity: Tensor | None = None
    pair_P2: Tensor | None = None


@dataclass
class Recall:
    """A layer's routing, kept so that recomputing the layer in backward decides the same.

    Attributes:
        expert_NK: the chosen experts. None until the layer has run once.
        plan: the sorted rows of the chosen experts, kept so that the recomputation need not wait
            for the device.
    """

    expert_NK: Tensor | None = None
    plan: Plan | None = None


class Router(nn.Module):
    """Top-k router, in fp32 for every compute type.

    Softmax, or sigmoid with a bias per expert that only the choice sees. Source of the latter:
    DeepSeek-V3 (arXiv 2412.19437, eq. 12-16, without groups and scaling).
    """

    def __init__(self, model: ModelConfig, device: torch.device, tokens: Tokens = ALL) -> None:
        super().__init__()
        self._tokens = tokens
        shape = (model.num_experts, model.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device))
        self.noise_weight = self.e_score_correction_bias = None
        if model.noisy_top_k:
            self.noise_weight = nn.Parameter(torch.empty(shape, device=device))
        if model.scoring_func == "sigmoid":
            bias = torch.empty(model.num_experts, device=device)
            self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)
        self.top_k, self.renormalise = model.num_experts_per_tok, model.norm_topk_prob

    def forward(
        self,
        x_ND: Tensor,
        recall: Recall | None = None,
        controls: RoutingControls | None = None,
        owned: Sequence[int] = (),
    ) -> Routing:
        """Routes every token to its best experts.

        Args:
            x_ND: the tokens of this process.
            recall: source of the choice, if it was made before.
            controls: controls of a training step. None in evaluation.
            owned: the experts that this peer trains, which controls may favor.
        """
        logits_NE = F.linear(x_ND.float(), self.weight)
        noisy_NE = self._noisy(x_ND, logits_NE, controls)
        scores_NE = self._scores(noisy_NE)
        weight_NK, expert_NK = self._choose(noisy_NE, scores_NE, controls, owned)
        if recall is not None:
            # Also gathered the first time, because both passes must keep the same tensors for
            # backward.
            if recall.expert_NK is not None:
                expert_NK = self._tokens.own(recall.expert_NK)
            weight_NK = scores_NE.gather(-1, expert_NK)
        if self.renormalise:
            weight_NK = weight_NK / weight_NK.sum(-1, keepdim=True)
        if self.e_score_correction_bias is not None:
            scores_NE = scores_NE / scores_NE.sum(-1, keepdim=True)
        weight_NK, expert_NK = self._tokens.routed(weight_NK, expert_NK)
        routing = Routing(logits_NE, scores_NE, weight_NK, expert_NK)
        return routing if controls is None else self._dropping(routing, controls)

    def _noisy(self, x_ND: Tensor, logits_NE: Tensor, controls: RoutingControls | None) -> Tensor:
        """Noisy top-k gating. Source: Shazeer et al. (arXiv 1701.06538, eq. 4)."""
        if controls is None or self.noise_weight is None:
            return logits_NE
        scale_NE = F.softplus(F.linear(x_ND.float(), self.noise_weight))
        num_tokens, num_experts = len(x_ND) * self._tokens.ways, logits_NE.shape[1]
        noise_NE = self._tokens.own(gaussian(controls.noise_seed, num_tokens, num_experts))
        return logits_NE + noise_NE.to(x_ND.device) * scale_NE

    def _scores(self, logits_NE: Tensor) -> Tensor:
        return (
            logits_NE.softmax(-1) if self.e_score_correction_bias is None else logits_NE.sigmoid()
        )

    def _choose(
        self,
        logits_NE: Tensor,
        scores_NE: Tensor,
        controls: RoutingControls | None,
        owned: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """Scores and indices of each token's best experts. Biases affect only the choice."""
        own_E = controls.own_bias(owned, logits_NE) if controls else None
        if own_E is None and self.e_score_correction_bias is None:
            weight_NK, expert_NK = scores_NE.topk(self.top_k, dim=-1)
            return weight_NK, expert_NK
        choice_NE = scores_NE.detach()
        if own_E is not None:
            choice_NE = self._scores(logits_NE.detach() + own_E)
        if self.e_score_correction_bias is not None:
            choice_NE = choice_NE + self.e_score_correction_bias
        expert_NK = choice_NE.topk(self.top_k, dim=-1).indices
        return scores_NE.gather(-1, expert_NK), expert_NK

    def _dropping(self, routing: Routing, controls: RoutingControls) -> Routing:
        """Drops choices above the capacity.

        The weights of the other choices do not change (as in GShard).
        """
        if controls.capacity_factor is None:
            return routing
        num_tokens, num_experts = len(routing.expert_NK), routing.logits_NE.shape[1]
        capacity = expert_capacity(num_tokens, self.top_k, num_experts, controls.capacity_factor)
        kept_NK = within_capacity(routing.expert_NK, num_experts, capacity)
        return routing._replace(weight_NK=routing.weight_NK * kept_NK, kept_NK=kept_NK)

    @torch.no_grad()
    def shift(self, update_E: Tensor) -> None:
        """Moves the selection bias, which the next choice uses."""
        assert self.e_score_correction_bias is not None, "only a sigmoid router has the bias"
        self.e_score_correction_bias.add_(update_E)


class ExpertBank(nn.Module):
    """The experts of one layer.

    Owned experts are fp32 parameters `owned.gate_proj` and so on: one [owned, out, in] tensor per
    projection. Its row k is the expert `owned_here[k]`. Frozen experts are the stacks
    `frozen["gate_proj"]` and so on, in ascending order. All start uninitialized.

    Attributes:
        owned_experts: the experts that this peer trains.
        owned_here: the owned experts that this bank holds. All of them, unless other processes
            compute for the peer.
        row_of: the row of each held expert among the owned or the frozen experts.
    """

    def __init__(
        self, model: ModelConfig, storage: Storage, *, here: Sequence[int] | None = None
    ) -> None:
        """Holds the experts `here`, all of them frozen. None: every expert."""
        super().__init__()
        self.num_experts, self.compute = model.num_experts, storage.compute
        self.form = storage.frozen
        held = tuple(range(self.num_experts) if here is None else here)
        self.owned = nn.ParameterDict()
        self.frozen: dict[str, FrozenStack] = {}
        for projection, (out, into) in matrix_shapes(model).items():
            empty = torch.empty(0, out, into, device=storage.device)
            self.owned[projection] = nn.Parameter(empty)
            shape = (len(held), out, into)
            self.frozen[projection] = empty_stack(self.form, shape, storage.device)
        self._number((), ((), held), held)

    def _number(self, owned: tuple[int, ...], here: Here, order: Sequence[int]) -> None:
        """Records the places of experts. `order` is the order of all experts' rows."""
        self.owned_experts, self.owned_here = owned, here[0]
        self.row_of = {expert: row for experts in here for row, expert in enumerate(experts)}
        group_E = torch.tensor(order).argsort()
        device = self._masters("gate_proj").device
        self.register_buffer("group_of", group_E.to(device), persistent=False)

    @torch.no_grad()
    def own(self, owned: tuple[int, ...]) -> None:
        """Moves rows between the storages. Experts that stay keep their bits.

        A newly owned expert's master is its frozen value in fp32. A newly frozen expert is its
        master, rounded to the frozen format. The parameters are replaced, unless nothing changes.
        If memory runs out, nothing changes. Cost: one layer exists twice at a time.
        """
        if owned != self.owned_experts:
            here = (owned, self._others(owned))
            self._rearrange(here, lambda _: {})
            self._number(owned, here, [*here[0], *here[1]])

    def _rearrange(self, here: Here, arriving: Callable[[str], Mapping[int, Tensor]]) -> None:
        """Moves the rows of these experts to new storages.

        Args:
            here: the experts that the bank holds from now on.
            arriving: gives the matrices of a projection for experts that the bank does not hold
                yet. Called before a matrix of the projection moves.
        """
        moved = dict[str, tuple[Tensor, FrozenStack]]()
        for projection in PROJECTIONS:
            masters = self._masters(projection)
            owned, frozen = (len(experts) for experts in here)
            new_masters = masters.new_empty(owned, *masters.shape[1:])
            new_frozen = empty_stack(self.form, (frozen, *masters.shape[1:]), masters.device)
            found = arriving(projection)
            for experts, target in zip(here, (DenseStack(new_masters), new_frozen), strict=True):
                for row, expert in enumerate(experts):
                    target.put(row, self._matrix(expert, projection, found))
            moved[projection] = new_masters, new_frozen
        for projection, (new_masters, new_frozen) in moved.items():
            self.owned[projection] = nn.Parameter(new_masters)
            self.frozen[projection] = new_frozen

    def _matrix(self, expert: int, projection: str, arrived: Mapping[int, Tensor]) -> Tensor:
        if expert in arrived:
            return arrived[expert]
        stack, row = self.place(expert, projection)
        return stack.get(row)

    def hold(self, owned: tuple[int, ...], frozen: Mapping[str, FrozenStack]) -> None:
        """Uses these stacks for its frozen experts. The caller sets the parameters."""
        self.frozen = dict(frozen)
        others = self._others(owned)
        self._number(owned, (owned, others), [*owned, *others])

    def _others(self, owned: Sequence[int]) -> tuple[int, ...]:
        return tuple(expert for expert in range(self.num_experts) if expert not in owned)

    def _masters(self, projection: str) -> nn.Parameter:
        return self.get_parameter(f"owned.{projection}")

    def place(self, expert: int, projection: str) -> tuple[FrozenStack, int]:
        """The place of one matrix: a stack of fp32 masters or of the frozen form, and the row."""
        owned = expert in self.owned_here
        masters = DenseStack(self._masters(projection).detach())
        return masters if owned else self.frozen[projection], self.row_of[expert]

    def inputs(self, x_ND: Tensor) -> Tensor:
        """Tokens for the experts: `x_ND`, or where processes share tokens, those of all."""
        return x_ND

    def forward(self, x_ND: Tensor, routing: Routing, recall: Recall | None = None) -> Tensor:
        """Returns the mixed outputs of each token's experts, fp32 [N, D]. Takes `inputs`."""
        plan = recall.plan if recall else None
        if plan is None:
            plan = plan_rows(
                self.get_buffer("group_of")[routing.expert_NK],
                self.num_experts,
                len(self.owned_here),
                self.multiple(x_ND),
                routing.kept_NK,
            )
        if recall:
            recall.expert_NK, recall.plan = routing.expert_NK, plan
        return mix_experts(x_ND, routing.weight_NK, self.masters(), self.setting(plan))

    def multiple(self, x_ND: Tensor) -> int:
        """Rows of an expert are padded to a multiple of this number."""
        padded = self.compute is torch.bfloat16 and x_ND.device.type == "cpu"
        return PAD_ROWS_BF16 if padded else 1

    def masters(self) -> list[nn.Parameter]:
        """The gate, up and down matrices of the owned experts that this bank holds."""
        return [self._masters(projection) for projection in PROJECTIONS]

    def setting(self, plan: Plan) -> Setting:
        """The setting for computing the rows of a plan."""
        gate, up, down = (self.frozen[projection] for projection in PROJECTIONS)
        return Setting(plan, (gate, up, down), self.compute)

    def alike(self, x_ND: Tensor, pairs: list[Pair]) -> Tensor:
        """CKA of pairs of experts on some of the bank's `inputs`, [pairs]; see `similarity`."""
        return similarity(x_ND, pairs, self.one)

    def one(self, x_nD: Tensor, expert: int) -> Tensor:
        """The output [n, D] of one expert for some tokens, differentiable in its master."""
        row = self.row_of[expert]
        if expert in self.owned_here:
            found = [self._masters(p)[row].to(self.compute) for p in PROJECTIONS]
        else:
            rows = slice(row, row + 1)
            found = [self.frozen[p].dense(rows, self.compute)[0] for p in PROJECTIONS]
        gate, up, down = found
        x_nD = x_nD.to(self.compute)
        return F.linear(F.silu(F.linear(x_nD, gate)) * F.linear(x_nD, up), down)


MakeBank = Callable[[ModelConfig, "Storage"], ExpertBank]
"""Makes the bank of a layer."""
MakeAttention = Callable[[ModelConfig, torch.dtype, torch.device], Attention]
"""Makes the attention of a layer."""


@dataclass(frozen=True)
class Pieces:
    """The modules of a model, or of a process's part of it.

    Attributes:
        bank: makes the bank of a layer.
        attention: makes the attention of a layer.
        tokens: the tokens of this process outside of bank and attention.
    """

    bank: MakeBank = ExpertBank
    attention: MakeAttention = Attention
    tokens: Tokens = ALL


WHOLE = Pieces()


@dataclass(frozen=True)
class Storage:
    """Storage of a model's weights.

    Attributes:
        frozen: format of the experts that are not owned.
        compute: type of all matrix products.
        device: device of the weights.
        pieces: the modules that hold the weights.
    """

    frozen: FrozenFormat
    compute: torch.dtype
    device: torch.device
    pieces: Pieces = WHOLE


def matrix_shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Shape [out, in] of each of an expert's matrices."""
    inner, hidden = model.moe_intermediate_size, model.hidden_size
    return {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}


class SparseMLP(nn.Module):
    """Router and experts, which replace a dense transformer's feed-forward net."""

    def __init__(self, model: ModelConfig, storage: Storage) -> None:
        super().__init__()
        self.gate = Router(model, storage.device, storage.pieces.tokens)
        self.experts = storage.pieces.bank(model, storage)

    def forward(
        self,
        x_BTD: Tensor,
        recall: Recall | None = None,
        controls: RoutingControls | None = None,
    ) -> tuple[Tensor, Routing]:
        """Returns fp32 [B, T, D] and the router's decision."""
        x_ND = x_BTD.flatten(0, 1)
        routing = self.gate(x_ND, recall, controls, self.experts.owned_experts)
        x_ND = self.experts.inputs(x_ND)
        if controls and (controls.probe or controls.draw_apart):
            pairs = shared_tokens(routing.expert_NK, self.experts.num_experts)
            # Without the similarity loss no copy of a matrix may live until backward.
            with torch.set_grad_enabled(torch.is_grad_enabled() and controls.draw_apart):
                found = self.experts.alike(x_ND, pairs)
            experts = torch.tensor([pair.experts for pair in pairs], dtype=torch.int64)
            routing = routing._replace(similarity=found, pair_P2=experts.view(-1, 2))
        return self.experts(x_ND, routing, recall).view_as(x_BTD), routing
