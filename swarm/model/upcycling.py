"""A mixture of experts from a dense checkpoint: every MLP is copied to all experts.

Source: Komatsuzaki et al., arXiv 2212.05055; noise and router of zeros as in the 9B of SPES
(arXiv 2602.11543). E experts, K experts of a token.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from swarm.config import RunConfig
from swarm.errors import ConfigError
from swarm.experts import PROJECTIONS, Shape, expert_shapes, expert_tensor, place_of, shared_shapes
from swarm.model.described import end_of_text_of, read_description, run_of_dense
from swarm.model.huggingface import MAX_SHARD_BYTES, save_model
from swarm.model.initial_weights import generator_of
from swarm.model.pretrained import TensorFiles, finite

RouterStart = Literal["normal", "zeros"]
ROUTER_STD = 1e-4
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


@dataclass(frozen=True)
class Recipe:
    """Options for making experts and router.

    Attributes:
        num_experts: copies of each MLP, E.
        top_k: experts of a token, K.
        router: "normal" is N(0, 1e-4), which spreads tokens at once and hardly changes the output.
            "zeros", SPES's router, first sends all tokens to the same experts.
        noise: standard deviation of noise that is added to each element of an expert with a
            probability of one half. 0 adds nothing.
        norm_topk_prob: whether the weights of the chosen experts are divided by their sum.
            Undivided weights add up to about K / E, so `down_proj` is multiplied by E / K.
        exact_spes: never changes `down_proj`, and gives a tied head its own copy, as SPES does.
        seed: seed of router and noise.
    """

    num_experts: int = 8
    top_k: int = 2
    router: RouterStart = "normal"
    noise: float = 0.02
    norm_topk_prob: bool = True
    exact_spes: bool = False
    seed: int = 0

    @property
    def down_scale(self) -> float:
        """The factor of every `down_proj`."""
        as_it_is = self.norm_topk_prob or self.exact_spes
        return 1.0 if as_it_is else self.num_experts / self.top_k


class Upcycling:
    """The conversion of one dense checkpoint to a mixture.

    Args:
        folder: folder of a dense Qwen3 (which becomes a Qwen3-MoE) or Llama (a Mixtral).
        recipe: options.

    Attributes:
        run: settings with the mixture's model and the checkpoint's sequence length.
        num_tensors: the number of the mixture's tensors.

    Raises:
        ConfigError: our decoder cannot compute the checkpoint. The error names the key or the
            tensor.
        CorruptState: a file of tensors is missing or damaged.
    """

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.folder, self.recipe = folder.expanduser(), recipe
        self.run: RunConfig = run_of_dense(
            self.folder,
            num_experts=recipe.num_experts,
            top_k=recipe.top_k,
            norm_topk_prob=recipe.norm_topk_prob,
            untie=recipe.exact_spes,
        )
        self._shapes = shared_shapes(self.run.model)
        of_one = expert_shapes(self.run.model, 0)
        self._dense = {_dense_name(name): shape for name, shape in of_one.items()}
        self.num_tensors = len(self._shapes) + recipe.num_experts * len(of_one)
        self._files = TensorFiles(self.folder)
        self._is_tied = bool(read_description(self.folder).get("tie_word_embeddings", False))
        optional = {_HEAD} if self._is_tied else set()
        self._files.require(self._wanted(), self.folder, optional=optional)

    def _wanted(self) -> dict[str, Shape]:
        shared = {n: s for n, s in self._shapes.items() if ".mlp.gate." not in n}
        if self._is_tied:
            shared.pop(_HEAD, None)
        return shared | self._dense

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the mixture by Hugging Face name, fp32. Reads each dense tensor once.

        Raises:
            CorruptState: a file was damaged, or a value is not finite.
        """
        for name, shape in self._shapes.items():
            if ".mlp.gate." in name:
                yield name, self._router(name, shape)
            else:
                yield name, self._read(_EMBEDDING if name == _HEAD and self._is_tied else name)
        for layer in range(self.run.model.num_hidden_layers):
            for projection in PROJECTIONS:
                dense = self._read(_dense_name(expert_tensor(layer, 0, projection)))
                for expert in range(self.recipe.num_experts):
                    name = expert_tensor(layer, expert, projection)
                    yield name, self._expert(name, projection, dense)

    def _read(self, name: str) -> Tensor:
        return finite(name, self._files[name])

    def _router(self, name: str, shape: Shape) -> Tensor:
        if self.recipe.router == "zeros":
            return torch.zeros(shape)
        values = generator_of(self.recipe.seed, name).standard_normal(shape, dtype=np.float32)
        return torch.from_numpy(values * np.float32(ROUTER_STD))

    def _expert(self, name: str, projection: str, dense: Tensor) -> Tensor:
        made = dense.clone()
        if self.recipe.noise:
            generator, shape = generator_of(self.recipe.seed, name), tuple(dense.shape)
            noise = generator.standard_normal(shape, dtype=np.float32)
            noise *= np.float32(self.recipe.noise)
            noise *= generator.integers(0, 2, shape, dtype=np.uint8)
            made += torch.from_numpy(noise)
        return made.mul_(self.recipe.down_scale) if projection == "down" else made

    def save(
        self,
        out: Path,
        named: Iterator[tuple[str, Tensor]] | None = None,
        *,
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> list[Path]:
        """Writes the mixture as an export, with the tokenizer's files of the checkpoint.

        Memory holds one shard, twice while it is written, and one dense matrix. `named` is
        `tensors()`, which a counter may wrap.

        Raises:
            ConfigError: `out` is the checkpoint's own folder.
            CorruptState: for the reasons given at `tensors`.
        """
        if out.exists() and out.samefile(self.folder):
            raise ConfigError(f"{out} is the checkpoint's own folder", hint="name another --out")
        written = save_model(
            out,
            self.run,
            named or self.tensors(),
            eos_token_id=end_of_text_of(self.folder),
            max_shard_bytes=max_shard_bytes,
        )
        for name in _TOKENIZER_FILES:
            if (self.folder / name).exists():
                written.append(Path(shutil.copyfile(self.folder / name, out / name)))
        return written


def _dense_name(name: str) -> str:
    """The dense model's name of the matrix that became an expert's."""
    place = place_of(name)
    assert place is not None, name
    layer, _, projection = place
    return f"model.layers.{layer}.mlp.{projection}_proj.weight"
