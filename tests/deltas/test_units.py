"""Deltas of units: sizes, exact cases, the feedback of errors, refusals."""

import struct
from collections.abc import Iterable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.codecs import Content, bytes_of, values_in
from swarm.codings import BLOCK, coded_bytes
from swarm.deltas.blocks import canonical
from swarm.deltas.unit_deltas import (
    GROUP_ELEMENTS,
    RUN_ELEMENTS,
    Reduced,
    check_delta,
    decode_delta,
    elements_of,
    encode_delta,
    in_order,
    in_parts,
    mean_of_deltas,
    reduced,
)
from swarm.errors import BadBlob
from tests.deltas.units import CODINGS, applied, base_of, delta_of, encoded, gaussian, reading, unit

BYTES_A_BLOCK = {"b2": 66, "b1": 34}


@pytest.mark.parametrize(("coding", "a_block"), BYTES_A_BLOCK.items())
def test_the_size_follows_from_the_layout(coding, a_block):
    for blocks in (1, 255, 256, 257, 1000):
        layout = unit(coding, "fp32", BLOCK * blocks - 5)
        assert coded_bytes(layout) == blocks * a_block
    assert coded_bytes(unit("bf16", "fp32", 77)) == 154
    assert coded_bytes(unit("none", "fp32", 77)) == 308
    assert coded_bytes(unit("none", "bf16", 77)) == 154


