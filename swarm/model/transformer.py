"""The decoder: a Qwen3-MoE (or OLMoE) whose experts are owned or frozen.

Shapes: B sequences, T tokens of a sequence, N = B * T, D hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from swarm.config import LossConfig, ModelConfig
from swarm.errors import BadBlob
from swarm.experts import EMBEDDING, all_shapes, misfit, place_of, unknown
from swarm.model import moe
from swarm.model.attention import Positions, RMSNorm, rotary_tables
from swarm.model.frozen import DenseStack, FrozenFormat, FrozenStack
from swarm.model.losses import LayerTerms, Losses, combine, of_all, output_losses
from swarm.model.masking import UNMASKED, Documents, Masked
from swarm.model.routing import RoutingControls, bias_update
from swarm.model.stage import Stage

ComputeType = Literal["fp32", "bf16", "fp16"]
Recompute = Literal["none", "layer", "routing"]
"""What backward recomputes: nothing, each layer, or each layer except its routing."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class DecoderLayer(nn.Module):
    """Attention and experts, each after a norm and with a residual connection."""

    def __init__(self, model: ModelConfig, storage: moe.Storage) -> None:
        super().__init__()
        device = storage.device
        self.input_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps, device)
        self.self_attn = storage.pieces.attention(model, storage.compute, device)
        self.post_attention_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps, device)
        self.mlp = moe.SparseMLP(model, storage)

    def forward(
        self,
        x_BTD: Tensor,
        positions: Positions,
        recall: moe.Recall | None = None,
        controls: RoutingControls | None = None,
    ) -> tuple[Tensor, moe.Routing]:
        """Returns the next residual stream, fp32 [B, T, D], and the router's decision.

        With `recall` the first pass stores the routing there, and later passes reuse it.
        `controls` are the layer's controls in a training step.
        """
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), positions)
        mixed_BTD, routing = self.mlp(self.post_attention_layernorm(x_BTD), recall, controls)
        return x_BTD + mixed_BTD, routing


