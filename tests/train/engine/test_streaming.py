import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from swarm.errors import StateError
from swarm.experts import expert_of, expert_shapes, shared_shapes
from swarm.train.engine.engine_options import ActivationCheckpoints
from swarm.train.engine.host_memory import ALIGNMENT, Packing
from swarm.train.streaming.bus import Bus
from swarm.train.streaming.host_model import HostUnit
from tests.train.runs import all_names, batch, bits, new_engine, new_streaming, same, tiny_run

OWNED = [1, 3]
BF16 = {"train": {"compute": "bf16", "frozen": "bf16"}}
MUON = {"optimizer": {"kind": "muon", "clip_norm": 0.1}}
BY_UNIT = {"optimizer": {"clip": "unit", "clip_norm": 0.1}}


def assert_equal_for_steps(run, left, right, steps=5):
    for step in range(steps):
        # Frozen dataclasses of floats are equal only in every bit.
        assert left.step(batch(run, step), lr=1e-2) == right.step(batch(run, step), lr=1e-2)
    assert same(left.read(all_names(run)), right.read(all_names(run)))
    states = [dict(sorted(engine.state_dict().tensors.items())) for engine in (left, right)]
    assert same(*states)
    assert left.evaluate(batch(run, 9)) == right.evaluate(batch(run, 9))


@pytest.mark.parametrize(
    ("sections", "common", "only"),
    [
        pytest.param({}, {}, {}, id="everything streamed"),
        pytest.param({}, {}, {"resident_layers": None}, id="weights stay"),
        pytest.param(
            {},
            {},
            {"resident_layers": 1, "activation_checkpoints": ActivationCheckpoints.HOST},
            id="mixed",
        ),
        pytest.param(BF16, {}, {}, id="bf16"),
        pytest.param(BY_UNIT, {}, {"gradient_buffers": 1}, id="updates overlap backward"),
        pytest.param(BF16, {"frozen": "int8", "moments": "int8"}, {}, id="int8"),
        pytest.param({}, {"moments": "bf16"}, {"host_threads": 3}, id="bf16 moments"),
        pytest.param({"loss": {"balance": "global"}}, {}, {}, id="loss over all layers"),
        pytest.param({"model": {"num_hidden_layers": 5}}, {}, {}, id="five layers"),
        pytest.param({}, {"compute": "fp16"}, {}, id="fp16"),
        pytest.param(
            {"train": {"micro_batch_sequences": 1}}, {}, {"pass_micro_batches": 2}, id="two passes"
        ),
        pytest.param(
            {"train": {"micro_batch_sequences": 1}, **BY_UNIT},
            {},
            {"pass_micro_batches": 3, "resident_layers": 1},
            id="uneven passes",
        ),
        pytest.param(MUON, {}, {"host_threads": 3}, id="Muon"),
        pytest.param(
            {"optimizer": {**MUON["optimizer"], "clip": "unit"}, **BF16},
            {"moments": "int8"},
            {"gradient_buffers": 1},
            id="Muon by unit, int8 moments",
        ),
        pytest.param(MUON, {"compute": "fp16", "moments": "bf16"}, {}, id="Muon, fp16"),
    ],
)
def test_streaming_equals_resident_in_every_bit(engines, sections, common, only):
    run = tiny_run(**sections)
    resident = new_engine(run, OWNED, **common)
    assert_equal_for_steps(run, resident, engines(run, OWNED, **common, **only))


@pytest.mark.parametrize(
    "sections, common, only",
    [
        pytest.param(MUON, {"moments": "bf16"}, {}, id="all at once"),
        pytest.param(
            {"optimizer": {**MUON["optimizer"], "clip": "unit"}, **BF16},
            {"moments": "int8"},
            {"gradient_buffers": 1, "resident_layers": 1},
            id="by unit, int8 moments",
        ),
        pytest.param(
            {**MUON, "train": {"micro_batch_sequences": 1}},
            {"compute": "fp16"},
            {"pass_micro_batches": 2},
            id="fp16, two passes",
        ),
    ],
)
def test_a_device_that_orthogonalises_changes_no_bit(engines, sections, common, only):
    """As a GPU does, whose products are bf16 then; here they are those of the host."""
    run = tiny_run(**sections)
    streaming = engines(run, OWNED, **common, **only)
    streaming.orthogonalises = True
    assert_equal_for_steps(run, new_engine(run, OWNED, **common), streaming)


