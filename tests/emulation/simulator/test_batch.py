"""Many schedules on several processes: their order, and an early end."""

import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from swarm.emulation.simulator import batch
from swarm.emulation.simulator.batch import CHUNK, Job, run_jobs
from swarm.emulation.simulator.faults.hostile import ALL_CLASSES, SLICED, WORDS, class_letters

OPENS_S = 30.0


@pytest.mark.parametrize("processes", [1, 2])
def test_outcomes_come_in_the_order_of_the_jobs(
    monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    monkeypatch.setattr(batch, "run_job", lambda job: job.seed)
    jobs = [Job("A", seed) for seed in range(9 * CHUNK + 1)]
    assert list(run_jobs(jobs, processes)) == list(range(len(jobs)))


def test_no_job_begins_once_nobody_wants_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gate, begun = tmp_path / "gate", tmp_path / "begun"

    def run_job(job: Job) -> int:
        """Jobs after the first chunk last until the pool is asked to end."""
        with begun.open("a") as file:
            file.write(f"{job.seed}\n")
        end_s = time.monotonic() + OPENS_S
        while job.seed >= CHUNK and not gate.exists() and time.monotonic() < end_s:
            time.sleep(0.001)
        return job.seed

    class Pool(ProcessPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            gate.touch()
            super().shutdown(wait, cancel_futures=cancel_futures)

    monkeypatch.setattr(batch, "run_job", run_job)
    monkeypatch.setattr(batch, "ProcessPoolExecutor", Pool)
    outcomes = run_jobs([Job("A", seed) for seed in range(20 * CHUNK)], 2)
    assert next(outcomes) == 0
    outcomes.close()
    seeds = [int(line) for line in begun.read_text().splitlines()]
    assert set(range(CHUNK)) <= set(seeds)
    assert len(seeds) <= CHUNK + 2, "the job of each process was its last"


def test_every_class_has_a_word_and_old_letters_name_it_still() -> None:
    assert sorted(WORDS.values()) == sorted(ALL_CLASSES.keys() - SLICED.keys())
    assert class_letters("liar,sliced-deltas,ABc") == ["P", "r", "A", "B", "c"]
    for unknown in ("lier", "sliced-", "AI"):
        with pytest.raises(KeyError):
            class_letters(unknown)
