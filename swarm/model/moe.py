"""Router and experts of one layer; owned and frozen experts lie in separate tensors.

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
        logits_NE: fp32, without noise; where processes share the tokens those of this one's.
        probabilities_NE: the scores by which experts are chosen, summing to 1; likewise.
        weight_NK: weight of each chosen expert; 0 where it was dropped.
        expert_NK: the chosen experts, the best first.
        kept_NK: which choices found a place; None when nothing is ever dropped.
        similarity: CKA of P pairs of experts [P]; None where it was not measured.
        pair_P2: int64 [P, 2], these pairs; likewise.
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
    """A layer's routing, kept so that computing the layer again for backward decides the same.

    Attributes:
        expert_NK: the chosen experts; None until the layer has run once.
        plan: their rows, sorted; with it nothing waits for the device a second time.
    """

    expert_NK: Tensor | None = None
    plan: Plan | None = None


class Router(nn.Module):
    """Top-k router; fp32 whatever the compute type.

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
            x_ND: the tokens, of this process where several share them.
            recall: where the choice is taken from, if it has been made before.
            controls: of a training step; None in evaluation.
            owned: the experts that this peer trains, which controls may favour.
        """
        logits_NE = F.linear(x_ND.float(), self.weight)
        noisy_NE = self._noisy(x_ND, logits_NE, controls)
        scores_NE = self._scores(noisy_NE)
        weight_NK, expert_NK = self._choose(noisy_NE, scores_NE, controls, owned)
        if recall is not None:
            # Gathered the first time too: both passes must keep the same tensors for backward.
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
        """The scores of each token's best experts, and these; biases count in the choice alone."""
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
        """Drops choices above the capacity; those left are not weighted up (as in GShard)."""
        if controls.capacity_factor is None:
            return routing
        num_tokens, num_experts = len(routing.expert_NK), routing.logits_NE.shape[1]
        capacity = expert_capacity(num_tokens, self.top_k, num_experts, controls.capacity_factor)
        kept_NK = within_capacity(routing.expert_NK, num_experts, capacity)
        return routing._replace(weight_NK=routing.weight_NK * kept_NK, kept_NK=kept_NK)

    @torch.no_grad()
    def shift(self, update_E: Tensor) -> None:
        """Moves the selection bias; the next token is chosen by it."""
        assert self.e_score_correction_bias is not None, "only a sigmoid router has the bias"
        self.e_score_correction_bias.add_(update_E)


class ExpertBank(nn.Module):
    """The experts of one layer.

    Owned experts are fp32 parameters `owned.gate_proj` and so on, one [owned, out, in] tensor
    per projection whose row k is the expert `owned_here[k]`. Frozen experts are the stacks
    `frozen["gate_proj"]` and so on, in ascending order. All start uninitialised.

    Attributes:
        owned_experts: those that this peer trains.
        owned_here: of these the ones that this bank holds; all, where no other process computes
            for the peer.
        row_of: the row of each expert that it holds, among the owned or the frozen ones.
    """

    def __init__(
        self, model: ModelConfig, storage: Storage, *, here: Sequence[int] | None = None
    ) -> None:
        """Holds the experts `here`, all of them frozen; None for every expert."""
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
        """Remembers who is where; `order` is that in which the rows of all experts are sorted."""
        self.owned_experts, self.owned_here = owned, here[0]
        self.row_of = {expert: row for experts in here for row, expert in enumerate(experts)}
        group_E = torch.tensor(order).argsort()
        device = self._masters("gate_proj").device
        self.register_buffer("group_of", group_E.to(device), persistent=False)

    @torch.no_grad()
    def own(self, owned: tuple[int, ...]) -> None:
        """Moves rows between the storages; experts that stay where they are keep their bits.

        A newly owned expert's master is its frozen value in fp32; a newly frozen one is its
        master rounded to the frozen format. Replaces the parameters, unless nothing changes, or
        memory runs out: then all is as it was.

        Cost: one layer exists twice at a time.
        """
        if owned != self.owned_experts:
            here = (owned, self._others(owned))
            self._rearrange(here, lambda _: {})
            self._number(owned, here, [*here[0], *here[1]])

    def _rearrange(self, here: Here, arriving: Callable[[str], Mapping[int, Tensor]]) -> None:
        """Moves the rows of these experts to new storages.

        Args:
            here: those that it holds from now on.
            arriving: the matrices of a projection of those that it does not hold yet; asked for
                before a matrix of the projection moves.
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
        """Takes these stacks for its frozen experts; the caller sets the parameters besides."""
        self.frozen = dict(frozen)
        others = self._others(owned)
        self._number(owned, (owned, others), [*owned, *others])

    def _others(self, owned: Sequence[int]) -> tuple[int, ...]:
        return tuple(expert for expert in range(self.num_experts) if expert not in owned)

    def _masters(self, projection: str) -> nn.Parameter:
        return self.get_parameter(f"owned.{projection}")

    def place(self, expert: int, projection: str) -> tuple[FrozenStack, int]:
        """Where one matrix lies: a stack, of fp32 masters or of the frozen form, and the row."""
        owned = expert in self.owned_here
        masters = DenseStack(self._masters(projection).detach())
        return masters if owned else self.frozen[projection], self.row_of[expert]

    def inputs(self, x_ND: Tensor) -> Tensor:
        """The tokens that it computes with: these; of several processes that share them, all."""
        return x_ND

    def forward(self, x_ND: Tensor, routing: Routing, recall: Recall | None = None) -> Tensor:
        """Returns the mixed outputs of each token's experts, fp32 [N, D]; takes `inputs`."""
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
        """Rows of an expert are padded to a multiple of this."""
        padded = self.compute is torch.bfloat16 and x_ND.device.type == "cpu"
        return PAD_ROWS_BF16 if padded else 1

    def masters(self) -> list[nn.Parameter]:
        """The gate, up and down matrices of the owned experts that it holds."""
        return [self._masters(projection) for projection in PROJECTIONS]

    def setting(self, plan: Plan) -> Setting:
        """With what the rows of a plan are computed."""
        gate, up, down = (self.frozen[projection] for projection in PROJECTIONS)
        return Setting(plan, (gate, up, down), self.compute)

    def alike(self, x_ND: Tensor, pairs: list[Pair]) -> Tensor:
        """CKA of pairs of experts on some of its `inputs`, [pairs]; see `similarity`."""
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
    """What a model is made of; of several processes that share it, what each has of it.

    Attributes:
        bank: makes what holds the experts of a layer.
        attention: makes the attention of a layer.
        tokens: those that it has outside of both.
    """

    bank: MakeBank = ExpertBank
    attention: MakeAttention = Attention
    tokens: Tokens = ALL


WHOLE = Pieces()


@dataclass(frozen=True)
class Storage:
    """How the weights of a model are kept.

    Attributes:
        frozen: format of the experts that are not owned.
        compute: type of all matrix products.
        device: where they lie.
        pieces: what holds them.
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
    """Router and experts, in the place of a dense transformer's feed-forward net."""

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
            # Without its loss no copy of a matrix may live until backward.
            with torch.set_grad_enabled(torch.is_grad_enabled() and controls.draw_apart):
                found = self.experts.alike(x_ND, pairs)
            experts = torch.tensor([pair.experts for pair in pairs], dtype=torch.int64)
            routing = routing._replace(similarity=found, pair_P2=experts.view(-1, 2))
        return self.experts(x_ND, routing, recall).view_as(x_BTD), routing
