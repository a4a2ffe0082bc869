"""Tensors to bytes and back: exact cases, bounds, refusals."""

import math
import struct
from functools import partial

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm import codecs
from swarm.config import Codec
from swarm.errors import BadBlob
from swarm.experts import Shape, Slice, UnitLayout
from tests.blobs import blob_of

SHAPES: dict[str, Shape] = {"a.weight": (7, 5), "b.weight": (11,), "c.weight": (3, 2, 4)}


def layout_of(codec: Codec, *slices: Slice) -> UnitLayout:
    size = sum(piece.stop - piece.start for piece in slices)
    return UnitLayout("expert.0", codec, slices, size, size * codecs.DTYPES[codec].itemsize)


def whole(codec: Codec) -> UnitLayout:
    return layout_of(codec, *(Slice(n, 0, math.prod(s)) for n, s in SHAPES.items()))


def content_of(layout: UnitLayout, values: torch.Tensor) -> codecs.Content:
    return codecs.Content.of(blob_of(layout, {"x": values}))


def mean(blobs: list[bytes], codec: Codec, weights: list[int] | None = None) -> bytes:
    reads = [partial(read_in, memoryview(blob)) for blob in blobs]
    return codecs.mean_of(reads, len(blobs[0]), codec, weights).whole()


def decode_unit(
    layout: UnitLayout, shapes: dict[str, Shape], blob: codecs.Buffer
) -> dict[str, torch.Tensor]:
    read = partial(read_in, memoryview(blob))
    return dict(codecs.read_tensors(layout, shapes, read))


def read_in(blob: memoryview, offset: int, length: int) -> memoryview:
    return blob[offset : offset + length]


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.fixture(params=[1, 4, 2**20], ids=lambda size: f"chunk{size}")
def _chunk_sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "CHUNK_ELEMENTS", request.param)


def test_bytes_are_little_endian_without_header() -> None:
    layout = layout_of("fp32", Slice("x", 1, 3))
    blob = blob_of(layout, {"x": torch.tensor([[9.0, 1.5], [-2.0, 9.0]])})
    assert blob == struct.pack("<ff", 1.5, -2.0)
    short = blob_of(layout_of("bf16", Slice("x", 0, 1)), {"x": torch.tensor([1.5])})
    assert short == struct.pack("<f", 1.5)[2:]


@pytest.mark.usefixtures("_chunk_sizes")
@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_values_of_the_agreed_dtype_come_back_bit_for_bit(codec: Codec) -> None:
    before = {n: t.to(codecs.DTYPES[codec]) for n, t in tensors().items()}
    layout = whole(codec)
    blob = blob_of(layout, before)
    after = decode_unit(layout, SHAPES, blob)
    filled = codecs.allocate([layout], SHAPES)
    codecs.fill(filled, layout, blob)
    for name, tensor in before.items():
        for other in (after[name], filled[name]):
            assert other.dtype == tensor.dtype and other.shape == tensor.shape
            assert torch.equal(other, tensor)
    assert blob_of(layout, after) == blob


def test_bf16_is_off_by_at_most_one_part_in_256() -> None:
    # Half a step of 8 significant bits: 2^-8 of the value, the bound in the module's docstring.
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(1)) * 3
    layout = layout_of("bf16", Slice("x", 0, len(values)))
    decoded = decode_unit(layout, {"x": (len(values),)}, blob_of(layout, {"x": values}))[
        "x"
    ].float()
    relative = ((decoded - values).abs() / values.abs()).max().item()
    assert 2**-9 < relative <= 2**-8


def test_a_model_cut_into_parts_is_rebuilt_in_place() -> None:
    before = tensors()
    cut = [Slice("a.weight", 0, 13), Slice("a.weight", 13, 35), Slice("b.weight", 0, 4)]
    parts = [layout_of("fp32", cut[0]), layout_of("fp32", *cut[1:])]
    rest = layout_of("bf16", Slice("b.weight", 4, 11))
    after = {"a.weight": torch.zeros(7, 5), "b.weight": torch.zeros(11)}
    memory = {name: tensor.data_ptr() for name, tensor in after.items()}
    for part in [*parts, rest]:
        codecs.fill(after, part, blob_of(part, before))
    assert torch.equal(after["a.weight"], before["a.weight"])
    assert torch.equal(after["b.weight"][:4], before["b.weight"][:4])
    assert torch.equal(after["b.weight"][4:], before["b.weight"][4:].bfloat16().float())
    assert memory == {name: tensor.data_ptr() for name, tensor in after.items()}


