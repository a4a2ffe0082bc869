"""Bytes of the activations of one micro-batch. Pure arithmetic.

The formulas follow the tensors that autograd functions of `swarm.model` keep, and tests compare
them with living tensors. `c` is the size of an element in the compute type.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from swarm.config import RunConfig
from swarm.model.attention import BLOCK_TOKENS, SHORT_TOKENS, repeats_keys
from swarm.model.losses import ALIGNED_ROWS, slice_tokens
from swarm.model.masking import WASTE
from swarm.model.swiglu import GROUPED_ROWS, PAD_ROWS_BF16, has_grouped_kernel
from swarm.model.transformer import DTYPES
from swarm.train.engine.engine_options import EngineOptions


@dataclass(frozen=True)
class Rows:
    """The (token, expert) pairs of one layer and micro-batch on a rank.

    Attributes:
        sent: pairs of the rank's own tokens, with experts on any rank.
        received: pairs of the rank's experts, with tokens of any rank.
        computed: received pairs and padding.
        largest: the most computed pairs of one expert.
    """

    sent: float
    received: float
    computed: float
    largest: float

    @classmethod
    def even(cls, run: RunConfig, options: EngineOptions) -> Rows:
        """Equal numbers for all experts; in bf16 on a CPU, with half a group's padding each."""
        tokens = run.train.micro_batch_sequences * run.data.sequence_length
        rows, experts = tokens * run.model.num_experts_per_tok, run.model.num_experts / options.ep
        padded = DTYPES[options.compute].itemsize == 2 and options.device != "cuda"
        received = rows / options.tp  # without tp, also rows of other ranks' tokens
        computed = received + (PAD_ROWS_BF16 / 2 * experts if padded else 0)
        return cls(rows, received, computed, computed / experts)

    def crowded(self, more: float) -> Rows:
        """The same numbers with more rows for the rank's experts; 0.25 adds a quarter."""
        times = 1 + more
        return replace(
            self,
            received=times * self.received,
            computed=times * self.computed,
            largest=times * self.largest,
        )


