"""The settings that all peers of a run share."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from blake3 import blake3
from pydantic import Field, model_validator

from swarm.canonical import canonical
from swarm.config import section

_QK_NORMS = {"projection": "QK-norm over the projection", "none": "attention without QK-norm"}


class ModelConfig(section.Section):
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
    """Experts of each layer. Expert e of every layer has the same owners."""
    num_experts_per_tok: Annotated[int, Field(gt=0, le=2**11)]
    """Experts that a token goes through in each layer."""
    moe_intermediate_size: Annotated[int, Field(gt=0, le=2**17)]
    """Elements of the state inside an expert."""
    norm_topk_prob: bool = False
    """Whether the weights of the chosen experts are divided by their sum."""
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's logits become weights. "sigmoid" (DeepSeek-V3) has a bias per expert, used
    only to choose experts, and exports as dots.llm1."""
    noisy_top_k: bool = False
    """Learned noise on the router's logits in training (Shazeer). Evaluations and exports leave it
    out."""
    qk_norm: Literal["head", "projection", "none"] = "head"
    """"head" exports as Qwen3-MoE, "projection" (over all heads at once) as OLMoE, "none" as
    Mixtral, which needs `norm_topk_prob`."""
    rope_theta: section.PositiveReal = 10_000.0
    """Base of the rotary embedding's wavelengths."""
    rms_norm_eps: section.PositiveReal = 1e-6
    """Added to the mean square before the root is taken, in every norm."""
    tie_word_embeddings: bool = False
    """Whether the output layer is the embedding."""
    initializer_range: section.PositiveReal = 0.02
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


MAX_TENSORS = 2**19
"""128 layers with 1,024 experts have 393,216 matrices."""
MAX_ELEMENTS = 2**44
"""35 TB in bf16."""
MAX_UNITS = 2**14
"""A manifest has at most 8 MiB, with an entry of some 250 bytes for each unit."""
MAX_ROUND_TOKENS = 2**40
"""Tokens of one peer in one round. Offers with more are refused."""
_NORMS_AND_MATRICES = 11
"""Shared tensors of a layer, at most."""
_FP32_BYTES = 4


def size_problem(
    *,
    layers: int,
    experts: int,
    vocabulary: int,
    hidden: int,
    inner: int,
    heads: int,
    part_bytes: int,
    shared_every: int,
) -> str | None:
    """Why a model is too large to be listed, or None. It overestimates sizes a little.

    Args:
        layers: number of layers.
        experts: number of experts of each layer.
        vocabulary: tokens in the vocabulary.
        hidden: elements of a token's state.
        inner: elements of an expert's state.
        heads: elements of the queries, keys, values and outputs of all heads together.
        part_bytes: largest size of a part of the shared tensors.
        shared_every: the number of these parts is a multiple of `shared_every`.

    Returns:
        A text that begins with the key to change.
    """
    tensors = 3 * layers * experts + _NORMS_AND_MATRICES * layers + 3
    if tensors > MAX_TENSORS:
        return (
            f"model.num_hidden_layers: {layers} layers of {experts} experts have {tensors} "
            f"tensors (limit {MAX_TENSORS}); fewer layers or fewer model.num_experts"
        )
    per_layer = hidden * (heads + 2 * experts + 2) + 2 * heads + experts
    shared = (2 * vocabulary + 1) * hidden + layers * per_layer
    elements = shared + 3 * layers * experts * hidden * inner
    if elements > MAX_ELEMENTS:
        return (
            f"model.hidden_size: the model has {elements} parameters (limit {MAX_ELEMENTS}); "
            "make it smaller"
        )
    units = shared * _FP32_BYTES // part_bytes + 2 * shared_every + experts
    if units > MAX_UNITS:
        return (
            f"wire.part_bytes: in parts of {part_bytes} bytes the shared tensors and the experts "
            f"are {units} units (limit {MAX_UNITS}); make it larger"
        )
    return None


class RunSection(section.Section):
    """Identity and length of the run."""

    name: section.RunName
    """The run id begins with this name."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Decides initial weights, the order of the text, and noise of the routing."""
    rounds: section.Positive
    """Training rounds until the run is finished."""
    peers: Annotated[int, Field(gt=0, le=2**16)] = 4
    """Number of peers that the run is planned for; the default of `swarm-plan` and
    `swarm-local`."""
    admission: Literal["open", "invited"] = "open"
    """open: strangers may join, and earn a vote by work. invited: peers join only with an
    invitation."""
    initial: Literal["seed", "given"] = "seed"
    """seed: the initial weights follow from `seed`, and joiners compute them. given: the founder
    takes them from a checkpoint (`--initialise-from DIR`), and joiners fetch them."""