def test_frozen_experts_in_a_mapped_file_change_no_bit(engines, tmp_path):
    run = tiny_run(model={"num_hidden_layers": 4})
    assert_equal_for_steps(run, new_engine(run, OWNED), engines(run, OWNED, frozen_folder=tmp_path))
    on_disk = sum(file.stat().st_size for file in tmp_path.iterdir())
    matrices = 2 * sum(16 * 16 for _ in expert_shapes(run.model, 0))
    assert on_disk == 4 * matrices


def is_empty(folder):
    """Whether files are empty: each has one block, that of its last byte."""
    return all(f.st_blocks * 512 <= f.st_blksize for f in map(Path.stat, folder.iterdir()))


def test_lent_experts_stay_where_they_are_through_changes_of_owners_and_are_never_written(
    engines, tmp_path
):
    run = tiny_run()
    resident, borrower = new_engine(run, OWNED), engines(run, OWNED, frozen_folder=tmp_path)
    assert not is_empty(tmp_path)
    lent = {
        n: t + 0.5 for n, t in resident.read(all_names(run)).items() if expert_of(n) is not None
    }
    kept = {name: tensor.clone() for name, tensor in lent.items()}
    for owned in (OWNED, [0, 1], [2], OWNED):
        resident.own(owned)
        borrower.own(owned)
        assert same(resident.read(all_names(run)), borrower.read(all_names(run)))
        frozen = {name: tensor for name, tensor in lent.items() if expert_of(name) not in owned}
        resident.lend(frozen)
        borrower.lend(frozen)
        assert is_empty(tmp_path)
        assert_equal_for_steps(run, resident, borrower, steps=2)
        name = next(iter(frozen))
        for engine in (resident, borrower):
            engine.write({name: frozen[name] * 2})
        assert_equal_for_steps(run, resident, borrower, steps=1)
    for shift in (1.0, 2.0):
        newer = {name: tensor + shift for name, tensor in frozen.items()}
        resident.lend(newer)
        borrower.lend(newer)
        assert_equal_for_steps(run, resident, borrower, steps=1)
    assert same(lent, kept)


def test_lent_experts_of_another_type_are_copied(engines, tmp_path):
    run = tiny_run()
    common = {"frozen": "int8"}
    resident = new_engine(run, OWNED, **common)
    borrower = engines(run, OWNED, frozen_folder=tmp_path, **common)
    lent = {n: t + 0.5 for n, t in resident.read(all_names(run)).items() if expert_of(n) == 0}
    assert expert_of(next(iter(lent))) not in OWNED
    for engine in (resident, borrower):
        engine.lend(lent)
    for tensor in lent.values():
        tensor.zero_()
    assert_equal_for_steps(run, resident, borrower, steps=2)


def test_a_folder_that_cannot_be_written_is_a_state_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="cannot hold frozen experts"):
        new_streaming(tiny_run(), OWNED, frozen_folder=tmp_path / "file")


def test_tied_weights_agree_up_to_the_order_of_one_sum(engines):
    run = tiny_run(model={"tie_word_embeddings": True})
    resident, streaming = new_engine(run, OWNED), engines(run, OWNED)
    for step in range(3):
        left = resident.step(batch(run, step), lr=1e-2)
        right = streaming.step(batch(run, step), lr=1e-2)
        # The resident engine adds head and embedding micro-batch by micro-batch, and the streaming
        # one each separately: the same fp32 terms in another order.
        assert right.loss == pytest.approx(left.loss, rel=1e-6)
        assert right.grad_norm == pytest.approx(left.grad_norm, rel=1e-5)


def test_experts_move_while_updates_are_under_way(engines):
    run = tiny_run()
    resident, streaming = new_engine(run, [0, 1]), engines(run, [0, 1])
    for owned in ([0, 1], [1, 2], [], [0, 1, 2, 3]):
        resident.own(owned)
        streaming.own(owned)
        assert_equal_for_steps(run, resident, streaming, steps=2)


@pytest.mark.parametrize("first", ["resident", "streaming"])
def test_one_engine_goes_on_from_the_state_of_the_other(engines, first):
    run = tiny_run()
    straight, resident, streaming = new_engine(run, OWNED), new_engine(run), engines(run)
    here, there = (resident, streaming) if first == "resident" else (streaming, resident)
    here.own(OWNED)
    for step in range(4):
        straight.step(batch(run, step), lr=1e-2)
        if step < 2:
            here.step(batch(run, step), lr=1e-2)
    there.load_state_dict(here.state_dict())
    there.write({n: t for n, t in here.read(all_names(run)).items() if expert_of(n) in (0, 2)})
    for step in (2, 3):
        there.step(batch(run, step), lr=1e-2)
    assert same(there.read(all_names(run)), straight.read(all_names(run)))