def test_scales_of_a_group_stand_before_its_codes():
    values = torch.cat([torch.full((GROUP_ELEMENTS,), 1.0), torch.full((300,), -2.0)])
    blob = encoded(unit("b1", "fp32", len(values)), values)
    one, two = struct.pack("<f", 1.0)[2:], struct.pack("<f", 2.0)[2:]
    group, last = blob[: 256 * 34], blob[256 * 34 :]
    assert group == one * 256 + bytes([255]) * (GROUP_ELEMENTS // 8)
    # The last block has 44 elements of 256. Its mean magnitude is 88 / 256, and its padding is 0.
    scale = struct.pack("<f", 88 / 256)[2:]
    assert last[:4] == two + scale and last[4:36] == bytes(32)


@pytest.mark.parametrize("coding", CODINGS)
def test_groups_that_are_worked_on_together_are_coded_one_after_the_other(coding):
    size = RUN_ELEMENTS + 2 * GROUP_ELEMENTS + 300
    values = gaussian(size, seed=3)
    blob = encoded(unit(coding, "fp32", size), values)
    groups = values.split(GROUP_ELEMENTS)
    assert blob == b"".join(encoded(unit(coding, "fp32", len(each)), each) for each in groups)
    found = [part for _, part in in_parts(unit(coding, "fp32", size), decoded(coding, size, blob))]
    alone = [
        decoded(coding, len(each), encoded(unit(coding, "fp32", len(each)), each))(0, len(each))
        for each in groups
    ]
    assert torch.equal(torch.cat(found), torch.cat(alone))


def decoded(coding, size, blob):
    return decode_delta(unit(coding, "fp32", size), delta_of(blob))


@pytest.mark.parametrize("coding", CODINGS)
def test_parts_of_a_delta_are_the_tensors_that_it_was_made_of(coding):
    sizes = (5, RUN_ELEMENTS - 3, 700)
    layout = unit(coding, "bf16", *sizes)
    tensors = {name: gaussian(size + 9, seed=size) for name, size in zip("abc", sizes, strict=True)}
    read = elements_of(layout, lambda part: tensors[part.name][part.start : part.stop])
    blob = encode_delta(layout, read).whole()
    whole = torch.cat(
        [tensors[name][3 : 3 + size] for name, size in zip("abc", sizes, strict=True)]
    )
    assert blob == encoded(layout, whole)
    parts = list(in_parts(layout, decode_delta(layout, delta_of(blob))))
    assert [(part.name, part.start, part.stop) for part, _ in parts] == [
        ("a", 3, 8),
        ("b", 3, RUN_ELEMENTS - 2),
        ("b", RUN_ELEMENTS - 2, RUN_ELEMENTS),
        ("c", 3, 703),
    ]
    values = torch.cat([values for _, values in parts])
    after = torch.frombuffer(
        bytearray(applied(layout, base_of(layout, torch.zeros(len(whole))), blob)),
        dtype=torch.bfloat16,
    )
    assert torch.equal(canonical(values).bfloat16(), after)


def test_a_value_moves_by_the_sum_and_is_rounded_once():
    layout = unit("bf16", "bf16", 3)
    blob = encoded(layout, torch.tensor([127.0, 1.0, 0.0]))
    base = base_of(layout, torch.tensor([1.0, 256.0, -0.0]))
    after = values_in(applied(layout, base, blob), "bf16")
    # 257 lies between 256 and 258: a tie, to even. Negative zero becomes zero.
    assert after.tolist() == [128.0, 256.0, 0.0]
    assert not torch.signbit(after[2])


def test_sums_below_the_smallest_canonical_value_are_zero():
    layout = unit("bf16", "fp32", 3)
    blob = encoded(layout, torch.tensor([2.0**-100, -(2.0**-100), 2.0**-101]))
    base = base_of(layout, torch.tensor([2.0**-100 * (1 + 2**-20), 0.0, 2.0**-100]))
    after = values_in(applied(layout, base, blob), "fp32")
    assert after.tolist() == [2.0**-99 * (1 + 2**-21), -(2.0**-100), 2.0**-100]
    down = encoded(layout, torch.full((3,), -(2.0**-100)))
    after = values_in(applied(layout, base, down), "fp32")
    assert after.tolist() == [0.0, -(2.0**-100), 0.0]
    assert not torch.signbit(after[[0, 2]]).any()


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
@pytest.mark.parametrize("coding", CODINGS)
def test_what_rounding_leaves_out_is_sent_later(coding, codec):
    # One writer: d = master - v, v' = v + dec(d). The error does not grow with the rounds.
    layout = unit(coding, codec, 900)
    master = gaussian(900, seed=1, scale=0.1)
    blob = base_of(layout, master)
    errors = []
    for number in range(24):
        master = master + gaussian(900, seed=2 + number, scale=1e-2) if number < 12 else master
        before = values_in(blob, codec).float()
        blob = applied(layout, blob, encoded(layout, master - before))
        errors.append((master - values_in(blob, codec).float()).norm().item())
    # Without new progress the error falls to about the rounding of the agreed type.
    rounding = (master - master.to(values_in(blob, codec).dtype).float()).norm().item()
    assert errors[-1] < 0.6 * max(errors[:12]) or errors[-1] < 1.1 * rounding
    assert max(errors) < 12 * (1e-2 * 30)


def whole(groups: Iterable[Reduced]) -> tuple[bytes, bytes, torch.Tensor]:
    """B, v' and g of a unit."""
    groups = list(groups)
    left = b"".join(group.left for group in groups)
    delta, value = (b"".join(getattr(g, name) for g in groups) for name in ("delta", "value"))
    return delta, value, values_in(left, "fp32")


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
@pytest.mark.parametrize("coding", CODINGS)
def test_a_reducer_keeps_what_its_mean_lacks_and_sends_it_next_time(coding, codec):
    size = RUN_ELEMENTS + 1000
    layout = unit(coding, codec, 400, size - 400)
    deltas = [delta_of(encoded(layout, gaussian(size, seed=seed))) for seed in range(3)]
    base = base_of(layout, gaussian(size, seed=9))
    blob, value, left = whole(reduced(layout, reading(base), deltas))
    assert value == applied(layout, base, blob)
    values = [values_in(each, codec).float() for each in (base, value)]
    wanted = torch.cat([values for _, values in in_parts(layout, mean_of_deltas(layout, deltas))])
    assert torch.equal(left, wanted - (values[1] - values[0]))
    again = mean_of_deltas(layout, deltas, reading(bytes_of(left)))
    assert torch.equal(torch.cat([v for _, v in in_parts(layout, again)]), wanted + left)


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
@pytest.mark.parametrize("coding", ["b2", "b1"])
def test_nothing_of_any_mean_is_lost(coding, codec):
    layout = unit(coding, codec, 600)
    first = value = base_of(layout, gaussian(600, seed=9))
    left, total = None, torch.zeros(600)
    for number in range(12):
        moves = [gaussian(600, seed=2 * number + each, scale=1e-3) for each in range(2)]
        deltas = [delta_of(encoded(layout, each)) for each in moves]
        total += mean_of_deltas(layout, deltas)(0, 600)
        carried = None if left is None else reading(bytes_of(left))
        _, value, left = whole(reduced(layout, reading(value), deltas, carried))
    came = values_in(value, codec).float() - values_in(first, codec).float()
    assert torch.allclose(came + left, total, atol=1e-6)


def test_a_mean_is_the_sum_in_order_by_the_number_or_by_weights():
    layout = unit("b1", "fp32", 1000)
    deltas = [delta_of(encoded(layout, gaussian(1000, seed=seed))) for seed in range(3)]
    one, two, three = (decode_delta(layout, delta)(0, 1000) for delta in deltas)
    assert torch.equal(mean_of_deltas(layout, deltas)(0, 1000), (one + two + three) / 3)
    weighted = mean_of_deltas(layout, deltas, weights=[2, 1, 1])(0, 1000)
    assert torch.allclose(weighted, one / 2 + two / 4 + three / 4, atol=1e-6)


def test_the_mean_of_one_delta_is_that_delta():
    layout = unit("b2", "bf16", 3000)
    blob = encoded(layout, gaussian(3000))
    base = base_of(layout, gaussian(3000, seed=1))
    delta, value, left = whole(reduced(layout, reading(base), [delta_of(blob)]))
    assert delta == blob and value == applied(layout, base, blob)
    assert left.abs().max() > 0  # the rounding to bf16
    carried = reading(bytes_of(left))
    assert whole(reduced(layout, reading(base), [delta_of(blob)], carried))[0] != blob


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**16), size=st.integers(1, 1200), coding=st.sampled_from(CODINGS))
def test_any_bytes_of_the_right_size_are_applied_or_refused(seed, size, coding):
    layout = unit(coding, "bf16", size)
    generator = torch.Generator().manual_seed(seed)
    blob = torch.randint(0, 256, (coded_bytes(layout),), generator=generator, dtype=torch.uint8)
    base = base_of(layout, gaussian(size, seed))
    try:
        after = applied(layout, base, blob.numpy().tobytes())
    except BadBlob as refusal:
        assert refusal.reason in {"scale", "not_canonical", "out_of_range"}
    else:
        assert values_in(after, "bf16").isfinite().all()


