"""Bytes of the activations of one micro-batch. Pure arithmetic; letters as in `memory.py`.

Derived from what the autograd functions of `swarm.model` keep, and held against living tensors.
"""

from __future__ import annotations

from swarm.config import RunConfig
from swarm.model.attention import BLOCK_TOKENS, SHORT_TOKENS
from swarm.model.losses import slice_tokens
from swarm.model.masking import WASTE
from swarm.model.rows import GROUPED_ROWS
from swarm.model.swiglu import PAD_ROWS_BF16
from swarm.model.transformer import DTYPES
from swarm.train.options import EngineOptions


class MicroBatchBytes:
    """Activations of one micro-batch, as the autograd functions of the model keep them."""

    def __init__(self, run: RunConfig, options: EngineOptions) -> None:
        self.run, self.model, self.options = run, run.model, options
        self.tokens = run.train.micro_batch_sequences * run.data.sequence_length
        self.compute = DTYPES[options.compute].itemsize
        self.grouped = options.device == "cuda"
        self.experts = run.model.num_experts / options.ep
        self.travels = options.ep > 1 and options.tp == 1  # rows go to other ranks

    def checkpoint(self) -> float:
        """The residual stream, fp32."""
        return 4.0 * self.tokens * self.model.hidden_size

    def routing(self, *, gradients: bool = False) -> float:
        """Logits and probabilities, weights, and rows of one layer; with the gradients of both."""
        model = self.model
        each = 4 * (4 if gradients else 2) * model.num_experts + 4
        each += model.num_experts_per_tok * (4 + 8)  # the choice, and its weights
        return self.tokens * each + self.sorted_rows()

    def sorted_rows(self) -> float:
        """Where the rows of a layer lie, here and where they are computed if that is elsewhere."""
        pairs = self.tokens * self.model.num_experts_per_tok
        if self.options.tp > 1:
            # Of its own rows token and pair; of all pairs the row, which are its own, and for these
            # another copy of the weights.
            return pairs * (8.0 + 16 / self.options.tp + 2 + 4)
        return 8.0 * (6 if self.travels else 3) * pairs

    def kept(self) -> float:
        """Bytes that the graph of one layer keeps for its backward."""
        model, c = self.model, self.compute
        hidden, head = model.hidden_size, model.dim_per_head
        queries = model.num_attention_heads * head / self.options.tp
        keys = model.num_key_value_heads * head / self.options.tp
        # Inputs of both norms and of the router in fp32, of attention and of experts.
        per_token: float = 4 * 3 * hidden + c * hidden
        # Projections before their norms; rotated ones; values; the output.
        per_token += c * (queries + keys) if model.qk_norm != "none" else 0
        per_token += c * (queries + 2 * keys) * self.places() + c * queries
        # The output of each document by itself, put together, and which token is where.
        per_token += self.places() * (c * queries + 8) if self.places() > 1 else 0
        experts = c * self.rows() * 2 * model.moe_intermediate_size
        experts += c * hidden * self.inputs()
        kept = self.tokens * (per_token + 4 * self.scales()) + experts
        return kept + self.routing() + self.scores()

    def kept_again(self) -> float:
        """The same where the layer's input, its rows and a gradient of its router are kept."""
        probabilities = 4 * self.tokens * self.model.num_experts
        return self.kept() - self.checkpoint() - self.routing() + probabilities

    def scales(self) -> float:
        """Numbers of a token: of the norms, and of the softmax of each head."""
        model, tp = self.model, self.options.tp
        heads = model.num_attention_heads / tp
        of_norms = {"none": 0, "projection": 2, "head": heads + model.num_key_value_heads / tp}
        return 2 + of_norms[model.qk_norm] + heads

    def places(self) -> float:
        """Places in attention for each token, at most."""
        return WASTE if self.run.data.attention == "document" else 1

    def rows(self) -> float:
        """Rows that experts compute; half a group's padding for each in bf16 on a CPU."""
        rows = self.tokens * self.model.num_experts_per_tok / self.options.tp
        padded = self.compute == 2 and not self.grouped
        return rows + (PAD_ROWS_BF16 / 2 * self.experts if padded else 0)

    def inputs(self) -> float:
        """Inputs of experts that are kept: one for each row that has travelled, else of a token.

        In fp32 that of a token is the router's.
        """
        if self.travels:
            return self.tokens * self.model.num_experts_per_tok
        return self.tokens if self.compute < 4 else 0

    def scores(self) -> float:
        """Softmax of short sequences, which bf16 attention on a CPU keeps, without the future."""
        length = self.run.data.sequence_length
        if self.compute != 2 or self.grouped or length > SHORT_TOKENS:
            return 0.0
        keys = (length + min(length, BLOCK_TOKENS)) / 2
        heads = self.model.num_attention_heads / self.options.tp
        return self.compute * self.tokens * self.places() * keys * heads

    def cast_matrices(self, layer_cast: int) -> float:
        """So many parameters of a layer in the compute type, kept beside their masters."""
        kept = self.compute < 4 and self.options.shards == 1  # else they are there anyway
        return self.compute * layer_cast if kept else 0.0

    def backward(self, layer_owned: int, frozen_layer: float) -> float:
        """Bytes beside all that while one layer goes backward.

        Args:
            layer_owned: parameters of the layer's owned experts.
            frozen_layer: bytes of its frozen ones.
        """
        model, c = self.model, self.compute
        rows = self.rows()
        # On a CPU one expert at a time; a grouped product takes a stack, in pieces if it is long.
        one_expert = rows / self.experts
        together = min(rows, max(GROUPED_ROWS, one_expert)) if self.grouped else one_expert
        products = c * together * (2 * model.hidden_size + 4 * model.moe_intermediate_size)
        is_cast = c < 4 and self.options.alike[1] == 1
        dense = (layer_owned * c if is_cast else 0) + frozen_layer
        products += dense if self.grouped else dense / self.experts
        # The gradients of the rows, and of the residual stream.
        gathered = c * rows * model.hidden_size + self.checkpoint() + rows * (4 + c)
        # Once the products are gone the rows of each token are added up in fp32.
        adding = 2 * self.checkpoint()
        if not self.travels:
            gathered += c * self.tokens * model.hidden_size if c < 4 else 0  # as products take it
        else:
            # Gradients of outputs, here and there, and those of rows on their way back.
            travelling = c * self.inputs() * model.hidden_size
            gathered += 2 * travelling
            adding = travelling + max(adding, 2 * travelling)
        return gathered + max(products, adding) + 4 * layer_owned

    def head(self, table: int) -> float:
        """Bytes while the loss and its gradient are formed."""
        c, hidden = self.compute, self.model.hidden_size
        own = self.head_tokens()
        step = slice_tokens(own, self.model.vocab_size, self.options.device)
        elements = step * self.model.vocab_size
        # A CPU has a product, and that in fp32, before it is added to the gradient.
        product = (c + 4) * table if c < 4 and not self.grouped else 0
        cast = c * table if c < 4 else 0
        # The gradient, the head as it is multiplied; then the gradient times the loss's scale.
        slices = max(self.logits(), c * elements + product)
        matrices = max(4 * table + cast + slices, 2 * 4 * table)
        # The last residual stream, its norm, that in the compute type, and its gradient.
        shared = self.tokens * hidden * (4 + 4 + (c if c < 4 else 0))
        return matrices + shared + own * hidden * c * (1 if own == self.tokens else 2)

    def head_tokens(self) -> int:
        """Tokens for which a rank computes the head."""
        is_cut = self.options.tp > 1 and not self.model.tie_word_embeddings
        return -(-self.tokens // self.options.tp) if is_cut else self.tokens

    def logits(self) -> float:
        """A slice of logits, and their exponentials in fp32, which replace fp32 ones."""
        c = self.compute
        step = slice_tokens(self.head_tokens(), self.model.vocab_size, self.options.device)
        return (4 if c == 4 else c + 4) * step * self.model.vocab_size
