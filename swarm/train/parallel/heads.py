"""Which part of attention's tensors a rank has where heads are cut, and their state in parts.

The matrices of queries, keys and values are cut by rows and that of the outputs by columns, each
rank having the same number of consecutive heads. All other tensors are whole. By Hugging Face name
there are whole tensors only: they are put together from the ranks to be read, and cut when written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor

from swarm.config import ModelConfig, OptimizerConfig, RunConfig
from swarm.errors import BadBlob
from swarm.experts import Slice, misfit, shared_shapes
from swarm.train.adam_moments import KINDS, SCALE, MomentsFormat
from swarm.train.guard import square_sum
from swarm.train.optimizer import OwnedAdamW, is_coded, stored_moments
from swarm.train.parallel.ranks import Ranks
from swarm.train.tensor_file import Form, LazyTensors, forms_of

DIMENSIONS = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1}
"""Of each matrix that is cut: rows or columns."""
NORMS = ("q_norm", "k_norm")
"""Of QK-norm: each rank has the weights of its heads, all of them where heads share these."""


def why_not_cut(run: RunConfig, ways: int) -> str:
    """Why heads, experts and tokens cannot be cut over so many ranks; nothing if they can."""
    if run.model.num_key_value_heads % ways:
        return f"it has to divide the {run.model.num_key_value_heads} key/value heads"
    if ways > run.model.num_experts:
        return f"it must not exceed the {run.model.num_experts} experts"
    if run.data.sequence_length % ways:
        return f"it has to divide the {run.data.sequence_length} tokens of a sequence"
    return ""


class Heads:
    """The heads of one rank among those that share them.

    Attributes:
        group: these ranks; one alone has everything.
    """

    def __init__(self, group: Ranks, model: ModelConfig) -> None:
        self.group = group
        share = model.qk_norm == "head"
        self._dimensions = DIMENSIONS | ({} if share else dict.fromkeys(NORMS, 0))
        self._model, self._shapes = model, shared_shapes(model)

    @property
    def model(self) -> ModelConfig:
        """A model whose attention has the heads of this rank alone."""
        model = self._model
        own = {
            "num_attention_heads": model.num_attention_heads // self.group.size,
            "num_key_value_heads": model.num_key_value_heads // self.group.size,
            "head_dim": model.dim_per_head,
        }
        return model.model_copy(update=own)

    def dimension(self, name: str) -> int | None:
        """By which dimension a tensor is cut; None if this rank has all of it."""
        return None if self.group.size == 1 else self._dimensions.get(_part_of_attention(name))

    def cuts(self, name: str) -> bool:
        """Whether this rank has a part of a tensor."""
        return self.dimension(name) is not None

    def whole_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a whole tensor; `shape` is what this rank has, of one that is not cut."""
        return self._shapes[name] if self.cuts(name) else shape

    def whole(self, name: str, part: Tensor) -> Tensor:
        """A tensor from the parts of all ranks, which call it together if it is cut.

        Raises:
            Disconnected: another rank is gone.
        """
        cut = self.dimension(name)
        if cut is None:
            return part
        return torch.cat(self.group.gathered(part[None], "values").unbind(), cut)

    def part(self, name: str, whole: Tensor) -> Tensor:
        """A view of what this rank has of a tensor."""
        cut = self.dimension(name)
        return whole if cut is None else whole.chunk(self.group.size, cut)[self.group.rank]

    def parts(
        self, named: Mapping[str, Tensor], shape: Callable[[str], tuple[int, ...]]
    ) -> dict[str, Tensor]:
        """The same of several; raises BadBlob where one that is cut has not its `shape`."""
        found = dict(named)
        for name in filter(self.cuts, named):
            if why := misfit(name, (*named[name].shape,), shape(name)):
                raise BadBlob("shape", why)
            found[name] = self.part(name, named[name])
        return found

    def put(self, part: Slice, values: Tensor, mine: Tensor) -> None:
        """Overwrites a run of elements of a whole tensor where they lie in this rank's part."""
        shape = self.whole_shape(part.name, tuple(mine.shape))
        whole = torch.empty(shape, dtype=mine.dtype, device=mine.device)
        own = self.part(part.name, whole)
        own.copy_(mine)
        whole.view(-1)[part.start : part.stop] = values.to(mine.device)
        mine.copy_(own)

    def square_sums(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of each gradient the fp64 sum of squares of the whole one, on the CPU.

        Of those that are not cut it is the first rank's, so that all clip by the same factor.

        Raises:
            Disconnected: another rank is gone.
        """
        table = torch.zeros(len(gradients), self.group.size, dtype=torch.float64)
        mine = [k for k, name in enumerate(gradients) if self.group.rank == 0 or self.cuts(name)]
        if mine:
            every = list(gradients.values())
            found = torch.stack([square_sum(every[k]) for k in mine])
            table[mine, self.group.rank] = found.cpu()
        return dict(zip(gradients, self.group.united(table).sum(1).unbind(), strict=True))


class HeadsAdamW(OwnedAdamW):
    """As `OwnedAdamW`, whose tensors are whole for others and cut here.

    Int8 moments are not cut: their blocks would be others than those of whole tensors.
    """

    def __init__(self, settings: OptimizerConfig, form: MomentsFormat, heads: Heads) -> None:
        """`heads`: those of this rank."""
        assert form != "int8", "int8 moments lie in blocks of whole tensors"
        super().__init__(settings, form)
        self._heads = heads

    def read_moments(self, names: Collection[str]) -> dict[str, Tensor]:
        """See `OwnedAdamW`; an operation of the ranks for those that are cut."""
        found = super().read_moments(names)
        return {stored: self._heads.whole(_base(stored), part) for stored, part in found.items()}

    def write_moments(self, values: Mapping[str, Tensor]) -> None:
        """See `OwnedAdamW`; takes what this rank has."""
        parts = {stored: self._heads.part(_base(stored), each) for stored, each in values.items()}
        super().write_moments(parts)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """See `OwnedAdamW`; takes what this rank has."""
        super().load(_Parts(self._heads, tensors))


class _Parts(LazyTensors):
    """A private state of whole tensors, of which each look-up gives this rank's part."""

    def __init__(self, heads: Heads, tensors: Mapping[str, Tensor]) -> None:
        self._heads, self._tensors, self._whole = heads, tensors, forms_of(tensors)

    def forms(self) -> dict[str, Form]:
        """See `LazyTensors`; coded moments that are cut are fp32 here."""
        found = dict[str, Form]()
        for name in self:
            (dtype, shape), base = self._whole[name], _base(name)
            if self._heads.cuts(base):
                dtype = torch.float32 if dtype.itemsize == 1 else dtype
                shape = tuple(self._heads.part(base, torch.empty(shape, device="meta")).shape)
            found[name] = dtype, shape
        return found

    def __getitem__(self, name: str) -> Tensor:
        kind, _, base = name.partition(".")
        if not self._heads.cuts(base):
            return self._tensors[name]
        if kind.endswith(SCALE):
            raise KeyError(name)
        if kind not in KINDS or not is_coded(self._whole, base):
            return self._heads.part(base, self._tensors[name])
        shape = self._whole[name][1]
        moments = stored_moments(self._tensors, self._whole, base)
        values = moments.load(0, slice(0, math.prod(shape)))
        return self._heads.part(base, values[KINDS.index(kind)].view(shape))

    def __iter__(self) -> Iterator[str]:
        for name in self._whole:
            if not (name.partition(".")[0].endswith(SCALE) and self._heads.cuts(_base(name))):
                yield name

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _base(stored: str) -> str:
    """The tensor that a name of the private state is of."""
    return stored.partition(".")[2]


def _part_of_attention(name: str) -> str:
    """Such as q_proj; nothing for a tensor of something else."""
    _, _, within = name.partition(".self_attn.")
    return within.partition(".")[0]
