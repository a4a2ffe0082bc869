"""The number of a peer's workers, and each one's share of the machine."""

import logging
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from swarm.config import ComputeSection
from swarm.errors import ConfigError, WorkersFailed
from swarm.peer.machine.machine_survey import engine_for
from swarm.peer.machine.worker_processes import (
    fabric_of,
    for_workers,
    meshes_of,
    nodes_of,
    num_elsewhere,
    num_workers,
    place_of,
    ready_for_nodes,
    share_of,
)
from swarm.train.engine.engine_options import EngineKind, EngineOptions
from swarm.train.engine.hardware import Machine
from swarm.train.engine.mesh import NVLINK
from swarm.train.planning.ladder import Wishes, plan_engine
from swarm.train.workers.crew import Crew, Place
from tests.train.runs import tiny_run

RUN, IN_BF16 = tiny_run(), tiny_run(train={"compute": "bf16"})
OPTIONS = EngineOptions.of(RUN)
NODE = Machine("cuda", 80e9, 800e9, 1e12, cores=64)


@pytest.fixture
def options_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Callable[[ComputeSection], list[EngineOptions]]:
    """The chosen and the lower levels of a peer's engine, which is not started."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(
        "swarm.peer.machine.worker_processes.ParallelEngine", lambda run, options, *_, **__: options
    )
    return lambda compute: cast(Any, engine_for(RUN, compute, tmp_path))


def test_all_gpus_are_taken_or_as_many_as_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert num_workers(ComputeSection(), "cuda") == 0
    assert num_workers(ComputeSection(parallel="all"), "cuda") == 8
    assert num_workers(ComputeSection(parallel=4), "cuda") == 4
    with pytest.raises(ConfigError, match=r"--gpus\) = 9: PyTorch finds 8 on this machine"):
        num_workers(ComputeSection(parallel=9), "cuda")


def test_processes_on_the_cpu_are_for_those_that_ask_for_the_cpu() -> None:
    assert num_workers(ComputeSection(device="cpu", parallel=2), "cpu") == 2
    for compute in (ComputeSection(parallel=2), ComputeSection(device="cpu", parallel="all")):
        with pytest.raises(ConfigError, match="there is no GPU here to compute on"):
            num_workers(compute, "cpu")


def test_workers_of_other_machines_need_an_address_and_one_of_the_peers_own() -> None:
    both = {"remote_workers": 8, "workers_from": "10.0.0.1:31340"}
    assert num_elsewhere(ComputeSection(parallel=2, **both)) == 8
    assert num_elsewhere(ComputeSection()) == 0
    for given, why in (
        ({"remote_workers": 8}, "give --workers-from HOST:PORT too"),
        ({"workers_from": "10.0.0.1:31340"}, "give --remote-workers N too"),
        ({**both, "parallel": "off"}, "give --gpus too"),
        ({**both, "workers_from": "10.0.0.1:x"}, "is no HOST:PORT"),
    ):
        with pytest.raises(ConfigError, match=why):
            num_workers(ComputeSection(**{"parallel": 2, "device": "cpu", **given}), "cpu")


def test_nodes_are_waited_for_with_a_key_in_the_state_directory(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "demo-1"
    compute = ComputeSection(
        device="cpu", parallel=2, remote_workers=4, workers_from="127.0.0.1:0", workers_wait_s=0.1
    )
    place = Place(2, "cpu", 1, "gloo")
    plan: Any = SimpleNamespace(options=replace(OPTIONS, ep=3), below=[replace(OPTIONS, ep=2)])
    nodes = nodes_of(compute, plan, folder, place)
    assert nodes is not None
    assert (tmp_path / "workers.key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(WorkersFailed, match=r"within 0 s 0 of 4 workers .* a multiple of 6"):
        Crew(place, nodes)
    nodes.close()
    assert nodes_of(ComputeSection(device="cpu", parallel=2), plan, folder, place) is None


def test_what_other_machines_need_is_there_before_a_peer_reads_or_fetches_anything(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    ready_for_nodes(ComputeSection(device="cpu", parallel=2), tmp_path)
    assert not list(tmp_path.iterdir()) and not caplog.text
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        far = ComputeSection(
            device="cpu", parallel=2, remote_workers=4, workers_from=f"127.0.0.1:{port}"
        )
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            ready_for_nodes(far, tmp_path)
    ready_for_nodes(far, tmp_path)
    assert f"127.0.0.1:{port} --key COPY_OF_THIS ({tmp_path / 'workers.key'})" in caplog.text
    made, said = (tmp_path / "workers.key").read_bytes(), caplog.text
    ready_for_nodes(far.model_copy(update={"workers_from": "127.0.0.1:0"}), tmp_path)
    assert (tmp_path / "workers.key").read_bytes() == made
    assert caplog.text == said, "which port it will be is not known yet"


def test_workers_stream_in_one_machine_from_one_copy_that_is_not_cut() -> None:
    compute = ComputeSection(device="cpu", parallel=2, engine="streaming")
    assert num_workers(compute, "cpu") == 2
    wishes = Wishes(engine="streaming", folder=Path("frozen"))
    machine, wishes = for_workers(RUN, compute, NODE, wishes, fabric_of(compute, 2, NVLINK))
    assert (wishes.engine, wishes.folder, machine.fabric.size) == ("streaming", None, 2)
    far = compute.model_copy(update={"remote_workers": 2, "workers_from": "127.0.0.1:0"})
    with pytest.raises(ConfigError, match="one copy of the weights in the memory of one machine"):
        num_workers(far, "cpu")
    with pytest.raises(ConfigError, match="one copy of the weights in the memory of one machine"):
        for_workers(RUN, far, NODE, wishes, fabric_of(far, 2, NVLINK))
    for what, given in (("compute.pipeline", {"pipeline": 2}), ("shard", {"shard": "state"})):
        cut = compute.model_copy(update=given)
        with pytest.raises(ConfigError, match=f"{what}.*: the streaming engine has one copy"):
            for_workers(RUN, cut, NODE, wishes, fabric_of(cut, 2, NVLINK))
        # A person who asks for a cut does not want streaming instead.
        cut = cut.model_copy(update={"engine": "auto"})
        _, other = for_workers(RUN, cut, NODE, Wishes(), fabric_of(cut, 2, NVLINK))
        assert other.engine == "resident"


def test_a_peers_workers_stream_where_it_is_asked_for(
    options_for: Callable[[ComputeSection], list[EngineOptions]], caplog: pytest.LogCaptureFixture
) -> None:
    compute = ComputeSection(device="cpu", parallel=2, engine="streaming")
    options = options_for(compute)
    assert {each.kind for each in options} == {EngineKind.STREAMING}
    assert "engine: streaming, every layer is streamed: the fastest that fits" in caplog.text


def test_each_worker_has_a_gpu_and_its_part_of_the_host() -> None:
    share = share_of(NODE, 8)
    assert (share.device_bytes, share.host_bytes, share.cores) == (80e9, 100e9, 8)
    compute = ComputeSection(parallel=8)
    assert place_of(IN_BF16, compute, share, 8) == Place(8, "cuda", 8, "nccl")
    assert place_of(RUN, compute, share, 8).threads == 1  # an exact run
    asked = ComputeSection(device="cpu", parallel=2, threads=3)
    on_cpu = Machine("cpu", 0, 8e9, 1e9, cores=2)
    assert place_of(RUN, asked, on_cpu, 2) == Place(2, "cpu", 3, "gloo")


def cuts(compute: ComputeSection, workers: int, experts: int, layers: int) -> list[tuple[int, int]]:
    model = RUN.model.model_copy(update={"num_experts": experts, "num_hidden_layers": layers})
    run = RUN.model_copy(update={"model": model})
    return [(mesh.ep, mesh.pp) for mesh in meshes_of(compute, workers, run) if mesh.tp == 1]


def test_experts_may_be_dealt_out_over_every_divisor_of_the_workers() -> None:
    without = ComputeSection(parallel=8, pipeline=1)
    assert cuts(without, 8, 128, 16) == [(1, 1), (2, 1), (4, 1), (8, 1)]
    assert cuts(without, 8, 4, 16) == [(1, 1), (2, 1), (4, 1)]
    assert cuts(ComputeSection(), 0, 128, 16) == [(1, 1)]
    assert cuts(ComputeSection(expert_parallel=4), 8, 128, 16) == [(4, 1)]
    assert cuts(ComputeSection(expert_parallel=1, pipeline=1), 8, 128, 16) == [(1, 1)]
    for asked, workers, experts in ((3, 8, 128), (8, 4, 128), (8, 8, 4), (2, 0, 128)):
        with pytest.raises(ConfigError, match=f"compute.expert_parallel = {asked}: it has to"):
            cuts(ComputeSection(expert_parallel=asked), workers, experts, 16)


def test_layers_may_be_cut_over_every_divisor_of_the_workers() -> None:
    without = ComputeSection(parallel=8, expert_parallel=1)
    assert cuts(without, 8, 128, 16) == [(1, 1), (1, 2), (1, 4), (1, 8)]
    assert cuts(without, 8, 128, 4) == [(1, 1), (1, 2), (1, 4)]
    assert cuts(ComputeSection(pipeline=4), 8, 128, 32) == [(1, 4)]
    assert cuts(ComputeSection(), 4, 4, 4) == [(1, 1), (1, 2), (1, 4), (2, 1), (4, 1)]
    for asked, workers, layers in ((3, 8, 32), (8, 8, 4), (2, 0, 32)):
        with pytest.raises(ConfigError, match=f"compute.pipeline = {asked}: it has to divide"):
            cuts(ComputeSection(pipeline=asked), workers, 128, layers)
    both = ComputeSection(pipeline=2, expert_parallel=2)
    assert cuts(both, 8, 128, 32) == [(2, 2)]
    with pytest.raises(ConfigError, match=r"divided by 4, .* compute\.expert_parallel = 2"):
        cuts(both, 6, 128, 32)


def test_workers_are_planned_with_what_they_reach_each_other_by() -> None:
    compute = ComputeSection(parallel=8, remote_workers=8, between_gbit=100.0)
    fabric = fabric_of(compute, 8, NVLINK)
    assert (fabric.size, fabric.nodes, fabric.between_gb_s) == (16, 2, 12.5)
    machine, wishes = for_workers(RUN, compute, NODE, Wishes(), fabric)
    assert (machine.host_bytes, machine.fabric) == (100e9, fabric)
    assert {mesh.size for mesh in wishes.meshes} == {16}
    assert (wishes.engine, wishes.schedule) == ("resident", "1f1b")


def test_a_peers_engine_deals_experts_out_where_it_is_asked_to(
    options_for: Callable[[ComputeSection], list[EngineOptions]], caplog: pytest.LogCaptureFixture
) -> None:
    for asked, ep in ((0, 1), (1, 1), (2, 2)):
        compute = ComputeSection(device="cpu", parallel=2, expert_parallel=asked)
        options = options_for(compute)
        assert options[0].ep == ep
        chosen = caplog.messages[0].partition(": the fastest")[0]  # the next best comes after
        assert ("experts dealt out over 2" in chosen) == (ep == 2)
        caplog.clear()


def test_a_peers_engine_is_of_as_many_workers_as_it_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Mock(side_effect=ConfigError("no process is started here"))
    monkeypatch.setattr("swarm.peer.machine.worker_processes.Crew", start)
    compute = ComputeSection(device="cpu", parallel=2)
    with pytest.raises(ConfigError, match="no process is started here"):
        engine_for(RUN, compute, tmp_path)
    assert [call.args[0] for call in start.call_args_list] == [Place(2, "cpu", 1, "gloo")]


def test_a_peers_engine_is_a_pipeline_where_it_is_asked_for(
    options_for: Callable[[ComputeSection], list[EngineOptions]], caplog: pytest.LogCaptureFixture
) -> None:
    compute = ComputeSection(
        device="cpu", parallel=2, pipeline=2, pipeline_schedule="gpipe", recompute="none"
    )
    options = options_for(compute)
    assert {(each.pp, each.ep, each.schedule) for each in options} == {(2, 1, "gpipe")}
    assert "a pipeline of 2 stages (gpipe; layers 0-0 | 1-1, with the head" in caplog.messages[0]


@pytest.mark.parametrize("layers, chunks", [(2, 1), (5, 2), (6, 3), (8, 3)])
def test_stages_are_interleaved_where_there_are_layers_for_it(layers: int, chunks: int) -> None:
    run = tiny_run(model={"num_hidden_layers": layers})
    compute = ComputeSection(
        parallel=2, pipeline=2, pipeline_schedule="interleaved", pipeline_chunks=3
    )
    fabric = fabric_of(compute, 2, NVLINK)
    machine, wishes = for_workers(run, compute, NODE, Wishes(), fabric)
    plan = plan_engine(run, 2, machine, wishes)
    schedule = "interleaved" if chunks > 1 else "1f1b"
    every = (plan.options, *plan.below)
    assert {(each.pp, each.schedule, each.chunks) for each in every} == {(2, schedule, chunks)}
    said = f"2 stages (interleaved, {chunks} chunks of layers each; layers 0-"
    assert (said in plan.reason) == (chunks > 1)