def test_filling_a_parameter_leaves_no_trace_in_autograd() -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    layout = layout_of("fp32", Slice("x", 0, 4))
    codecs.fill({"x": weight}, layout, blob_of(layout, {"x": torch.ones(4)}))
    assert torch.equal(weight.detach(), torch.ones(4)) and weight.is_leaf and weight.grad is None


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (math.nan, "non_finite"),
        (math.inf, "non_finite"),
        (-math.inf, "non_finite"),
        (2.0**65, "out_of_range"),
        (-(2.0**65), "out_of_range"),
    ],
)
@pytest.mark.parametrize("codec", ["fp32", "bf16"])
@pytest.mark.usefixtures("_chunk_sizes")
def test_a_value_that_no_honest_peer_sends_is_refused(
    codec: Codec, value: float, reason: str
) -> None:
    layout = layout_of(codec, Slice("x", 0, 9))
    for place in (0, 4, 8):
        bad = torch.ones(9)
        bad[place] = value
        with pytest.raises(BadBlob) as refused:
            codecs.check_finite(layout, content_of(layout, bad))
        assert refused.value.reason == reason
    for edge in (2.0**64, -(2.0**64), 0.0):
        codecs.check_finite(layout, content_of(layout, torch.full((9,), edge)))


@pytest.mark.parametrize("size", [0, 1, 35, 37, 72])
def test_a_blob_of_another_size_is_refused(size: int) -> None:
    layout = layout_of("fp32", Slice("x", 0, 9))
    for use in (
        lambda: codecs.check_finite(layout, codecs.Content.of(bytes(size))),
        lambda: codecs.fill({"x": torch.zeros(9)}, layout, bytes(size)),
    ):
        with pytest.raises(BadBlob) as refused:
            use()
        assert refused.value.reason == "size"


@pytest.mark.usefixtures("_chunk_sizes")
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_an_fp32_mean_is_the_sum_in_order_divided(count: int) -> None:
    layout = whole("fp32")
    blobs = [blob_of(layout, tensors(seed)) for seed in range(count)]
    arrays = [numpy.frombuffer(blob, "<f4") for blob in blobs]
    wanted = arrays[0]
    for array in arrays[1:]:
        wanted = wanted + array
    wanted = wanted / numpy.float32(count)
    assert mean(blobs, "fp32") == wanted.tobytes()


def test_the_order_of_a_mean_is_the_callers() -> None:
    blobs = [struct.pack("<f", value) for value in (2.0**24, 1.0, 1.0)]
    assert mean(blobs, "fp32") == struct.pack("<f", 2.0**24 / 3)
    assert mean(blobs[::-1], "fp32") == struct.pack("<f", (2.0**24 + 2) / 3)


@given(st.lists(st.lists(st.floats(-1e6, 1e6), min_size=5, max_size=5), min_size=2, max_size=5))
def test_a_bf16_mean_is_the_fp32_mean_rounded_once(rows: list[list[float]]) -> None:
    inputs = [torch.tensor(row).bfloat16() for row in rows]
    layout = layout_of("bf16", Slice("x", 0, 5))
    blobs = [blob_of(layout, {"x": row}) for row in inputs]
    total = inputs[0].float()
    for row in inputs[1:]:
        total = total + row.float()
    assert mean(blobs, "bf16") == blob_of(layout, {"x": total / len(rows)})


def test_the_largest_admitted_values_have_a_finite_mean() -> None:
    layout = layout_of("bf16", Slice("x", 0, 1))
    largest = blob_of(layout, {"x": torch.tensor([codecs.MAX_MAGNITUDE])})
    codecs.check_finite(layout, codecs.Content.of(mean([largest] * 1000, "bf16")))


@pytest.mark.usefixtures("_chunk_sizes")
@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_a_weighted_mean_is_the_sum_in_order_of_shares(codec: Codec) -> None:
    layout = whole(codec)
    blobs = [blob_of(layout, tensors(seed)) for seed in range(3)]
    weights = [1, 2, 13]
    values = [codecs.values_in(blob, codec).float().numpy() for blob in blobs]
    wanted = numpy.zeros_like(values[0])
    for weight, value in zip(weights, values, strict=True):
        wanted = wanted + numpy.float32(weight / 16) * value
    encoded = torch.from_numpy(wanted).to(codecs.DTYPES[codec])
    assert mean(blobs, codec, weights) == bytes(encoded.view(torch.uint8).numpy())
    assert mean(blobs, codec, weights) != mean(blobs, codec)


def test_weights_whose_shares_were_rounded_up_keep_the_limit() -> None:
    layout = layout_of("fp32", Slice("x", 0, 1))
    largest = blob_of(layout, {"x": torch.tensor([codecs.MAX_MAGNITUDE])})
    sums = [sum(float(numpy.float32(w / (n * w + 1))) for w in [w] * n + [1]) for n, w in CASES]
    assert max(sums) > 1, "otherwise the test proves nothing"
    for number, weight in CASES:
        found = mean([largest] * (number + 1), "fp32", [weight] * number + [1])
        codecs.check_finite(layout, codecs.Content.of(found))


CASES = [(number, weight) for number in (2, 3, 5, 7, 40) for weight in (2, 3, 5, 11)]
"""`number` peers of weight `weight`, and one of weight 1."""


def test_blobs_cannot_be_changed_after_their_digest_is_taken() -> None:
    content = codecs.encoded(whole("fp32"), codecs.cut_from(tensors().__getitem__))
    for piece in content:
        assert isinstance(piece, memoryview)
        with pytest.raises(TypeError, match="read-only"):
            piece[0] = 1
