"""The planner's choice for a peer of many GPUs, its reason, and a start of it."""

import functools
import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.config import ComputeSection
from swarm.peer.machine.worker_processes import for_workers, meshes_of
from swarm.train.engine.engine_options import PASS_TOKENS, EngineKind, EngineOptions
from swarm.train.engine.hardware import Machine
from swarm.train.engine.mesh import BUSES, NVLINK, PCIE, Bus, Fabric, Mesh
from swarm.train.engine.sizes import pipeline_cut
from swarm.train.planning.ladder import Wishes, most_experts, plan_engine, rungs
from swarm.train.planning.memory import need_of
from swarm.train.planning.step_time import step_time
from swarm.train.workers.members import Lost
from tests.train.crews import lent_engines
from tests.train.planning.test_ladder import GB, model_of_120b, of_file
from tests.train.runs import batch, new_engine, tiny_run

AUTO = ComputeSection()


def site(gpus, device, bus, *, machines=1, gbit=25.0, compute=AUTO, run, **speeds):
    """Equal machines with a number of GPUs each, and 100 GB of host memory per GPU."""
    size = gpus * machines
    fabric = Fabric(size, gpus, BUSES[bus] if isinstance(bus, str) else bus, gbit / 8)
    machine = Machine("cuda", device * GB, 100 * GB, 4000 * GB, fabric=fabric, **speeds)
    wishes = Wishes(engine="resident", meshes=meshes_of(compute, size, run, per_node=gpus))
    return machine, wishes


def planned(run, owned, *args, **more):
    machine, wishes = site(*args, run=run, **more)
    return plan_engine(run, owned, machine, wishes)


def cut(plan):
    return plan.options.ep, plan.options.pp


# ------------------------------------------------ five choices


def test_what_fits_one_gpu_is_on_each_of_them():
    plan = planned(of_file("spes_7b"), 8, 8, 80, "nvlink")
    assert plan.fits and cut(plan) == (1, 1)
    assert plan.reason.startswith("resident: the fastest that fits; next best: heads and experts ")
    assert "since outputs of heads and experts are added up for 0.1" in plan.reason
    # All eight work on 256 micro-batches.
    assert plan.time.products == pytest.approx(plan.step_s, rel=0.02)
    assert plan.time.waiting == 0


def test_experts_are_dealt_out_where_the_whole_model_does_not_fit():
    """An eighth of 128 experts is owned. With all of them a GPU would need 398 GB of state."""
    run = model_of_120b()
    plan = planned(run, 16, 8, 141, "nvlink")
    assert plan.fits and (cut(plan), plan.options.moments) == ((8, 1), "fp32")
    assert (
        "experts dealt out over 8: the fastest that fits; next best: heads and experts cut over 8"
    ) in plan.reason
    assert "since outputs of heads and experts are added up for 4.1" in plan.reason
    whole = need_of(run, 16, replace(plan.options, ep=1), 8)
    assert whole.device_state / plan.need.device_state == pytest.approx(5.5, abs=0.1)
    # With less memory, layers would be recomputed, which costs more than outputs of heads.
    small = planned(run, 16, 8, 80, "nvlink")
    assert small.fits and (cut(small), small.options.tp) == ((8, 1), 8)
    assert (small.options.moments, small.options.recompute) == ("bf16", "none")
    dealt = small.others[0]
    assert dealt.fits and dealt.cut == (8, 1, 1)
    assert (dealt.options.shards, dealt.options.recompute) == (8, "routing")
    assert "since layers are computed again" in small.reason
    one = planned(run, 16, 8, 80, "nvlink", compute=ComputeSection(tensor_parallel=1))
    assert one.options == dealt.options
    assert "faster, if it did fit: masters and moments cut over 8, 322.9 GB" in one.reason