# ------------------------------------------------ refusals


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("more", [-1, 1])
def test_a_delta_of_another_size_is_refused(coding, more):
    layout = unit(coding, "fp32", 600)
    blob = bytes(coded_bytes(layout) + more)
    with pytest.raises(BadBlob, check=lambda error: error.reason == "size"):
        applied(layout, bytes(2400), blob)


@pytest.mark.parametrize(
    "bits", [0x8000, 1, ((127 - 100) << 7) - 1, ((127 + 64) << 7) + 1, 0x7F80, 0xFFC0]
)
def test_a_bf16_delta_has_canonical_elements_only(bits):
    layout = unit("bf16", "fp32", 2)
    with pytest.raises(BadBlob, check=lambda error: error.reason == "not_canonical"):
        applied(layout, bytes(8), struct.pack("<HH", 0x3F80, bits))


def test_a_value_beyond_the_limit_is_refused_where_it_comes_out():
    layout = unit("bf16", "fp32", 2)
    limit = struct.pack("<f", 2.0**64)[2:]
    base = base_of(layout, torch.tensor([0.0, 2.0**62]))
    with pytest.raises(BadBlob, check=lambda error: error.reason == "out_of_range"):
        applied(layout, base, limit * 2)
    assert applied(layout, bytes(8), limit * 2) == struct.pack("<ff", 2.0**64, 2.0**64)


def test_a_base_that_is_not_finite_is_refused():
    layout = unit("b2", "bf16", 40)
    values = gaussian(40)
    values[30] = float("nan")
    with pytest.raises(BadBlob, check=lambda error: error.reason == "non_finite"):
        applied(layout, base_of(layout, values), encoded(layout, gaussian(40)))


def test_a_difference_that_is_not_finite_is_refused():
    for coding in CODINGS:
        values = gaussian(300)
        values[299] = float("inf")
        with pytest.raises(BadBlob, check=lambda error: error.reason == "non_finite"):
            encoded(unit(coding, "fp32", 300), values)


@pytest.mark.parametrize("coding", CODINGS)
def test_a_delta_that_moves_further_than_its_steps_can_is_refused(coding):
    layout = unit(coding, "bf16", 70_000)
    values = torch.full((70_000,), 1e-3)
    delta = delta_of(encoded(layout, values))
    largest = decode_delta(layout, delta)(0, 65_536).abs().max().item()
    base = reading(base_of(layout, torch.full((70_000,), 0.5)))
    check_delta(layout, delta)
    blob = encoded(layout, values)
    for size in (1, 1000, 65_536, len(blob)):
        pieces = [blob[i : i + size] for i in range(0, len(blob), size)]
        check_delta(
            layout, in_order(Content(len(blob), partial(iter, pieces))), base, absolute=largest
        )
    check_delta(layout, delta, base, absolute=largest)
    check_delta(layout, delta, base, absolute=largest / 2, relative=largest)
    with pytest.raises(BadBlob, check=lambda error: error.reason == "implausible_update"):
        check_delta(layout, delta, base, absolute=largest / 2, relative=largest / 2)
