"""Bytes of the ranks of a mesh: living tensors, and the prediction from their rows."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from swarm.config import RunConfig
from swarm.model.initial_weights import initial_tensors
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.engine.host_memory import LiveBytes
from swarm.train.engine.ranks import Ranks
from swarm.train.engine.sizes import Need
from swarm.train.parallel.data_parallel import RankEngine
from swarm.train.parallel.dispatch import Trip
from swarm.train.planning.activations import Rows
from swarm.train.planning.memory import need_of, rank_need, stage_needs
from swarm.train.workers.worker_process import rank_engine
from tests.train.planning.test_memory import tokens_of
from tests.train.runs import all_names
from tests.train.team import together


@dataclass(frozen=True)
class Measured:
    """Figures of one rank in its second step.

    Attributes:
        state: bytes between two steps.
        peak: the most within the step.
        layers: held layers.
        rows: of these layers, micro-batch after micro-batch. None if experts are not distributed.
        traffic: of the step.
    """

    state: int
    peak: int
    layers: int
    rows: list[Rows]
    traffic: dict[str, tuple[int, int]]

    def predicted(
        self, run: RunConfig, num_owned: int, options: EngineOptions, *, workers: int, rank: int
    ) -> Need:
        """Predicted from its rows, or without rows from sizes alone."""
        if not self.rows:
            if options.pp == 1:
                return need_of(run, num_owned, options, workers)
            return stage_needs(run, num_owned, options, workers)[rank % options.pp]
        starts = range(0, len(self.rows), self.layers)
        loads = [self.rows[at : at + self.layers] for at in starts]
        return rank_need(run, num_owned, options, loads, workers=workers, rank=rank)


def measured(
    ranks: Ranks,
    run: RunConfig,
    owned: list[int],
    options: EngineOptions,
    *,
    counts: bool = True,
) -> Measured:
    """Measures the second of two steps of one rank. Nothing else holds their tokens."""
    live = LiveBytes()
    with live if counts else nullcontext():
        engine = rank_engine(run, options, ranks)
        engine.write(initial_tensors(run, all_names(run)))
        engine.own(owned)
        engine.step(tokens_of(run), lr=1e-3)
        gc.collect()
        state, rows = live.now, rows_of(engine)
        live.reset()
        ranks.traffic.take()
        engine.step(tokens_of(run), lr=1e-3)
        layers = len(engine._model.banks)
        return Measured(state, live.peak, layers, rows, ranks.traffic.take())


def rows_of(engine: RankEngine) -> list[Rows]:
    """A list to which the distributed experts of an engine add the rows of each forward."""
    found: list[Rows] = []
    if engine._mesh.tp > 1:
        for shared in engine._model.banks.values():
            _watch(shared, found)
        return found
    for bank in engine._model.banks.values() if engine._mesh.ep > 1 else ():
        ask: Any = getattr(bank, "_trip")  # noqa: B009 - of a `DealtBank`

        def trip(*given: Any, ask: Any = ask) -> Trip:
            way: Trip = ask(*given)
            sizes = [stop - start for start, stop in pairwise(way.there.starts)]
            found.append(Rows(sum(way.sent), sum(way.received), way.there.num_rows, max(sizes)))
            return way

        bank._trip = trip
    return found


def _watch(bank: Any, found: list[Rows]) -> None:
    """The same for experts of ranks with the same tokens, without recomputed layers."""
    mixed, setting = bank._mixed, bank.setting
    is_first = False

    def watched(x_ND: Any, weight_NK: Any, routing: Any, recall: Any) -> Any:
        nonlocal is_first
        is_first = recall is None or recall.plan is None
        return mixed(x_ND, weight_NK, routing, recall)

    def asked(plan: Any) -> Any:
        if is_first:
            sizes = [stop - start for start, stop in pairwise(plan.starts)]
            found.append(Rows(plan.num_rows, plan.num_rows, plan.num_rows, max(sizes)))
        return setting(plan)

    bank._mixed, bank.setting = watched, asked


def on_threads(size: int, work: Callable[..., Any]) -> list[Any]:
    """Results of `work(ranks, counts=True)` on a number of ranks, one after the other.

    Only one counts living tensors at a time: threads that enter a dispatch mode crash where two of
    them are the first to run an operation (torch 2.13).
    """

    def of(rank: int) -> Any:
        return together(size, lambda ranks: work(ranks, counts=ranks.rank == rank))[rank]

    return [of(rank) for rank in range(size)]


def on_processes(size: int, folder: Path, work: Callable[[Ranks], Any]) -> list[Any]:
    """The same in processes, which torch's schedules need.

    Forked, because loading torch takes seconds.
    """
    torch.multiprocessing.start_processes(
        _in_process, (size, folder, work), nprocs=size, start_method="fork"
    )
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _in_process(rank: int, size: int, folder: Path, work: Callable[[Ranks], Any]) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    torch.save(work(Ranks(rank, size, torch.device("cpu"))), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
