"""Some of a model's layers, with the ends of the model that belong to them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm.config import ModelConfig
from swarm.experts import EMBEDDING, layer_of


@dataclass(frozen=True)
class Stage:
    """The part of a model in one process of a pipeline: layers, and the ends next to them.

    The first layer comes with the embedding. The last layer comes with the last norm and the head.
    Both ends hold a tied embedding.

    Attributes:
        layers: ascending, at least one. They are consecutive, except in a stage of several chunks.
        num_layers: number of layers of the whole model.
    """

    layers: Sequence[int]
    num_layers: int

    def __post_init__(self) -> None:
        """Checks the layers."""
        assert self.layers and list(self.layers) == sorted(set(self.layers)), self
        assert self.layers[0] >= 0 and self.layers[-1] < self.num_layers, self

    @classmethod
    def whole(cls, model: ModelConfig) -> Stage:
        """The stage of a whole model."""
        return cls(range(model.num_hidden_layers), model.num_hidden_layers)

    @property
    def is_first(self) -> bool:
        """Whether tokens enter here."""
        return self.layers[0] == 0

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.layers[-1] == self.num_layers - 1

    @property
    def chunks(self) -> tuple[Stage, ...]:
        """The stage's runs of consecutive layers, each as a separate stage."""
        starts = [layer for layer in self.layers if layer - 1 not in self.layers]
        stops = [layer + 1 for layer in self.layers if layer + 1 not in self.layers]
        runs = zip(starts, stops, strict=True)
        return tuple(Stage(range(start, stop), self.num_layers) for start, stop in runs)

    def holds(self, name: str, *, tied: bool) -> bool:
        """Whether a tensor of the model belongs to this stage.

        Args:
            name: the Hugging Face name of the tensor, or that of a stack of owned experts.
            tied: whether the embedding is the head.
        """
        layer = layer_of(name)
        if layer is not None:
            return layer in self.layers
        if name == EMBEDDING:
            return self.is_first or (tied and self.is_last)
        return self.is_last
