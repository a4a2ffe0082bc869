"""How many workers a peer gets, and what of the machine each."""

from pathlib import Path

import pytest
import torch

from swarm.config import ComputeSection
from swarm.errors import ConfigError
from swarm.peer.machine import engine_for
from swarm.peer.workers import num_workers, place_of, share_of
from swarm.train.ladder import Machine
from swarm.train.parallel.crew import Crew, Place
from tests.train.runs import tiny_run

RUN, IN_BF16 = tiny_run(), tiny_run(train={"compute": "bf16"})
NODE = Machine("cuda", 80e9, 800e9, 1e12, cores=64)


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


def test_the_streaming_engine_has_no_workers() -> None:
    with pytest.raises(ConfigError, match="leave out one of --gpus and --engine"):
        num_workers(ComputeSection(device="cpu", parallel=2, engine="streaming"), "cpu")


def test_each_worker_has_a_gpu_and_its_part_of_the_host() -> None:
    share = share_of(NODE, 8)
    assert (share.device_bytes, share.host_bytes, share.cores) == (80e9, 100e9, 8)
    compute = ComputeSection(parallel=8)
    assert place_of(IN_BF16, compute, share, 8) == Place(8, "cuda", 8, "nccl")
    assert place_of(RUN, compute, share, 8).threads == 1  # an exact run
    asked = ComputeSection(device="cpu", parallel=2, threads=3)
    on_cpu = Machine("cpu", 0, 8e9, 1e9, cores=2)
    assert place_of(RUN, asked, on_cpu, 2) == Place(2, "cpu", 3, "gloo")


def test_a_peers_engine_is_of_as_many_workers_as_it_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = []

    def start(place: Place) -> Crew:
        places.append(place)
        raise ConfigError("no process is started here")

    monkeypatch.setattr("swarm.peer.workers.Crew", start)
    compute = ComputeSection(device="cpu", parallel=2)
    with pytest.raises(ConfigError, match="no process is started here"):
        engine_for(RUN, compute, tmp_path)
    assert places == [Place(2, "cpu", 1, "gloo")]