def test_masters_and_moments_are_cut_where_whole_ones_do_not_fit():
    run = of_file("spes_7b")
    found = [planned(run, 8, 8, size, "nvlink") for size in (80, 48)]
    assert [(cut(p), p.options.shards) for p in found] == [((1, 1), 1), ((1, 1), 8)]
    assert [p.options.recompute for p in found] == ["none", "none"]
    assert "masters and moments cut over 8: the fastest that fits" in found[1].reason
    saved = found[0].need.device_state - found[1].need.device_state
    assert saved == pytest.approx(20.7e9, rel=0.01)
    machine, wishes = site(8, 40, "nvlink", run=run)
    for wished in ("none", "state"):
        for each in rungs(run, machine, replace(wishes, shard=wished)):
            # Over all workers with the same stage, so not over a single pipeline, and never with
            # cut heads.
            is_cut = wished == "state" and each.tp == 1
            assert each.shards == (8 // each.pp if is_cut else 1)


def test_a_slow_bus_makes_it_a_pipeline():
    run = model_of_120b()
    slow, fast = (planned(run, 16, 8, 141, bus) for bus in ("pcie", "nvlink"))
    assert (cut(slow), cut(fast)) == ((1, 8), (8, 1))
    assert "next best: experts dealt out over 8" in slow.reason
    assert "since tokens travel to experts and back for 31" in slow.reason
    # 4 bytes an element of the residual stream, not each token to four experts and back.
    dealt = next(rung for rung in slow.others if rung.cut == (8, 1, 1))
    assert slow.time.stream < dealt.time.tokens / 20


def test_wide_layers_and_long_sequences_on_a_fast_bus():
    """Heads and experts are cut if a step has few micro-batches, so that no stage waits. For wide
    layers this cuts activations too, so no layer is recomputed.
    """
    sizes = {"hidden_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 64}
    model = {**sizes, "num_key_value_heads": 64, "num_experts": 8}
    few = {"train": {"batch_tokens": 16 * 2 * 2048}, "phases": {}}
    wide, rarely = of_file("spes_7b", model=model), of_file("spes_7b", model=model, **few)
    plan = planned(rarely, 2, 8, 141, "nvlink")
    assert plan.fits and (cut(plan), plan.options.tp) == ((8, 1), 8)
    assert plan.options.recompute == "none"
    dealt = next(rung for rung in plan.others if rung.cut == (2, 1, 1))
    assert dealt.fits and (dealt.options.recompute, dealt.options.shards) == ("routing", 8)
    assert planned(rarely, 2, 8, 141, "pcie").options.tp == 1
    # With 256 micro-batches stages wait little, and send less than cut heads do.
    plan = planned(wide, 2, 8, 141, "nvlink")
    assert plan.fits and (cut(plan), plan.options.tp, plan.options.shards) == ((1, 2), 1, 4)
    heads = next(rung for rung in plan.others if rung.cut == (8, 1, 8))
    assert heads.fits and plan.step_s < heads.time.total < 1.1 * plan.step_s
    assert heads.time.outputs > plan.time.waiting
    # Two sequences of 131,072 tokens per step: whole models leave six GPUs without a sequence, and
    # stages are idle for most of a step. Each rank has an eighth of a residual stream, so no layer
    # is recomputed.
    length = 131_072
    long = of_file(
        "spes_7b",
        data={"sequence_length": length, "validation_bytes": 200_000},
        train={"batch_tokens": 2 * length, "micro_batch_sequences": 1},
        phases={},
    )
    plan = planned(long, 8, 8, 80, "nvlink")
    assert plan.fits and (cut(plan), plan.options.tp) == ((8, 1), 8)
    assert plan.reason.startswith("resident, heads and experts cut over 8: the fastest that fits")
    assert plan.options.recompute == "none"
    for other in ((1, 4, 1), (1, 1, 1)):
        rung = next(rung for rung in plan.others if rung.cut == other)
        assert rung.fits and rung.time.total > 3 * plan.step_s
        assert rung.time.waiting > 2 * rung.time.products


def test_more_gpus_than_one_copy_takes_hold_several():
    run = model_of_120b()
    nodes = planned(run, 16, 8, 141, "nvlink", machines=2, gbit=400)
    assert cut(nodes) == (8, 1)  # and twice: tokens stay within a machine
    assert nodes.time.tokens == pytest.approx(planned(run, 16, 8, 141, "nvlink").time.tokens / 2)
    # Only sums of gradients cross: 5 GB of 8 bytes for each of 16 GPUs, half of them far away.
    assert nodes.time.sums > 20 * planned(run, 16, 8, 141, "nvlink").time.sums
    cards = planned(of_file("spes_7b"), 8, 8, 24, "pcie")
    assert cards.fits and cut(cards) == (1, 4)
    assert cards.options.shards == 2  # of each stage over the two that have it
    assert "masters and moments cut over 2, a pipeline of 4 stages" in cards.reason
    small = planned(of_file("spes_7b"), 8, 8, 20, "pcie")
    assert small.fits and cut(small) == (4, 1)
    assert small.options.shards == 8  # shared tensors' over all, the experts' over two each


def test_what_fits_in_no_other_way_streams_on_every_gpu_from_one_host_copy():
    """117 B parameters on four GPUs of 24 GB, with 512 GB of host memory for all of them."""
    run = model_of_120b(train={"micro_batch_sequences": 1})
    box = Machine("cuda", 24 * GB, 512 * GB, 4000 * GB, cores=64)
    auto, anywhere = ComputeSection(parallel=4), Wishes(frozen="int8", folder=Path("frozen"))
    share, wishes = for_workers(run, auto, box, anywhere, Fabric(4, 4, PCIE))
    plan = plan_engine(run, 8, share, wishes)
    assert plan.fits and plan.options.kind is EngineKind.STREAMING
    assert plan.options.moments == "fp32" and plan.options.frozen_folder is None
    assert plan.reason.startswith("streaming, every layer is streamed, activation checkpoints on")
    assert "faster, if it did fit: masters and moments cut over 4, 183.7 GB of GPU" in plan.reason
    assert not any(rung.fits for rung in plan.others)
    # One GPU needs the same host memory except for inputs of layers, and four times as long.
    inputs = 4 * 36 * PASS_TOKENS * 2880
    alone = plan_engine(run, 8, box, replace(anywhere, folder=None))
    assert alone.options.kind is EngineKind.STREAMING and alone.fits
    assert 4 * (plan.need.host - inputs) == pytest.approx(alone.need.host - inputs)
    assert plan.need.device == pytest.approx(alone.need.device, rel=0.01)
    assert 3.8 < alone.step_s / plan.step_s <= 4.1
    assert most_experts(run, share, wishes) >= 8


def test_streaming_is_taken_after_every_way_that_fits_the_gpus_and_on_one_machine_only():
    run = model_of_120b()
    for args, more in (((8, 141, "pcie"), {}), ((8, 80, "nvlink"), {})):
        machine, wishes = site(*args, run=run, **more)
        large = replace(machine, host_bytes=300 * GB)
        resident = plan_engine(run, 16, large, wishes)
        plan = plan_engine(run, 16, large, replace(wishes, engine="auto"))
        assert plan.options == resident.options and plan.fits
        assert plan.below[: len(resident.below)] == resident.below
        assert {each.kind for each in plan.below[len(resident.below) :]} == {EngineKind.STREAMING}
        # With too little host memory it is no level to step down to.
        small = replace(machine, host_bytes=40 * GB)
        small = plan_engine(run, 16, small, replace(wishes, engine="auto"))
        assert small.below == resident.below
    machine, wishes = site(4, 24, "pcie", machines=2, run=run)
    kinds = {each.kind for each in rungs(run, machine, replace(wishes, engine="auto"))}
    assert kinds == {EngineKind.RESIDENT}


def test_smaller_moments_are_taken_where_nothing_fits_with_larger_ones():
    plan = planned(of_file("spes_7b"), 8, 8, 22, "pcie")
    assert plan.options.moments == "fp32"
    assert "faster, with bf16 moments: a pipeline of 4" in plan.reason
    rounded = next(rung for rung in plan.others if rung.cut == (1, 4, 1))
    assert rounded.fits and rounded.time.total < plan.step_s


# ------------------------------------------------ properties of every choice

SIZES = st.sampled_from([(8, 1), (8, 2), (4, 1), (6, 1), (1, 4), (5, 3)])
RUNS = st.sampled_from(["7b", "120b", "2b"])


@functools.cache
def run_named(name):
    return model_of_120b() if name == "120b" else of_file(f"spes_{name}")


@st.composite
def sites(draw):
    """A run, experts owned, and machines with any bus and network."""
    run = run_named(draw(RUNS))
    gpus, machines = draw(SIZES)
    rates = [draw(st.floats(1, 500)) for _ in range(4)]
    bus = Bus("pcie", rates[0], rates[1])
    owned = draw(st.sampled_from([1, run.model.num_experts // 8]))
    machine, wishes = site(
        gpus,
        draw(st.sampled_from([16, 24, 80, 141])),
        bus,
        machines=machines,
        gbit=rates[2],
        run=run,
        tflops=rates[3],
    )
    return run, owned, machine, wishes


@settings(max_examples=5, deadline=None)
@given(sites(), st.sampled_from(["bus", "mixed", "between"]), st.floats(1, 20))
def test_more_bandwidth_never_makes_a_plan_slower(found, what, times):
    run, owned, machine, wishes = found
    bus, fabric = machine.fabric.bus, machine.fabric
    if what == "bus":
        fabric = replace(fabric, bus=replace(bus, gpu_gb_s=times * bus.gpu_gb_s))
    elif what == "mixed":
        fabric = replace(fabric, bus=replace(bus, mixed_gb_s=times * bus.mixed_gb_s))
    else:
        fabric = replace(fabric, between_gb_s=times * fabric.between_gb_s)
    before = plan_engine(run, owned, machine, wishes)
    after = plan_engine(run, owned, replace(machine, fabric=fabric), wishes)
    assert before.fits == after.fits
    if before.fits:  # among plans that do not fit, the need decides
        assert after.step_s <= before.step_s * (1 + 1e-12)


@settings(max_examples=5, deadline=None)
@given(sites())
def test_the_choice_is_the_fastest_of_what_fits(found):
    run, owned, machine, wishes = found
    plan = plan_engine(run, owned, machine, wishes)
    rest = [each for each in plan.others if each.fits]
    assert plan.fits or not rest
    alike = [each for each in rest if each.options.moments == plan.options.moments]
    assert all(plan.step_s <= each.time.total for each in alike)
    if not plan.fits:
        return
    # And of its variants the one without recomputing, if that fits.
    for ways, mesh in product(("none", "routing"), wishes.meshes):
        if mesh.tp > 1 and (plan.options.moments == "int8" or plan.options.shards > 1):
            continue  # neither is cut by heads
        options = replace(plan.options, recompute=ways, ep=mesh.ep, pp=mesh.pp, tp=mesh.tp)
        need = need_of(run, owned, options, mesh.size)
        if need.crowded <= machine.usable_device:
            assert plan.step_s <= step_time(run, owned, options, machine).total
    needs = [need_of(run, owned, options, machine.fabric.size).crowded for options in plan.below]
    assert [plan.need.crowded, *needs] == sorted([plan.need.crowded, *needs], reverse=True)


# ------------------------------------------------ seconds


def test_bytes_take_as_long_as_the_slowest_hop_that_they_cross():
    fabric = Fabric(8, 4, Bus("pcie", 10.0, 25.0), 1.0)
    network = 0.96e9
    assert fabric.nodes == 2
    # Within machines: three times 25 GB/s for 4 x 8 GB is more than 10 GB/s for 8 GB each.
    near = [range(4), range(4, 8)]
    assert fabric.exchange_s(near, 8e9) == pytest.approx(32 / 25)
    assert replace(fabric, bus=Bus("pcie", 10.0)).exchange_s(near, 8e9) == pytest.approx(0.8)
    # Among all: 4 of 7 others are in the other machine, and four ranks share its network.
    assert fabric.exchange_s([range(8)], 7e9) == pytest.approx(4 * 4e9 / network)
    assert fabric.exchange_s([(rank,) for rank in range(8)], 7e9) == 0
    pairs = [(rank, rank + 1) for rank in range(7)]
    assert fabric.stream_s(pairs, 1e9) == pytest.approx(1e9 / network)
    assert fabric.stream_s(pairs[:3], 1e9) == pytest.approx(0.1)
    assert str(Fabric(16, 8, NVLINK, 50.0)) == (
        "8 in a machine over nvlink, 2 machines over 400 Gbit/s"
    )
    assert "machines" not in str(Fabric(8, 8, PCIE))


def test_a_pipeline_waits_for_its_slowest_stage_and_while_it_fills():
    run = model_of_120b()
    options = replace(EngineOptions.of(run, device="cuda"), pp=8)
    machine, _ = site(8, 141, "nvlink", run=run)
    time = step_time(run, 16, options, machine)
    micro = run.train.batch_tokens // (run.train.micro_batch_sequences * run.data.sequence_length)
    share = max(pipeline_cut(run, options).shares)
    assert (time.products + time.waiting) / time.products == pytest.approx(
        8 * share * (micro + 7) / micro
    )
    assert time.sums == 0


@pytest.mark.parametrize(
    # Of 33 the last one goes alone, and fills and drains the stages again.
    "micro_batches, slots",
    [(32, 2 * 32 + 3), (33, 2 * 33 + 2 * 3)],
)
def test_each_chunk_of_a_pipeline_is_a_slot(micro_batches, slots):
    batch = {"batch_tokens": micro_batches * 2048, "micro_batch_sequences": 1}
    run = of_file("spes_7b", train=batch, phases={})
    machine, _ = site(4, 80, "pcie", run=run)
    plain = replace(EngineOptions.of(run, device="cuda"), pp=4)
    chunks = replace(plain, schedule="interleaved", chunks=2)
    one, two = (step_time(run, 8, options, machine) for options in (plain, chunks))
    share = pipeline_cut(run, chunks).slot
    assert two.products == one.products
    assert (two.products + two.waiting) / two.products == pytest.approx(
        4 * share * slots / micro_batches
    )
    assert two.stream == pytest.approx(one.stream * slots / (micro_batches + 3))


def test_ranks_without_a_micro_batch_wait():
    run = of_file("spes_2b", train={"batch_tokens": 9 * 4096}, phases={})
    machine, _ = site(8, 80, "nvlink", run=run)
    for ep in (1, 4):
        options = replace(EngineOptions.of(run, device="cuda"), ep=ep)
        time = step_time(run, 1, options, machine)
        # One of them has two of nine micro-batches.
        assert time.waiting / time.products == pytest.approx(2 * 8 / 9 - 1)


# ------------------------------------------------ chosen engines start


def test_every_mesh_is_one_that_a_person_may_ask_for():
    run = of_file("spes_7b")  # 16 layers, 32 experts
    every = meshes_of(AUTO, 48, run)
    found = [(mesh.ep, mesh.pp) for mesh in every if mesh.tp == 1]
    assert (1, 1) in found and (16, 1) in found and (1, 16) in found
    assert (24, 1) in found and (1, 24) not in found  # no more stages than layers
    for ep, pp in found:
        asked = ComputeSection(expert_parallel=ep, pipeline=pp)
        assert [(mesh.ep, mesh.pp) for mesh in meshes_of(asked, 48, run)] == [(ep, pp)]
    assert [mesh.tp for mesh in every if mesh.tp > 1] == [2, 4, 8, 16]  # of 16 heads
    for tp in (2, 4, 8, 16):
        assert meshes_of(ComputeSection(tensor_parallel=tp), 48, run) == (Mesh(48, tp, 1, tp),)
    without = ComputeSection(pipeline=1, tensor_parallel=1)
    assert [mesh.ep for mesh in meshes_of(without, 4, run)] == [1, 2, 4]
    assert [mesh.pp for mesh in meshes_of(ComputeSection(expert_parallel=1), 4, run)] == [1, 2, 4]
    (alone,) = meshes_of(AUTO, 0, run)
    assert (alone.size, alone.width) == (1, 1)


def test_every_mesh_that_may_be_chosen_starts_and_adds_up_as_many_bytes_as_planned(crews):
    run = tiny_run(
        model={"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
        train={"micro_batch_sequences": 1, "batch_tokens": 3 * 16},  # one of four has none
    )
    owned, meshes = (0, 1), meshes_of(AUTO, 4, run)
    assert len(meshes) == 6
    losses = []
    with lent_engines(crews, workers=4) as make:
        for mesh in meshes:
            cut = {"ep": mesh.ep, "pp": mesh.pp, "tp": mesh.tp}
            engine = make(run, owned, **cut)
            losses.append(engine.step(batch(run, 0), lr=1e-2).cross_entropy)
            engine.close()
            options = replace(EngineOptions.of(run), **cut)
            machine = replace(
                Machine("cpu", 0, GB, GB), fabric=Fabric(4, 4, Bus("pcie", 1e-9, math.inf))
            )
            planned = step_time(run, len(owned), options, machine).sums
            _, num_bytes = engine.traffic.get("sums", (0, 0))
            assert num_bytes == pytest.approx(planned, rel=0.02)
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)


def test_workers_without_memory_go_on_with_another_mesh(crews):
    run = tiny_run(model={"num_hidden_layers": 4}, train={"micro_batch_sequences": 1})
    owned, below = (0, 1), replace(EngineOptions.of(run), ep=4)
    straight = new_engine(run, owned)
    with lent_engines(crews, workers=4) as make:
        engine = make(run, owned, pp=4, below=[below])
        for step in range(2):
            stats, alone = (each.step(batch(run, step), lr=1e-2) for each in (engine, straight))
            assert stats.loss == pytest.approx(alone.loss, rel=1e-4)
            if step == 0:
                engine._force._judge(Lost("no memory", is_memory=True), 0)
                engine._force.close()
        assert "experts dealt out over 4" in engine.describe()
