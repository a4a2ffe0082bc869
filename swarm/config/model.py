"""The shape of the network: a section of the configuration that all peers of a run share."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from swarm.config.section import PositiveReal, Section

_QK_NORMS = {"projection": "QK-norm over the projection", "none": "attention without QK-norm"}


class ModelConfig(Section):
    """A Qwen3-MoE / OLMoE / Mixtral decoder, with Hugging Face's field names."""

    vocab_size: Annotated[int, Field(gt=0, le=2**20)] = 260
    """Rows of the embedding; the byte tokenizer needs 258 or more."""
    hidden_size: Annotated[int, Field(gt=0, le=2**17)]
    """Elements of a token's state between layers."""
    num_hidden_layers: Annotated[int, Field(gt=0, le=2**12)]
    """Decoder layers, each with its own experts."""
    num_attention_heads: Annotated[int, Field(gt=0, le=2**12)]
    """Query heads."""
    num_key_value_heads: Annotated[int, Field(gt=0, le=2**12)]
    """Key and value heads, shared by groups of query heads; it divides `num_attention_heads`."""
    head_dim: Annotated[int, Field(gt=0, le=2**13)] | None = None
    """Elements of a head, an even number; by default hidden_size / num_attention_heads."""
    num_experts: Annotated[int, Field(gt=0, le=2**11)]
    """Experts of each layer; expert e of all layers has one owner."""
    num_experts_per_tok: Annotated[int, Field(gt=0, le=2**11)]
    """Experts that a token goes through in each layer."""
    moe_intermediate_size: Annotated[int, Field(gt=0, le=2**17)]
    """Elements of the state inside an expert."""
    norm_topk_prob: bool = False
    """Whether the weights of the chosen experts are divided by their sum."""
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's logits become weights. "sigmoid" (DeepSeek-V3) has a bias per expert that
    only decides which are chosen, and exports as dots.llm1."""
    noisy_top_k: bool = False
    """Learned noise on the router's logits in training (Shazeer), not evaluated, not exported."""
    qk_norm: Literal["head", "projection", "none"] = "head"
    """"head" exports as Qwen3-MoE, "projection" (over all heads at once) as OLMoE, "none" as
    Mixtral, which needs `norm_topk_prob`."""
    rope_theta: PositiveReal = 10_000.0
    """Base of the rotary embedding's wavelengths."""
    rms_norm_eps: PositiveReal = 1e-6
    """Added to the mean square before its root, in every norm."""
    tie_word_embeddings: bool = False
    """Whether the output layer is the embedding."""
    initializer_range: PositiveReal = 0.02
    """Standard deviation of the initial weights."""

    @property
    def dim_per_head(self) -> int:
        """Size of one attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size: {self.hidden_size} is not a multiple of num_attention_heads "
                f"{self.num_attention_heads}; set head_dim or change one of them"
            )
        if self.dim_per_head % 2:
            raise ValueError(f"head_dim: {self.dim_per_head} is odd; rotary embeddings need pairs")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads: {self.num_key_value_heads} does not divide "
                f"num_attention_heads {self.num_attention_heads}"
            )
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok: {self.num_experts_per_tok} exceeds "
                f"num_experts {self.num_experts}"
            )
        if self.num_experts_per_tok == 1 and self.norm_topk_prob:
            raise ValueError(
                "norm_topk_prob: with num_experts_per_tok = 1 the renormalised weight is always 1 "
                "and the router gets no gradient; set it to false"
            )
        if self.qk_norm != "head" and self.scoring_func == "sigmoid":
            raise ValueError(
                "scoring_func: sigmoid needs qk_norm = head, since no architecture of Transformers "
                f"has {_QK_NORMS[self.qk_norm]}, a selection bias and norm_topk_prob to choose"
            )
        if self.qk_norm == "none" and not self.norm_topk_prob:
            raise ValueError(
                "norm_topk_prob: qk_norm = none exports as Mixtral, which always renormalises; "
                "set it to true"
            )
        if self.qk_norm == "projection" and self.head_dim not in (
            None,
            self.hidden_size // self.num_attention_heads,
        ):
            raise ValueError("head_dim: OLMoE (qk_norm projection) has hidden_size / heads only")
        return self
