#!/usr/bin/env python
"""Counts the work of one training step on a GPU, without a GPU: kernels, bytes, products, waits.

The resident engine's step runs on meta tensors that claim to be on a GPU of the generation Hopper.
Each operator that is no view counts as one kernel. A wait is a value that the host needs from the
device. Experts get equal numbers of tokens.

    python scripts/benchmarks/trace_step.py --shape 2b --sequences 16
    python scripts/benchmarks/trace_step.py --shape 7b --sequences 8 --micro 2

The time is a model with the constants of `CARD`: each kernel takes the time of its bytes or of its
products, and a launch. It is for comparing two versions of the step. Copies of the batch and the
host's own work are not counted.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from bench_gpu_measure import LR, SHAPES, run_of
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

from swarm.config import RunConfig
from swarm.model import losses
from swarm.model.cost import step_flops_with
from swarm.model.routing import RoutingControls
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.engine.resident import ResidentEngine


@dataclass(frozen=True)
class Card:
    """A GPU as a model of time.

    Attributes:
        flops: peak of dense bf16 products per second.
        bytes_per_s: of its memory.
        products, grouped, fp32: share of the peak that products reach, one matrix at a time,
            several in one kernel, and in fp32.
        attention, attention_back: operations of the attention kernels per second.
        passes: share of `bytes_per_s` that elementwise kernels reach.
        launch_s: of each kernel.
        wait_s: of each wait of the host, until the device has work again.
    """

    flops: float
    bytes_per_s: float
    products: float
    grouped: float
    fp32: float
    attention: float
    attention_back: float
    passes: float
    launch_s: float
    wait_s: float


CARD = Card(
    flops=989e12,
    bytes_per_s=3.35e12,
    products=0.70,
    grouped=0.55,
    fp32=0.04,
    attention=260e12,
    attention_back=210e12,
    passes=0.85,
    launch_s=6e-6,
    wait_s=1e-3,
)
"""An H100 SXM. Peaks are published. With these shares the model gives the two steps that were
measured, 523 ms (2b, 16 sequences) and 600 ms (7b, 8 sequences, 4 at a time)."""

# Operators that move no data, and those that touch only a part of an argument.
VIEWS = frozenset(
    (
        *("alias", "as_strided", "chunk", "detach", "diagonal", "empty", "empty_like"),
        *("empty_strided", "expand", "lift_fresh", "narrow", "new_empty", "new_empty_strided"),
        *("permute", "reshape", "_reshape_alias", "resize_", "select", "slice", "split"),
        *("split_with_sizes", "squeeze", "t", "transpose", "unbind", "unflatten", "unsqueeze"),
        *("_unsafe_view", "view"),
    )
)
GATHERS = frozenset(("embedding", "gather", "index", "index_select"))
SCATTERS = frozenset(("index_put_", "scatter_add_", "scatter_"))
PRODUCTS = frozenset(("addmm", "bmm", "mm"))
ATTENTION = "_scaled_dot_product_flash_attention"


@dataclass(frozen=True)
class Kernel:
    """One launch.

    Attributes:
        part: of the step.
        name: of the operator.
        flops: of products. 0 for elementwise kernels.
        num_bytes: read and written.
        kind: "products", "grouped", "fp32", "attention", "attention_back" or "passes".
    """

    part: str
    name: str
    flops: float
    num_bytes: float
    kind: str

    def seconds(self, card: Card) -> float:
        """The time on a card."""
        rates = {
            "products": card.flops * card.products,
            "grouped": card.flops * card.grouped,
            "fp32": card.flops * card.fp32,
            "attention": card.attention,
            "attention_back": card.attention_back,
        }
        moved_s = self.num_bytes / (card.bytes_per_s * card.passes)
        computed_s = self.flops / rates[self.kind] if self.flops else 0.0
        return max(computed_s, moved_s) + card.launch_s


@dataclass
class Trace:
    """The kernels and waits of a step."""

    kernels: list[Kernel] = field(default_factory=list)
    waits: Counter[str] = field(default_factory=Counter)

    @property
    def elementwise_bytes(self) -> float:
        """Bytes of all kernels that are neither products nor attention."""
        return sum(kernel.num_bytes for kernel in self.kernels if kernel.kind == "passes")

    def seconds(self, card: Card) -> float:
        """The time on a card."""
        busy_s = sum(kernel.seconds(card) for kernel in self.kernels)
        return busy_s + self.waits.total() * card.wait_s


def trace_step(run: RunConfig, owned: int) -> Trace:
    """Traces the step of an engine that owns so many experts."""
    options = replace(EngineOptions.of(run), device="meta", recompute="none")
    with _as_on_gpu():
        engine = ResidentEngine(run, options)
        engine.own(range(owned))
        sequences = run.train.batch_tokens // run.data.sequence_length
        tokens_BT1 = torch.zeros(
            sequences, run.data.sequence_length + 1, dtype=torch.int64, device="meta"
        )
        trace = Trace()
        tracker = ModuleTracker()
        with _Host(trace, run), tracker, _Device(trace, tracker, engine):
            engine.step(tokens_BT1, lr=LR, controls=RoutingControls())
    return trace


@contextmanager
def _as_on_gpu() -> Iterator[None]:
    """Lets the model's code treat meta tensors as those of a GPU."""
    with ExitStack() as stack:
        on_gpu = property(lambda tensor: tensor.is_meta)
        stack.enter_context(mock.patch.object(Tensor, "is_cuda", on_gpu, create=True))
        for sizes in (losses.SLICE_LOGITS, losses.ALIGNED_ROWS):
            stack.enter_context(mock.patch.dict(sizes, meta=sizes["cuda"]))
        yield