class DataConfig(section.Section):
    """Where tokens come from and how they are cut."""

    mode: Literal["common", "own"] = "common"
    """common: all peers have the same text, and manifests deal it out. own: each peer has its
    own."""
    tokenizer: Literal["byte", "file"] = "byte"
    """byte: a token is a byte of UTF-8, and two specials follow. file: the founder's tokenizer.json
    (`--tokenizer DIR`), which travels with the run."""
    sequence_length: section.Positive
    """Tokens of a training sequence."""
    attention: Literal["window", "document"] = "window"
    """window: a token attends to all earlier tokens of its sequence. document: only to the earlier
    tokens of its own document."""
    mask_repetition: bool = False
    """Whether the loss leaves out sequences in which 1 to 13 tokens stand 32 times in a row, as in
    SPES."""
    mixture: Annotated[
        tuple[tuple[section.RunName, section.Weight], ...], Field(max_length=64)
    ] = ()
    """Subfolders of the text's folder, with weights: [["web", 0.7], ["code", 0.3]] takes 70 % of
    the bytes from web, until one folder has no more. Empty: the text is not mixed."""
    validation_bytes: Annotated[int, Field(ge=64, le=1_000_000)] = 65_536
    """Bytes of held-out text. Their tokens are in the first manifest, and every `val_loss` is
    measured on them."""


class TrainConfig(section.Section):
    """The local step."""

    batch_tokens: section.Positive
    """Tokens per peer and step, once all `phases` are over."""
    micro_batch_sequences: section.Positive
    """Sequences per forward pass. Load balancing is computed over each micro-batch."""
    compute: Literal["fp32", "bf16"] = "bf16"
    """Type of matrix products; masters are fp32 in any case."""
    frozen: section.Codec = "bf16"
    """How a peer stores the experts that it does not own."""


Optimizer = Literal["adamw", "muon"]
MUON_SCALE = 0.2
"""Makes Muon's update, times the longest side's root, as large as AdamW's (arXiv 2502.16982)."""


class OptimizerConfig(section.Section):
    """The optimizer and its learning-rate schedule, which counts the steps of the whole run."""

    kind: Optimizer = "adamw"
    """muon: Muon updates the matrices of attention and experts, AdamW all else."""
    lr: Annotated[float, Field(gt=0, le=1)]
    """Learning rate after the warm-up; AdamW moves a weight by about this much a step."""
    matrix_lr: Annotated[float, Field(gt=0, le=1)] | None = None
    """Learning rate of Muon's matrices after the warm-up; by default `lr`."""
    betas: tuple[section.Share, section.Share] = (0.9, 0.95)
    """Decay of the first and second moments. The square of the first is below the second."""
    eps: section.PositiveReal = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay, multiplied by the learning rate."""
    clip_norm: section.PositiveReal = 1.0
    """AdamW's gradients are scaled down to this norm if their norm is larger."""
    clip: Literal["global", "unit"] = "global"
    """global: by the norm of all gradients. unit: the embedding, each layer and the head by norms
    of their own, so that a streaming engine can update a layer while backward continues below."""
    warmup_steps: section.NonNegative = 0
    """Steps over which the learning rate rises to its full value."""
    warmup_from: section.Share = 0.1
    """Warm-up starts at this share of `lr`."""
    final_share: section.Share = 0.1
    """The cosine ends at this share of `lr`."""
    schedule_steps: section.Positive | None = None
    """Length of warm-up plus cosine; by default rounds x local steps."""


class LossConfig(section.Section):
    """Weights of the terms that are added to the cross-entropy."""

    balance: Literal["per_layer", "global"] = "per_layer"
    """Whether loads are balanced in each layer, or over all layers together (K times the scale)."""
    balance_weight: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the load-balancing loss."""
    router_z_weight: Annotated[float, Field(ge=0)] = 0.001
    """Weight of the squared log-partition of the router (ST-MoE)."""
    output_z_weight: Annotated[float, Field(ge=0)] = 1e-5
    """Weight of the squared log-partition of the output layer."""
    similarity_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the similarity (CKA) of experts that get the same tokens (SimSMoE); 0: off."""
    similarity_threshold: section.Share = 0.5
    """Pairs of experts that are less similar than this are not penalised."""