class MicroBatchBytes:
    """Bytes that the model's autograd functions keep for one micro-batch."""

    def __init__(self, run: RunConfig, options: EngineOptions, rows: Rows | None = None) -> None:
        """`rows`: of the layer; None for even routing."""
        self.run, self.model, self.options = run, run.model, options
        self.tokens = run.train.micro_batch_sequences * run.data.sequence_length
        self.own = self.tokens / options.tp  # outside of attention and experts
        self.compute = DTYPES[options.compute].itemsize
        self.is_fast_gpu = options.device == "cuda" and self.compute < 4
        self.grouped = self.is_fast_gpu and has_grouped_kernel(DTYPES[options.compute])
        self.experts = run.model.num_experts / options.ep
        self.rows = rows or Rows.even(run, options)
        self.travels = options.ep > 1 and options.tp == 1  # rows go to other ranks

    def checkpoint(self) -> float:
        """The residual stream, fp32."""
        return 4.0 * self.own * self.model.hidden_size

    def routing(self, *, gradients: bool = False) -> float:
        """Logits, probabilities, weights and rows of one layer.

        Args:
            gradients: whether to add the gradients of logits and probabilities.
        """
        model = self.model
        each = 4 * (4 if gradients else 2) * model.num_experts + 4
        choice = model.num_experts_per_tok * (4 + 8)  # weights and numbers of the chosen experts
        of_all = self.tokens * choice if self.options.tp > 1 else 0
        return self.own * (each + choice) + of_all + self.sorted_rows()

    def sorted_rows(self) -> float:
        """Index tensors of a layer's rows, here and on the ranks that compute the rows."""
        pairs = self.tokens * self.model.num_experts_per_tok
        rows = self.rows
        if self.options.tp > 1:
            # Token and pair of the rank's own rows. For all pairs: the row, whether the row is the
            # rank's own, and another copy of the weights.
            return pairs * (8.0 + 2 + 4) + 8.0 * 2 * rows.computed
        if not self.travels:
            return 8.0 * 3 * pairs
        return 8.0 * (2 * rows.sent + pairs + 2 * rows.computed + rows.received)

    def kept(self) -> float:
        """Bytes that the graph of one layer keeps for its backward."""
        model, c = self.model, self.compute
        hidden, head = model.hidden_size, model.dim_per_head
        queries = model.num_attention_heads * head / self.options.tp
        keys = model.num_key_value_heads * head / self.options.tp
        # The input of attention.
        per_token: float = c * hidden
        # Projections before their norms; rotated ones; values; the output.
        per_token += c * (queries + keys) if model.qk_norm != "none" else 0
        repeated = repeats_keys(self.options.device == "cuda", DTYPES[self.options.compute])
        attended = queries if repeated else keys
        per_token += c * (queries + 2 * attended) * self.places() + c * queries
        # The concatenated outputs of single documents, and the place of each token in them.
        per_token += self.places() * (c * queries + 8) if self.places() > 1 else 0
        experts = c * self.rows.computed * 2 * model.moe_intermediate_size
        experts += c * hidden * self.inputs()
        # Inputs of both norms and of the router in fp32, and the scales of both norms.
        residual = 3 * self.checkpoint() + self.own * 4 * 2
        kept = residual + self.tokens * (per_token + 4 * self.scales()) + experts
        return kept + self.routing() + self.scores()

    def kept_again(self) -> float:
        """Bytes of `kept` for a recomputed layer.

        The layer's input and rows are counted elsewhere; a gradient of the router is added.
        """
        probabilities = 4 * self.own * self.model.num_experts
        return self.kept() - self.checkpoint() - self.routing() + probabilities

    def scales(self) -> float:
        """Scales of a token in attention: one for each norm, and one for each head's softmax."""
        model, tp = self.model, self.options.tp
        heads = model.num_attention_heads / tp
        of_norms = {"none": 0, "projection": 2, "head": heads + model.num_key_value_heads / tp}
        return of_norms[model.qk_norm] + heads

    def places(self) -> float:
        """The most places in attention for each token; more than 1 if documents are padded."""
        return WASTE if self.run.data.attention == "document" else 1

    def inputs(self) -> float:
        """Number of kept inputs of experts: one for each row that is sent, else for each token.

        In fp32, a token's input is also the router's input, and is counted there unless another
        rank sent the token.
        """
        if self.travels:
            return self.rows.received
        return self.tokens if self.compute < 4 or self.options.tp > 1 else 0

    def scores(self) -> float:
        """Softmax of short sequences, without masked keys; bf16 attention on a CPU keeps it."""
        length = self.run.data.sequence_length
        if self.compute != 2 or self.is_fast_gpu or length > SHORT_TOKENS:
            return 0.0
        keys = (length + min(length, BLOCK_TOKENS)) / 2
        heads = self.model.num_attention_heads / self.options.tp
        return self.compute * self.tokens * self.places() * keys * heads

    def cast_matrices(self, layer_cast: int) -> float:
        """Bytes of a layer's copies in the compute type, if the graph keeps them."""
        kept = self.compute < 4 and self.options.shards == 1  # sharded state has copies anyway
        return self.compute * layer_cast if kept else 0.0

    def backward(self, layer_owned: int, frozen_layer: float) -> float:
        """Additional bytes during the backward pass of one layer.

        Args:
            layer_owned: parameters of the layer's owned experts.
            frozen_layer: bytes of the frozen experts of the layer.
        """
        model, c, rows = self.model, self.compute, self.rows
        # One expert at a time, or a grouped product of a stack, in pieces if there are many rows.
        together = rows.largest
        if self.grouped:
            together = min(rows.computed, max(GROUPED_ROWS, rows.largest))
        products = c * together * (2 * model.hidden_size + 4 * model.moe_intermediate_size)
        is_cast = c < 4 and self.options.alike[1] == 1
        dense = (layer_owned * c if is_cast else 0) + frozen_layer
        products += dense if self.grouped else dense / self.experts
        # The gradients of the rows, and of the residual stream.
        row, in_fp32 = c * model.hidden_size, 4.0 * self.tokens * model.hidden_size
        gathered = (row + 4 + c) * rows.computed + self.checkpoint()
        if self.options.tp > 1:
            gathered += in_fp32  # of all tokens
        # Once the products are freed, the rows of each token are added up in fp32.
        adding = 2 * in_fp32
        if not self.travels:
            gathered += row * self.tokens if c < 4 else 0  # a copy in the compute type
        else:
            # Gradients of outputs on both ranks, and of rows on their way back, each with the
            # number that travels with it.
            gathered += row * rows.sent + (row + 4) * rows.received
            packed = (row + 4) * (rows.computed + rows.received)
            adding = (row + 4) * rows.sent + max(adding, packed)
        return gathered + max(products, adding) + 4 * layer_owned

    def head(self, table: int) -> float:
        """Bytes while the loss and its gradient are formed."""
        c, hidden = self.compute, self.model.hidden_size
        elements = self.slice_tokens() * self.model.vocab_size
        # A CPU holds a product, and a copy of it in fp32, before it is added to the gradient.
        product = (c + 4) * table if c < 4 and not self.is_fast_gpu else 0
        is_copy = self.options.shards > 1 and not self.model.tie_word_embeddings
        cast = c * table if c < 4 and not is_copy else 0
        # First the gradient and the head in the compute type, then the gradient times the scale.
        slices = max(self.logits(), c * elements + product)
        matrices = max(4 * table + cast + slices, 2 * 4 * table)
        # The last residual stream, its norm, the norm in the compute type, and its gradient.
        return matrices + self.own * hidden * (4 + 4 + (c if c < 4 else 0) + c)

    def evaluated(self, table: int, frozen: str) -> float:
        """Bytes of an evaluation in fp32 without a graph; the residual stream is not counted.

        Args:
            table: parameters of the head.
            frozen: form of the frozen experts, which are converted one at a time.
        """
        model, stream, rows = self.model, self.checkpoint(), self.rows
        queries = model.num_attention_heads * model.dim_per_head
        keys = model.num_key_value_heads * model.dim_per_head
        own = queries > keys and repeats_keys(self.options.device == "cuda", torch.float32)
        repeated = 2 * queries if own else 0
        attention = 2 * stream + 4 * self.tokens * (2 * queries + 2 * keys + repeated)
        # The next expert's matrices are converted before the last one's are freed.
        inner, hidden = model.moe_intermediate_size, model.hidden_size
        matrices = 0 if frozen == "fp32" else 2 * 4 * 3 * inner * hidden
        products = matrices + 4 * rows.largest * (hidden + inner)
        adding = min(model.num_experts_per_tok, 3) * stream
        experts = 2 * stream + self.routing() + 4 * rows.computed * (2 * inner + hidden)
        experts += max(products, adding)
        padded = 4 * table if model.vocab_size % ALIGNED_ROWS[self.options.device] else 0
        return max(attention, experts, 2 * stream + padded + self.logits())

    def slice_tokens(self) -> int:
        """Number of tokens whose logits exist at the same time."""
        return slice_tokens(math.ceil(self.own), self.model.vocab_size, self.options.device)

    def logits(self) -> float:
        """A slice of logits with its exponentials in fp32, which replace logits in fp32."""
        c = self.compute
        return (4 if c == 4 else c + 4) * self.slice_tokens() * self.model.vocab_size