def test_activation_checkpoints_in_bf16_cost_little(engines):
    run = tiny_run()
    exact, rounded = (
        engines(run, OWNED),
        engines(run, OWNED, activation_checkpoints=ActivationCheckpoints.HOST_BF16),
    )
    for step in range(5):
        left = exact.step(batch(run, step), lr=1e-3)
        right = rounded.step(batch(run, step), lr=1e-3)
    # Backward starts from inputs rounded to 8 bits (0.4 %). The loss itself changes far less.
    assert right.loss == pytest.approx(left.loss, rel=1e-3)
    assert right.grad_norm == pytest.approx(left.grad_norm, rel=2e-2)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_weights_cross_the_bus_once_per_pass_whatever_the_micro_batches(engines, micro_batches):
    sections = {"train": {"micro_batch_sequences": 4 // micro_batches}}
    run = tiny_run(model={"num_hidden_layers": 4}, **sections)
    engine = engines(run, OWNED)
    engine.step(batch(run, 0), lr=1e-2)
    before = engine.traffic
    engine.step(batch(run, 1), lr=1e-2)
    brought, sent = (now - then for now, then in zip(engine.traffic, before, strict=True))
    store = engine._store
    trained = {name: unit.wire_buffer.nbytes for name, unit in store.units.items()}
    frozen = store.frozen[0].buffer.nbytes
    # Four layers each way. But backward finds the last two where forward left them, and forward
    # finds the frozen experts of the first two where the previous step left them.
    layers = (4 + 2) * trained["layer.0"] + (2 + 2) * frozen
    assert brought == layers + trained["head"]
    gradients = sum(unit.packing.num_bytes for unit in store.units.values())
    num_norms = sum(len(unit.packing.fields) for unit in store.units.values())
    assert sent == gradients + 8 * num_norms


def test_device_bytes_do_not_grow_with_the_layers(engines):
    few = engines(tiny_run(model={"num_hidden_layers": 4}), OWNED)
    many = engines(tiny_run(model={"num_hidden_layers": 32}), OWNED)
    assert few.device_bytes == many.device_bytes
    assert many.host_bytes > 5 * few.host_bytes


def test_layers_below_wait_for_no_update_of_those_above(engines, monkeypatch):
    """With clipping by unit the head is updated before the backward pass has ended."""
    run = tiny_run(**BY_UNIT)
    engine, seen = engines(run, OWNED), []
    update = HostUnit.update_piece

    def watched(unit, piece, *rest):
        seen.append(unit.name)
        update(unit, piece, *rest)

    def embedding_backward(dx, ids):
        engine._store.units["head"].wait()
        seen.append("backward of the embedding")
        original(dx, ids)

    original = engine._device.add_embedding
    monkeypatch.setattr(HostUnit, "update_piece", watched)
    monkeypatch.setattr(engine._device, "add_embedding", embedding_backward)
    engine.step(batch(run, 0), lr=1e-2)
    assert seen.index("head") < seen.index("backward of the embedding")


@pytest.mark.parametrize("sections", [BF16, BF16 | BY_UNIT], ids=["global", "unit"])
def test_nothing_is_fetched_that_is_still_being_updated(engines, monkeypatch, sections):
    run = tiny_run(**sections)
    resident, engine = new_engine(run, OWNED), engines(run, OWNED)
    update, fetch, early = HostUnit.update_piece, engine._device.bus.fetch, []

    def slow(unit, *rest):
        time.sleep(0.003)  # a host that is much slower than the device
        update(unit, *rest)

    def watched(target, source, *after):
        for unit in engine._store.units.values():
            pending = unit.pending
            if unit.wire_buffer is source and pending is not None and not pending.done():
                early.append(unit.name)
        return fetch(target, source, *after)

    monkeypatch.setattr(HostUnit, "update_piece", slow)
    monkeypatch.setattr(engine._device.bus, "fetch", watched)
    assert_equal_for_steps(run, resident, engine, steps=3)
    assert early == []


@pytest.mark.parametrize("sections", [{}, BY_UNIT], ids=["global", "unit"])
def test_an_exception_in_an_update_thread_reaches_the_trainer(engines, monkeypatch, sections):
    run = tiny_run(**sections)
    engine = engines(run, OWNED)
    fail = Mock(side_effect=ZeroDivisionError("in an update thread"))
    monkeypatch.setattr(HostUnit, "update_piece", fail)
    with pytest.raises(ZeroDivisionError, match="in an update thread"):
        for step in range(2):
            engine.step(batch(run, step), lr=1e-2)
    # Nor can perhaps half updated values be offered.
    with pytest.raises(ZeroDivisionError, match="in an update thread"):
        engine.read(["model.norm.weight"])


def test_an_exception_while_fetching_reaches_the_trainer(engines, monkeypatch):
    engine = engines(tiny_run(), OWNED)
    engine.step(batch(tiny_run(), 0), lr=1e-2)
    fail = Mock(side_effect=RuntimeError("the bus is down"))
    monkeypatch.setattr(engine._device.bus, "fetch", fail)
    with pytest.raises(RuntimeError, match="the bus is down"):
        engine.step(batch(tiny_run(), 1), lr=1e-2)


def test_every_owned_tensor_changes_each_step_and_no_frozen_one(engines):
    run = tiny_run(**BF16)
    engine = engines(run, OWNED)
    trained = {*shared_shapes(run.model)}
    trained |= {name for expert in OWNED for name in expert_shapes(run.model, expert)}
    for step in range(3):
        before = engine.read(all_names(run))
        engine.step(batch(run, step), lr=1e-2)
        after = engine.read(all_names(run))
        changed = {n for n in after if not torch.equal(bits(after[n]), bits(before[n]))}
        assert changed == trained


def test_what_travels_is_the_master_rounded(engines):
    run = tiny_run(**BF16)
    engine = engines(run, OWNED)
    for step in range(3):
        engine.step(batch(run, step), lr=1e-2)
    engine.state_dict()
    for unit in engine._store.units.values():
        for name, wire in unit._wire.items():
            assert torch.equal(wire, unit.masters[name].detach().to(wire.dtype))


def test_a_packing_is_exact_up_to_alignment():
    packing = Packing.of([("a", (3, 5), torch.float32), ("b", (7,), torch.bfloat16)])
    assert packing.num_bytes == 2 * ALIGNMENT
    buffer = torch.zeros(packing.num_bytes, dtype=torch.uint8)
    views = packing.views(buffer)
    views["b"].fill_(1)
    assert not views["a"].any()
    assert views["a"].shape == (3, 5)
    assert int(buffer.view(torch.int16).count_nonzero()) == 7
    wider = packing.as_type(torch.float32)
    assert [replace(f, offset=0).num_bytes for f in wider.fields] == [60, 28]


def test_threads_that_wait_for_the_device_enter_it_first(engines, monkeypatch):
    entered = []
    monkeypatch.setattr(Bus, "enter", lambda _: entered.append(threading.current_thread().name))
    engine = engines(tiny_run(), OWNED)
    engine.step(batch(tiny_run(), 0), lr=1e-2)
    engine.read(all_names(tiny_run()))  # the host's thread enters it with its first update
    # Places are made again when other experts are owned.
    assert set(entered) == {"swarm-host", "swarm-fetch"}


def test_to_enter_a_gpu_makes_it_that_of_the_thread(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    Bus(torch.device("cpu")).enter()
    assert chosen == []
    bus = Bus(torch.device("cuda"))
    bus._in = "a stream"
    bus.enter()
    assert chosen == [torch.device("cuda", 1)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("sections", "only"),
    [
        pytest.param({}, {}, id="streamed"),
        pytest.param(
            BF16,
            {"activation_checkpoints": ActivationCheckpoints.HOST},
            id="bf16, checkpoints on the host",
        ),
        pytest.param(BY_UNIT, {"gradient_buffers": 1, "resident_layers": 1}, id="by unit"),
        pytest.param(
            {"train": {"micro_batch_sequences": 1}}, {"pass_micro_batches": 2}, id="passes"
        ),
    ],
)
def test_streams_and_copies_of_a_gpu_lose_nothing(engines, sections, only):
    run = tiny_run(model={"num_hidden_layers": 5}, **sections)
    resident = new_engine(run, OWNED, device="cuda")
    streaming = engines(run, OWNED, device="cuda", **only)
    for step in range(8):
        left = resident.step(batch(run, step), lr=1e-3)
        right = streaming.step(batch(run, step), lr=1e-3)
        # AdamW runs on the GPU here and on the CPU there, which round square roots in fp32
        # differently.
        assert right.loss == pytest.approx(left.loss, rel=1e-3)
        assert right.grad_norm == pytest.approx(left.grad_norm, rel=1e-2)
    mine, theirs = streaming.read(all_names(run)), resident.read(all_names(run))
    for name in all_names(run):
        # Eight updates of at most 1e-3 each. A lost or doubled one would be visible.
        torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=4e-3)