class RoutingConfig(section.Section):
    """How tokens are led to experts in training. Evaluations and exports do not use it."""

    capacity_factor: section.PositiveReal | None = None
    """An expert takes at most this multiple of its even share of a micro-batch, and the rest is
    dropped. Without the setting nothing is dropped."""
    bias_update_rate: section.Share = 0.0
    """Loss-free balancing (DeepSeek): the amount by which the selection bias moves in a step."""
    own_expert_bias: Annotated[float, Field(ge=0)] = 0.0
    """Added to the logits of the experts that a peer owns, only for the choice of experts."""
    own_expert_bias_share: section.Share = 0.5
    """`own_expert_bias` falls to 0 over this share of the schedule."""
    balance_factor: Annotated[float, Field(gt=0, le=1)] = 1.0
    """SPES: at first, the balancing loss multiplies the tokens of a peer's own experts by this
    factor."""
    balance_factor_share: section.Share = 0.2
    """`balance_factor` rises to 1 over this share of the schedule."""


class RoundConfig(section.Section):
    """When a round is due and how long its phases may take."""

    local_steps: section.Positive
    """H: steps between rounds, after the last of `phases`. With `seconds`, the number that is
    assumed for a peer whose pace is not known yet."""
    seconds: section.Seconds | None = None
    """Each peer takes as many steps as fit into this time, and its weight in means follows its
    tokens. Without the setting every peer takes `local_steps`, which is the exact mode."""
    experts_every: section.Positive = 1
    """Rounds between two exchanges of an expert; 1 is SPES."""
    shared_every: Annotated[int, Field(gt=0, le=64)] = 1
    """Rounds between two means of a part of the shared tensors; above 1 needs `stagger`."""
    stagger: bool = False
    """Whether each round is a slice of a cycle and exchanges its share of the units, so that all
    rounds move the same number of bytes. An expert that missed its round is exchanged in the next
    round. `local_steps` are then the steps of a slice, and the run's last round exchanges
    everything."""
    overlap: Literal["none", "round"] = "none"
    """round: the next local steps begin while a round is under way, and its result is added when
    the round is over. This mode needs codings for `wire`, and a common text. none: every peer waits
    until a round is over."""
    roster_after_s: section.Seconds = 6.0
    """T_roster: after this time a roster may close without silent peers, if a quorum has
    offered."""
    reform_after_s: section.Seconds | None = None
    """Silence after which a lost majority is given up. Default: 600 s, or an attempt's longest time
    if longer."""


class OwnershipConfig(section.Section):
    """How many peers train an expert."""

    owners_per_expert: Annotated[int, Field(gt=0, le=2**16)] = 1
    """R: 1 is SPES, and the number of peers is FedAvg."""
    min_owned_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Peers wait while a smaller share of the experts has an owner. Experts without one fit no
    machine."""


class MergingConfig(section.Section):
    """Expert merging during warm-up (SPES, eq. 5-6)."""

    alpha: Annotated[float, Field(ge=0, le=1)] = 0.0
    """alpha0; 0 switches merging off."""
    top_k: section.Positive = 4
    """Number of an expert's donors, which are the experts most similar to it."""
    decay_steps: section.Positive = 12_500
    """Steps of the run over which alpha falls to 0."""
    interval_steps: section.Positive = 500
    """Steps of the run between two merges; a multiple of the local steps."""


class WireConfig(section.Section):
    """How tensors become bytes; fp32 everywhere is the exact mode."""

    shared: section.Codec = "fp32"
    """Type of shared tensors; norms and routers are fp32 in any case."""
    experts: section.Codec = "bf16"
    """Type of experts; their owner keeps an fp32 master."""
    shared_coding: section.Coding = "none"
    """How a round's changes of the shared tensors are sent. Norms and routers are sent as values in
    any case. none: values are sent instead of changes. bf16, b2 (2 bits an element) and b1 (1 bit):
    the remainder of rounding is sent in later rounds."""
    experts_coding: section.Coding = "none"
    """Like `shared_coding`, for experts."""
    part_bytes: Annotated[int, Field(ge=4096, le=2**32)] = 16 * 2**20
    """Largest size of one part of the shared tensors."""


