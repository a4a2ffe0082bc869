"""What the losses take from the routers of some layers, as a table between stages of a pipeline.

Shapes: E experts, P compared pairs of a layer, W numbers of a layer in the table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.model.losses import LayerTerms


@dataclass(frozen=True)
class TermsForm:
    """How the terms of a layer are laid out as one row of a table, fp32.

    Counts come through unchanged below 2^24 tokens of a micro-batch.

    Attributes:
        num_experts: of a layer.
        top_k: experts of a token.
        num_tokens: of a micro-batch.
        pairs: compared pairs of experts that there is room for; 0 where none are measured.
    """

    num_experts: int
    top_k: int
    num_tokens: int
    pairs: int

    @property
    def _sizes(self) -> list[int]:
        """Of means, z, counts, dropped, number of pairs, similarities, first and second experts."""
        return [self.num_experts, 1, self.num_experts, 1, 1, *(3 * [self.pairs])]

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return sum(self._sizes)

    def row(self, terms: LayerTerms) -> Tensor:
        """A row [W], differentiable as the terms are."""
        alike, pair_P2 = terms.similarity, terms.pair_P2
        if alike is None or pair_P2 is None:
            alike, pair_P2 = terms.z.new_empty(0), torch.empty(0, 2)
        number = terms.z.new_tensor([len(alike)])
        filling = terms.z.new_zeros(self.pairs - len(alike))
        parts = [terms.mean_E, terms.z[None], terms.tokens_E, terms.dropped[None], number]
        parts += [alike, filling]
        for each_P in pair_P2.to(terms.z.device).unbind(1):
            parts += [each_P, filling]
        return torch.cat([part.float() for part in parts])

    def terms(self, row: Tensor) -> LayerTerms:
        """The terms of such a row."""
        mean_E, z, tokens_E, dropped, number, alike, *pair = row.split(self._sizes)
        terms = LayerTerms(
            mean_E,
            z[0],
            tokens_E.detach().long(),
            dropped[0].detach().long(),
            self.num_tokens,
            self.top_k,
        )
        if not self.pairs:
            return terms  # and nothing waits for the device
        size = int(number)
        pair_P2 = torch.stack([each[:size].detach().long().cpu() for each in pair], 1)
        return terms._replace(similarity=alike[:size], pair_P2=pair_P2)