ASKING: dict[Any, Callable[[Any], Any]] = {
    Tensor.tolist: lambda answer: answer,
    Tensor.item: lambda answer: answer,
    Tensor.__int__: int,
    Tensor.__float__: float,
    Tensor.__bool__: bool,
}
"""What brings a value to the host, and the type that it has there."""


class _Host(TorchFunctionMode):
    """Answers what the host asks of the device, and counts it."""

    def __init__(self, trace: Trace, run: RunConfig) -> None:
        super().__init__()
        self._trace = trace
        self._rows = run.train.micro_batch_sequences * run.data.sequence_length
        self._rows *= run.model.num_experts_per_tok

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.bincount:
            size = kwargs.get("minlength", 0)
            return torch.zeros(size, dtype=torch.int64, device=args[0].device)
        if function is torch.ops.aten._fused_rms_norm:
            # The kernel with as many bytes that meta tensors have.
            out, _, scale = torch.ops.aten.native_layer_norm(*args[:3], None, args[3])
            return out, scale
        if function is F.scaled_dot_product_attention:
            return torch.ops.aten._scaled_dot_product_flash_attention(*args[:3], 0.0, True)[0]
        if function not in ASKING or not args[0].is_meta:
            return function(*args, **kwargs)
        self._trace.waits[_asker()] += 1
        answer = self._answer(args[0])
        return ASKING[function](answer)

    def _answer(self, tensor: Tensor) -> Any:
        """Numbers of the right kind. Integers are the ends of equal groups of rows."""
        if tensor.dim() == 0:
            return 1.0
        last = tensor.numel() - 1
        if tensor.dim() == 1 and not tensor.is_floating_point() and last:
            return [self._rows * index // last for index in range(last + 1)]
        return torch.ones(tensor.shape, dtype=tensor.dtype).tolist()


def _asker() -> str:
    """The function of the model or engine that waits."""
    for frame in _frames(sys._getframe(2)):
        if "/swarm/" in frame.f_code.co_filename:
            return frame.f_code.co_qualname
    return "elsewhere"


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


class _Device(TorchDispatchMode):
    """Records each kernel."""

    def __init__(self, trace: Trace, tracker: ModuleTracker, engine: ResidentEngine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace, self._tracker = trace, tracker
        self._classes = {
            name: type(module).__name__ for name, module in engine._model.model.named_modules()
        }

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        name = operator._schema.name.partition("::")[2]
        moved = [each for each in tree_leaves((args, kwargs, result)) if _is_on_gpu(each)]
        if name not in VIEWS and not operator.is_view and moved:
            self._trace.kernels.append(self._kernel(name, args, kwargs or {}, result))
        return result

    def _kernel(self, name: str, args: Any, kwargs: Any, result: Any) -> Kernel:
        inputs = [each for each in tree_leaves((args, kwargs)) if _is_on_gpu(each)]
        outputs = [each for each in tree_leaves(result) if _is_on_gpu(each)]
        flops, kind = _products(name, args)
        return Kernel(self._part(), name, flops, _bytes(name, args, inputs, outputs), kind)

    def _part(self) -> str:
        """The part of the step: by the innermost module, else by the function."""
        active = [self._classes.get(name.partition(".")[2], "") for name in self._tracker.parents]
        for part, classes in PARTS.items():
            if classes.intersection(active):
                return part
        files = (frame.f_code.co_filename for frame in _frames(sys._getframe(3)))
        names = (file.rpartition("/")[2] for file in files)
        return next((FILES[name] for name in names if name in FILES), "other")


PARTS = {
    "projections": {"Linear"},
    "norms": {"RMSNorm"},
    "router": {"Router"},
    "experts": {"ExpertBank"},
    "attention": {"Attention"},
    "layer": {"SparseMLP", "DecoderLayer"},
}
"""Parts by the classes of their modules, the innermost first."""
FILES = {
    "losses.py": "head and losses",
    "optimizer.py": "optimizer",
    "guard.py": "optimizer",
    "resident.py": "other",
}


def _is_on_gpu(each: object) -> bool:
    return isinstance(each, Tensor) and each.is_meta


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _bytes(name: str, args: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> float:
    """Bytes that a kernel reads and writes. A tensor that changes in place is both."""
    written = _size(outputs)
    if name in GATHERS:
        return 2 * written
    if name in SCATTERS:
        return 3 * _size(inputs[-1:])
    if name == "embedding_dense_backward":
        return 2 * _size(inputs[:1]) + written
    if name == "copy_":
        return _size([args[1]]) + written
    if name.startswith("_fused_adam"):
        return 2 * _size(inputs)
    if name.endswith("_") or name.startswith("_foreach"):
        return _size(inputs) + written
    return written if not inputs or name in FILLS else _size(inputs) + written


FILLS = frozenset(("full_like", "new_zeros", "zeros_like", "fill_", "zero_"))


def _products(name: str, args: Any) -> tuple[float, str]:
    """Operations of products, and the kind of the kernel."""
    if name in PRODUCTS:
        left, right = [each for each in tree_leaves(args) if isinstance(each, Tensor)][-2:]
        kind = "fp32" if left.dtype is torch.float32 else "products"
        return 2 * math.prod(left.shape) * right.shape[-1], kind
    if name == "_grouped_mm":
        left, right = args[:2]
        return 2 * left.shape[0] * left.shape[1] * right.shape[-1], "grouped"
    if name.startswith(ATTENTION):
        back = name.endswith("backward")
        batch, heads, tokens, size = args[1 if back else 0].shape
        return (10 if back else 4) * batch * heads * tokens**2 * size / 2, (
            "attention_back" if back else "attention"
        )
    return 0.0, "passes"


@functools.cache
def traced(shape: str, sequences: int, micro: int, length: int, layers: int = 0) -> Trace:
    """The trace of a step of one of the shapes of `bench_gpu_measure`. `layers`: 0 for all."""
    chosen = replace(SHAPES[shape], layers=layers)
    run = run_of(chosen, sequences, length, clip="global", micro=micro)
    return trace_step(run, chosen.owned)


def table(trace: Trace, card: Card) -> Iterator[str]:
    """A row per part and kind of kernel."""
    yield "| part | kernels | launches | TFLOP | GB | ms |"
    yield "|---|---|---|---|---|---|"
    groups = defaultdict[tuple[str, str], list[Kernel]](list)
    for kernel in trace.kernels:
        groups[kernel.part, kernel.kind].append(kernel)
    for (part, kind), kernels in sorted(groups.items()):
        flops, moved = sum(k.flops for k in kernels), sum(k.num_bytes for k in kernels)
        milliseconds = 1e3 * sum(kernel.seconds(card) for kernel in kernels)
        figures = f"{len(kernels)} | {flops / 1e12:.2f} | {moved / 1e9:.1f} | {milliseconds:.1f}"
        yield f"| {part} | {kind} | {figures} |"


def main() -> None:
    """Prints the counts, and the time and share of the peak that the model gives."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="2b")
    parser.add_argument("--sequences", type=int, default=16, help="of a step")
    parser.add_argument("--micro", type=int, default=0, help="of a micro-batch; 0: all at once")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    asked = parser.parse_args()
    shape = SHAPES[asked.shape]
    run = run_of(shape, asked.sequences, asked.length, clip="global", micro=asked.micro)
    trace = trace_step(run, shape.owned)
    print("\n".join(table(trace, CARD)))
    useful = step_flops_with(run, shape.owned) * run.train.batch_tokens
    seconds = trace.seconds(CARD)
    waits = ", ".join(f"{count} {name}" for name, count in trace.waits.most_common())
    print(
        f"{len(trace.kernels)} launches, {trace.waits.total()} waits ({waits}), "
        f"{trace.elementwise_bytes / 1e9:.0f} GB elementwise; {1e3 * seconds:.0f} ms (model), "
        f"{100 * useful / CARD.flops / seconds:.1f} % of the peak"
    )


if __name__ == "__main__":
    main()