class PhaseConfig(section.Section):
    """Settings that hold until the run has trained on a number of tokens."""

    until_tokens: section.Positive
    """Tokens of all peers at which the phase ends. They rise from phase to phase."""
    local_steps: section.Positive
    """Like `round.local_steps`."""
    batch_tokens: section.Positive
    """Like `train.batch_tokens`."""


class RunConfig(section.Section):
    """Everything all peers of a run agree on."""

    run: RunSection
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    loss: LossConfig = LossConfig()
    routing: RoutingConfig = RoutingConfig()
    round: RoundConfig
    ownership: OwnershipConfig = OwnershipConfig()
    merging: MergingConfig = MergingConfig()
    wire: WireConfig = WireConfig()
    phases: Annotated[tuple[PhaseConfig, ...], Field(max_length=1024)] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_size()
        self._check_mixture()
        self._check_owners()
        self._check_betas()
        self._check_matrix_lr()
        self._check_batches()
        self._check_merging()
        self._check_routing()
        if self.round.shared_every > 1 and not self.round.stagger:
            raise ValueError(
                "round.shared_every: needs round.stagger = true, or most rounds would average "
                "nothing; more round.local_steps make fewer rounds"
            )
        self._check_overlap()
        if self.phases and not self.optimizer.schedule_steps:
            raise ValueError(
                "optimizer.schedule_steps: is needed with phases, because the steps of a run then "
                "depend on how many tokens its peers contribute"
            )
        if self.round.seconds and not self.optimizer.schedule_steps:
            raise ValueError(
                "optimizer.schedule_steps: is needed with round.seconds, because the steps of a "
                "run then count the tokens of its peers: one is train.batch_tokens from each of "
                "run.peers"
            )
        if self.phases and self.round.seconds:
            raise ValueError(
                "round.seconds: cannot be combined with phases, which say how many steps a round "
                "has; leave out one of them"
            )
        tokens = [phase.until_tokens for phase in self.phases]
        if tokens != sorted(set(tokens)):
            raise ValueError(f"phases.until_tokens: must rise strictly, is {tokens}")
        if self.data.tokenizer == "byte" and self.model.vocab_size < 258:
            raise ValueError(
                f"model.vocab_size: {self.model.vocab_size} is too small for the byte tokenizer; "
                "it needs 256 bytes and two specials, at least 258"
            )
        return self

    def _check_overlap(self) -> None:
        if self.round.overlap == "none":
            return
        if "none" in (self.wire.shared_coding, self.wire.experts_coding):
            raise ValueError(
                "round.overlap: needs wire.shared_coding and wire.experts_coding, such as b2: "
                "peers train meanwhile, so they can only add how far the agreed values moved"
            )
        if self.data.mode != "common":
            raise ValueError(
                'round.overlap: needs data.mode = "common": the text that a peer has read ahead is '
                "counted within the text dealt to it"
            )

    def _check_owners(self) -> None:
        if self.ownership.owners_per_expert > self.run.peers:
            raise ValueError(
                f"ownership.owners_per_expert: {self.ownership.owners_per_expert} owners are more "
                f"than run.peers {self.run.peers}; the same number is FedAvg, 1 is SPES"
            )

    def _check_betas(self) -> None:
        first, second = self.optimizer.betas
        if not first**2 < second < 1:
            raise ValueError(
                f"optimizer.betas: {first} squared must be below {second}, and that below 1, or "
                "a single step of AdamW may move a weight without bound"
            )

    def _check_matrix_lr(self) -> None:
        if self.optimizer.matrix_lr is not None and self.optimizer.kind != "muon":
            raise ValueError(
                'optimizer.matrix_lr: needs optimizer.kind = "muon"; AdamW has optimizer.lr alone'
            )

    def _check_mixture(self) -> None:
        folders = [folder for folder, _ in self.data.mixture]
        if len(set(folders)) < len(folders):
            raise ValueError(f"data.mixture: names a folder twice: {folders}")

    def _check_size(self) -> None:
        model = self.model
        problem = size_problem(
            layers=model.num_hidden_layers,
            experts=model.num_experts,
            vocabulary=model.vocab_size,
            hidden=model.hidden_size,
            inner=model.moe_intermediate_size,
            heads=2 * (model.num_attention_heads + model.num_key_value_heads) * model.dim_per_head,
            part_bytes=self.wire.part_bytes,
            shared_every=self.round.shared_every,
        )
        if problem:
            raise ValueError(problem)

    def _check_batches(self) -> None:
        micro_tokens = self.train.micro_batch_sequences * self.data.sequence_length
        named = [("train.batch_tokens", self.train.batch_tokens)]
        named += [("phases.batch_tokens", phase.batch_tokens) for phase in self.phases]
        rounds = [(self.round.local_steps, self.train.batch_tokens)]
        rounds += [(phase.local_steps, phase.batch_tokens) for phase in self.phases]
        for local_steps, batch_tokens in rounds:
            if local_steps * batch_tokens > MAX_ROUND_TOKENS:
                raise ValueError(
                    f"round.local_steps: {local_steps} steps of {batch_tokens} tokens are "
                    f"{local_steps * batch_tokens} tokens a round (limit {MAX_ROUND_TOKENS})"
                )
        for key, batch_tokens in named:
            if batch_tokens % micro_tokens:
                raise ValueError(
                    f"{key}: {batch_tokens} is not a multiple of a micro-batch of "
                    f"{self.train.micro_batch_sequences} x {self.data.sequence_length} tokens"
                )

    def _check_merging(self) -> None:
        if not self.merging.alpha:
            return
        if self.merging.top_k >= self.model.num_experts:
            raise ValueError(
                f"merging.top_k: {self.merging.top_k} must be below model.num_experts "
                f"{self.model.num_experts}, since an expert does not donate to itself"
            )
        if self.round.seconds:
            return  # Steps follow tokens: a merge is due in the first round after its step.
        for local_steps in [self.round.local_steps, *(p.local_steps for p in self.phases)]:
            if self.merging.interval_steps % local_steps:
                raise ValueError(
                    f"merging.interval_steps: {self.merging.interval_steps} is not a multiple of "
                    f"the local steps {local_steps}, so no merge could fall on a round"
                )

    def _check_routing(self) -> None:
        if self.routing.bias_update_rate and self.model.scoring_func != "sigmoid":
            raise ValueError(
                "routing.bias_update_rate: needs model.scoring_func = sigmoid; no decoder of "
                "Transformers with QK-norm has a softmax router with a selection bias, so the "
                "model could not be exported"
            )
        if self.loss.similarity_weight and self.model.num_experts_per_tok < 2:
            raise ValueError(
                "loss.similarity_weight: compares experts that get the same token, which needs "
                "model.num_experts_per_tok of 2 or more"
            )

    def phase_at(self, tokens: int) -> PhaseConfig:
        """The local steps and batch that hold once the run has trained on `tokens` tokens."""
        for phase in self.phases:
            if tokens < phase.until_tokens:
                return phase
        return PhaseConfig(
            until_tokens=2**62,
            local_steps=self.round.local_steps,
            batch_tokens=self.train.batch_tokens,
        )

    @property
    def schedule_steps(self) -> int:
        """Steps over which warm-up and cosine run."""
        return self.optimizer.schedule_steps or self.run.rounds * self.round.local_steps

    def rate_share(self, step: int) -> float:
        """The learning rate of the step after `step` steps of the run, as a share of `lr`.

        Linear warm-up from `warmup_from`, then a cosine down to `final_share`. From
        `schedule_steps` on, it stays there.

        Source: zjr2000/SPES at 2cbcd96 for warm-up from a share of lr; Loshchilov and Hutter,
        arXiv 1608.03983, for the cosine.
        """
        settings = self.optimizer
        if step < settings.warmup_steps:
            return settings.warmup_from + (1 - settings.warmup_from) * step / settings.warmup_steps
        decay_steps = max(1, self.schedule_steps - settings.warmup_steps)
        progress = min(1.0, (step - settings.warmup_steps) / decay_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return settings.final_share + (1 - settings.final_share) * cosine

    def canonical_json(self) -> bytes:
        """The configuration as the one byte string that every peer derives from it."""
        return canonical(self.model_dump(mode="json"))

    def fingerprint(self) -> str:
        """BLAKE3 of the canonical JSON: equal exactly when all settings are."""
        return blake3(self.canonical_json()).hexdigest()
