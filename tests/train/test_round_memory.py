"""What a process holds in each phase, by formulas."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from swarm import codecs
from swarm.config import RunConfig, parse_config
from swarm.model import huggingface, merge
from swarm.network import fetch
from swarm.protocol import digests
from swarm.train import hashed_file, round_memory, tensor_file
from swarm.train.hardware import Machine
from swarm.train.ladder import Wishes, fits, plan_engine
from swarm.train.memory import largest_tensor_bytes, moving_bytes, need_of
from swarm.train.options import EngineKind, EngineOptions
from swarm.train.round_memory import (
    CUDA_BYTES,
    PROCESS_BYTES,
    HostPeaks,
    host_peaks,
)

GB = 10**9


def spes_7b() -> RunConfig:
    path = Path("configs/runs/spes_7b.toml")
    return parse_config(RunConfig, path.read_text(), source=str(path))


def test_the_formulas_count_what_the_parts_hold() -> None:
    assert round_memory.CHUNK_ELEMENTS == codecs.CHUNK_ELEMENTS
    assert round_memory.MERGE_COLUMNS == merge.COLUMNS
    assert round_memory.PIECE_BYTES == digests.PIECE_BYTES
    assert round_memory.FLOWS_PER_PEER == fetch.FLOWS_PER_PEER
    assert round_memory.FLOWS == fetch.FLOWS
    assert round_memory.SAVED_CHUNK_BYTES == tensor_file.CHUNK_BYTES
    assert round_memory.SAVED_CHUNKS >= hashed_file.CHUNKS_AHEAD + 2
    assert round_memory.SHARD_BYTES == huggingface.MAX_SHARD_BYTES


@pytest.mark.parametrize("num_peers", [4, 256])
@pytest.mark.parametrize("kind", list(EngineKind))
def test_no_phase_of_a_round_of_the_7b_needs_more_than_2_gb_beside_the_engine(
    kind: EngineKind, num_peers: int
) -> None:
    run = spes_7b()
    options = replace(EngineOptions.of(run, device="cpu"), kind=kind)
    need = need_of(run, 8, options)
    peaks = host_peaks(run, 8, options, num_peers=num_peers)
    allowed = 2 * GB + largest_tensor_bytes(run.model)
    phases = asdict(peaks)
    for phase in phases.keys() - {"training", "exporting", "adopting"}:
        assert phases[phase] - need.device_state - need.host < allowed, phase
    # Experts that are exchanged have their masters twice, where a step has its gradients.
    again = moving_bytes(run, 8, options) if kind is EngineKind.RESIDENT else 0
    assert phases["adopting"] - need.device_state - need.host < allowed + again
    assert phases["adopting"] < phases["training"]
    assert phases["exporting"] < 2 * allowed


def test_a_host_must_hold_the_highest_phase_not_only_a_step() -> None:
    run = spes_7b()
    options = replace(EngineOptions.of(run, device="cuda"), kind=EngineKind.STREAMING)
    need, peaks = need_of(run, 8, options), host_peaks(run, 8, options, num_peers=4)
    assert peaks.training > need.host + PROCESS_BYTES + CUDA_BYTES
    machine = Machine("cuda", 999 * GB, (peaks.highest + 4 * GB) / 0.95, 1000 * GB)
    assert fits(need, peaks, machine)
    high = HostPeaks(**(asdict(peaks) | {"merging": peaks.highest + 50 * GB}))
    assert not fits(need, high, machine)


@pytest.mark.parametrize("num_peers", [4, 256])
def test_where_rounds_overlap_offers_and_means_are_made_beside_a_step(num_peers: int) -> None:
    path = Path("configs/runs/spes_7b_home.toml")
    home = parse_config(RunConfig, path.read_text(), source=str(path))
    options = EngineOptions.of(home, device="cuda")
    peaks = host_peaks(home, 8, options, num_peers=num_peers)
    blocking = home.model_copy(update={"round": spes_7b().round})
    rest = host_peaks(blocking, 8, options, num_peers=num_peers)
    assert peaks.offering == rest.offering
    more = rest.offering + rest.averaging - 2 * rest.training
    assert 0.15 * GB < peaks.training - rest.training == pytest.approx(more)


def test_a_plan_shows_the_peaks_of_its_engine() -> None:
    run = spes_7b()
    plan = plan_engine(run, 8, Machine("cuda", 24 * GB, 96 * GB, 500 * GB), Wishes())
    assert plan.fits
    assert plan.peaks == host_peaks(run, 8, plan.options, num_peers=4)
    assert plan.peaks.highest >= max(plan.peaks.training, plan.peaks.merging)