class Decoder(nn.Module):
    """Embedding, layers and the last norm, or the part of these in one stage of a pipeline.

    Where processes share a micro-batch, the residual stream of each process is [1, n, D] for its n
    tokens.

    Attributes:
        stage: the present part of the model. Other layers are missing.
        tokens: the tokens of its residual stream.
    """

    def __init__(self, model: ModelConfig, storage: moe.Storage, stage: Stage) -> None:
        super().__init__()
        device, self.stage, self.tokens = storage.device, stage, storage.pieces.tokens
        if stage.holds(EMBEDDING, tied=model.tie_word_embeddings):
            self.embed_tokens = nn.Embedding(
                _weight=torch.empty(model.vocab_size, model.hidden_size, device=device),
                num_embeddings=model.vocab_size,
                embedding_dim=model.hidden_size,
            )
        self.layers = nn.ModuleList(
            DecoderLayer(model, storage) if layer in stage.layers else nn.Identity()
            for layer in range(model.num_hidden_layers)
        )
        if stage.is_last:
            self.norm = RMSNorm(model.hidden_size, model.rms_norm_eps, device)
        self.dim_per_head, self.rope_theta = model.dim_per_head, model.rope_theta
        self.recompute: Recompute = "none"

    def forward(
        self,
        input_ids_BT: Tensor,
        controls: RoutingControls | None = None,
        documents: Documents | None = None,
    ) -> tuple[Tensor, list[moe.Routing]]:
        """Returns the normalized last residual stream, fp32 [B, T, D], and each layer's routing."""
        x_BTD = self.embedded(input_ids_BT)
        length = input_ids_BT.shape[1]
        x_BTD, routings = self.through(x_BTD, length, controls, documents)
        return self.norm(x_BTD), routings

    def embedded(self, input_ids_BT: Tensor) -> Tensor:
        """Returns the first residual stream, fp32 [B, T, D]."""
        x_nD: Tensor = self.embed_tokens(self.tokens.own(input_ids_BT.flatten()))
        return x_nD.view(*self.tokens.shape(*input_ids_BT.shape), -1)

    def through(
        self,
        x_BTD: Tensor,
        length: int,
        controls: RoutingControls | None = None,
        documents: Documents | None = None,
        layers: Sequence[int] | None = None,
    ) -> tuple[Tensor, list[moe.Routing]]:
        """Passes the residual stream, fp32 [B, T, D], through the stage or some of its layers.

        `length` is T, even where processes share the tokens.
        """
        positions = rotary_tables(length, self.dim_per_head, self.rope_theta, x_BTD.device)
        positions = positions._replace(documents=documents)
        routings = []
        for index in layers or self.stage.layers:
            placed = functools.partial(self.layers[index], positions=positions)
            x_BTD, routing = self._run(placed, x_BTD, controls and controls.part(index))
            routings.append(routing)
        return x_BTD, routings

    def without_tokens(
        self, controls: RoutingControls | None = None, among: Sequence[int] | None = None
    ) -> Tensor:
        """Passes no tokens through the experts of the stage or some of its layers.

        Returns:
            A 0 whose backward passes through the experts again, for other processes with tokens.
        """
        indices = among or self.stage.layers
        layers = [(index, self.get_submodule(f"layers.{index}")) for index in indices]
        weight = layers[0][1].get_parameter("input_layernorm.weight")
        x_BTD = weight.new_empty(0, 1, len(weight)).requires_grad_()
        for index, layer in layers:
            mlp = layer.get_submodule("mlp")
            x_BTD, _ = self._run(mlp, x_BTD, controls and controls.part(index))
        return x_BTD.sum()

    def _run(
        self,
        layer: Callable[..., tuple[Tensor, moe.Routing]],
        x_BTD: Tensor,
        controls: RoutingControls | None,
    ) -> tuple[Tensor, moe.Routing]:
        if self.recompute == "none" or not torch.is_grad_enabled():
            return layer(x_BTD, controls=controls)
        # Noise comes from a seed, so there is no state of a generator to keep.
        out: tuple[Tensor, moe.Routing] = checkpoint(
            layer,
            x_BTD,
            recall=moe.Recall() if self.recompute == "routing" else None,
            controls=controls,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        return out


class Transformer(nn.Module):
    """The full model of a run as one peer holds it.

    Shared tensors and owned experts are fp32 parameters. The other experts are frozen: forward uses
    them, and backward passes through them, but they get no gradients. Weights are uninitialized
    until they are written.

    Args:
        model: sizes and variants.
        owned: the experts that this peer trains, in every layer.
        frozen: storage of the other experts.
        compute: type of all matrix products. Norms, router, softmaxes and losses stay fp32.
        recompute: layers that backward computes again.
        device: device of all tensors.
        pieces: the model's components.
        stage: the model's layers, with the ends next to them. None: all layers.

    Attributes:
        stage: the present part of the model.
        banks: the holders of experts, by layer.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        owned: Sequence[int] = (),
        frozen: FrozenFormat = "bf16",
        compute: ComputeType = "fp32",
        recompute: Recompute = "none",
        device: torch.device | str = "cpu",
        pieces: moe.Pieces = moe.WHOLE,
        stage: Stage | None = None,
    ) -> None:
        super().__init__()
        device = torch.device(device)
        self.config, self.compute = model, DTYPES[compute]
        self.stage = stage or Stage.whole(model)
        storage = moe.Storage(frozen, self.compute, device, pieces)
        self.model = Decoder(model, storage, self.stage)
        self.model.recompute = recompute
        if self.stage.is_last and not model.tie_word_embeddings:
            self.lm_head = nn.Linear(model.hidden_size, model.vocab_size, bias=False, device=device)
        found = (module for module in self.modules() if isinstance(module, moe.ExpertBank))
        self.banks = dict(zip(self.stage.layers, found, strict=True))
        here = {name: tuple(each.shape) for name, each in self.named_parameters()}
        self._shapes = {name: here.get(name, shape) for name, shape in all_shapes(model).items()}
        self.own(owned)

    @property
    def owned(self) -> tuple[int, ...]:
        """The experts that this peer trains, sorted."""
        return self._bank.owned_experts

    @property
    def owned_here(self) -> tuple[int, ...]:
        """Owned experts whose masters are in this model: all, unless processes share experts."""
        return self._bank.owned_here

    def own(self, experts: Sequence[int]) -> None:
        """Makes exactly these experts owned. `ExpertBank.own` describes the changes of rows.

        The parameters of the experts are new objects afterwards, unless nothing changed.
        """
        owned = tuple(sorted(set(experts)))
        assert all(0 <= expert < self.config.num_experts for expert in owned), owned
        for bank in self.banks.values():
            bank.own(owned)

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that get gradients, by stable name, in the order of the layers.

        Shared tensors have their Hugging Face name. Owned experts are stacked per layer and
        projection, such as `model.layers.0.mlp.experts.owned.gate_proj` [owned, I, D], with expert
        `owned_here[k]` in row k. Without owned experts there are no stacks.
        """
        return {
            name: value
            for name, value in self.named_parameters()
            if value.numel() and value.requires_grad
        }

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors by Hugging Face name, in their stored form.

        Returns:
            Detached views of the live storage: shared tensors and owned experts in fp32, frozen
                experts in their own type. int8 experts are fp32 copies.

        Raises:
            BadBlob: a name that the model does not have.
        """
        return {name: stack.get(row) for name, (stack, row) in self._places(names).items()}

    @torch.no_grad()
    def write(self, named: Mapping[str, Tensor]) -> None:
        """Copies tensors into the model by Hugging Face name, rounded to their storage.

        Raises:
            BadBlob: an unknown name or a wrong shape. Nothing is written then.
        """
        places = self._places(named)
        for name, tensor in named.items():
            if why := misfit(name, (*tensor.shape,), self.shape(name)):
                raise BadBlob("shape", why)
        for name, tensor in named.items():
            stack, row = places[name]
            stack.put(row, tensor)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor with a Hugging Face name. Raises BadBlob like `read`."""
        if name not in self._shapes:
            raise BadBlob("name", unknown(name))
        return self._shapes[name]

    def forward(self, input_ids_BT: Tensor) -> Tensor:
        """Returns the logits, fp32 [B, T, V]. For inspection only: training uses `losses`."""
        hidden_BTD, _ = self.model(input_ids_BT)
        hidden_BTD = hidden_BTD.to(self.compute)
        return F.linear(hidden_BTD, self._head().to(self.compute)).float()

    def losses(
        self,
        tokens_BT1: Tensor,
        loss: LossConfig,
        controls: RoutingControls | None = None,
        masked: Masked = UNMASKED,
    ) -> Losses:
        """Losses of one micro-batch.

        Args:
            tokens_BT1: B sequences of T + 1 token ids. Each id predicts the next id.
            loss: weights of the terms.
            controls: controls of a training step. None in evaluation.
            masked: masks of attention and predictions. The router's terms are always means over all
                tokens, because the router handles all of them.
        """
        hidden_BTD, routings = self.model(tokens_BT1[:, :-1], controls, masked.documents)
        terms = [LayerTerms.of(routing) for routing in routings]
        return self.losses_of(hidden_BTD, terms, tokens_BT1, loss, controls=controls, masked=masked)

    def losses_of(
        self,
        hidden_BTD: Tensor,
        terms: Sequence[LayerTerms],
        tokens_BT1: Tensor,
        loss: LossConfig,
        *,
        controls: RoutingControls | None = None,
        masked: Masked = UNMASKED,
    ) -> Losses:
        """Like `losses`, from the normalized last residual stream and the terms of all routers."""
        tokens = self.model.tokens
        hidden_ND, labels_N, mean_over = masked.scored(hidden_BTD, tokens_BT1[:, 1:], tokens)
        hidden_ND = hidden_ND.to(self.compute)
        own = output_losses(hidden_ND, self._head(), labels_N, loss.output_z_weight, mean_over)
        output, terms = of_all(tokens, own, terms)
        weight_E = controls.count_weights(self.owned, terms[0].mean_E[None]) if controls else None
        return combine(output, terms, loss, weight_E)

    def balance(self, tokens_LE: Tensor, rate: float) -> None:
        """Moves the routers' selection biases by the loads of all layers; see `bias_update`."""
        routers = [module for module in self.modules() if isinstance(module, moe.Router)]
        updates_lE = bias_update(tokens_LE, rate)[list(self.stage.layers)]
        for router, update_E in zip(routers, updates_lE, strict=True):
            router.shift(update_E)

    @property
    def _bank(self) -> moe.ExpertBank:
        """Any bank, since all own the same experts."""
        return self.banks[self.stage.layers[0]]

    def _head(self) -> Tensor:
        tied = self.config.tie_word_embeddings
        return self.model.embed_tokens.weight if tied else self.lm_head.weight

    def _places(self, names: Iterable[str]) -> dict[str, tuple[FrozenStack, int]]:
        """The places of tensors: a stack and the row in it."""
        banks = self.banks
        places: dict[str, tuple[FrozenStack, int]] = {}
        for name in names:
            self.shape(name)
            place = place_of(name)
            if place is None:
                places[name] = (DenseStack(self.get_parameter(name).detach()[None]), 0)
            else:
                layer, expert, projection = place
                places[name] = banks[layer].place(expert, f"{projection}_proj")
        return places
