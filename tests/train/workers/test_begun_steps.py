"""Workers whose values are read while they compute the products of a step (background offers)."""

import logging
import os
import signal
import threading

import pytest
import torch

from swarm.model.transformer import Transformer
from swarm.train.engine.engine_options import EngineKind, EngineOptions
from swarm.train.engine.tensor_file import TensorFile
from swarm.train.workers.exchange import listed, opened, options_message
from swarm.train.workers.worker_process import Worker
from tests.train.crews import lent_engines
from tests.train.runs import all_names, batch, new_engine, same, tiny_run

OWNED = [1, 3]
RUN = tiny_run(optimizer={"clip_norm": 0.1})
NAMES = all_names(RUN)
STREAMING = {"kind": EngineKind.STREAMING, "host_threads": 1}
MESHES = [
    pytest.param({}, id="replicas"),
    pytest.param({"ep": 2}, id="dealt out"),
    pytest.param({"pp": 2}, id="stages", marks=pytest.mark.exhaustive),
    pytest.param(STREAMING, id="streaming"),
]


@pytest.fixture
def parallel(crews):
    with lent_engines(crews) as make:
        yield make


def step(engine, k):
    return engine.step(batch(RUN, k), lr=1e-2)


def state_of(engine):
    return {name: tensor.clone() for name, tensor in engine.state_dict().tensors.items()}


@pytest.mark.parametrize("mesh", MESHES)
def test_values_and_state_are_those_before_the_step_and_no_bit_of_it_differs(parallel, mesh):
    straight = parallel(RUN, OWNED, **mesh)
    found = [step(straight, k) for k in range(3)]
    ended, ends_in = straight.read(NAMES), state_of(straight)
    straight.close()
    engine, seen, has_ended = parallel(RUN, OWNED, **mesh), [], threading.Event()
    assert step(engine, 0) == found[0]
    before, saved = engine.read(NAMES), engine.state_dict()
    states = {name: saved.tensors[name].clone() for name in saved.tensors}

    def read_on() -> None:
        while not has_ended.is_set():
            seen.append(engine.read(NAMES))

    def wait() -> None:
        has_ended.set()
        reader.join()
        assert same({name: saved.tensors[name] for name in saved.tensors}, states)
        assert engine.state_dict().counts == saved.counts

    assert engine.before_update(wait)
    reader = threading.Thread(target=read_on)
    reader.start()
    assert step(engine, 1) == found[1]
    assert seen and all(same(each, before) for each in seen)
    assert step(engine, 2) == found[2], "the next one is one command again"
    assert same(engine.read(NAMES), ended)
    assert same(state_of(engine), ends_in)


def test_what_is_changed_while_workers_stand_is_updated_by_the_step(parallel):
    """As where a refused unit starts again. New workers compute the same values."""
    made = []
    for engine in (new_engine(RUN, OWNED), parallel(RUN, OWNED)):
        step(engine, 0)
        anew = {name: torch.full_like(engine.read([name])[name], 0.25) for name in NAMES[:2]}
        assert engine.before_update(lambda engine=engine, anew=anew: engine.write(anew))
        step(engine, 1)
        engine.before_update(lambda: None)
        made.append((step(engine, 2), engine.read(NAMES)))
    assert made[0][0] == made[1][0]
    assert same(made[0][1], made[1][1])
    os.kill(engine.pids[0], signal.SIGKILL)
    assert same(engine.read(NAMES), made[0][1])


@pytest.mark.parametrize("stands", [False, True], ids=["in the products", "while they stand"])
def test_a_worker_that_is_killed_in_a_begun_step_costs_no_bit(parallel, caplog, stands):
    engine, straight, waited = parallel(RUN, OWNED), new_engine(RUN, OWNED), []
    assert step(engine, 0) == step(straight, 0)
    victim, before = engine.pids[1], engine.read(NAMES)

    def kill() -> None:
        os.kill(victim, signal.SIGKILL)

    def wait() -> None:
        if stands:
            kill()
        waited.append(engine.read(NAMES))

    assert engine.before_update(wait)
    if not stands:
        os.kill(victim, signal.SIGSTOP)
        threading.Timer(0.3, kill).start()
    with caplog.at_level(logging.INFO):
        assert step(engine, 1) == step(straight, 1)
    assert "worker 1 was killed" in caplog.text
    assert len(waited) == 1 and same(waited[0], before)
    assert step(engine, 2) == step(straight, 2)
    assert same(engine.read(NAMES), straight.read(NAMES))


def test_a_step_that_is_skipped_is_finished_like_any_other(parallel):
    engine, waited = parallel(RUN, OWNED), []
    name = NAMES[0]
    value = engine.read([name])[name]
    engine.write({name: value * float("nan")})
    assert engine.before_update(lambda: waited.append(True))
    assert step(engine, 0).skipped and waited
    engine.write({name: value})
    assert not step(engine, 1).skipped


def test_a_worker_answers_before_the_products_are_there(monkeypatch):
    worker, may_go_on, losses = Worker(), threading.Event(), Transformer.losses

    def ask(do, tensors=None, **message):
        file = TensorFile.in_memory()
        if tensors:
            file.take(tensors)
            message["tensors"] = listed(file)
        answer = worker.answer({"do": do, **message}, file.file if tensors else None)
        assert "failed" not in answer, answer
        return answer

    def read():
        out = TensorFile.in_memory()
        answer = worker.answer({"do": "read", "names": NAMES}, out.file)
        return dict(opened(out.file, answer["tensors"]))

    def products(*arguments, **named):
        assert may_go_on.wait(30.0)
        return losses(*arguments, **named)

    monkeypatch.setattr(Transformer, "losses", products)
    run = RUN.canonical_json().decode()
    ask("make", run=run, options=options_message(EngineOptions.of(RUN)))
    values = new_engine(RUN).read(NAMES)
    ask("write", values)
    ask("own", experts=OWNED)
    ask("begin_step", {"tokens": batch(RUN, 0)}, lr=1e-2, controls=None)
    counts = ask("state")["counts"]
    assert not ask("stands")["stands"]
    assert same(read(), values)
    may_go_on.set()
    while not ask("stands")["stands"]:
        pass
    assert ask("state")["counts"] == counts
    assert not ask("finish_step")["stats"]["skipped"]
    assert ask("state")["counts"][1] == 1, "one update"


@pytest.mark.parametrize(
    ("options", "clip", "is_read"),
    [
        ({}, "unit", True),
        ({"ep": 2}, "global", True),
        (STREAMING, "global", True),
        (STREAMING, "unit", False),
        ({"shards": 2}, "global", False),
        ({"tp": 2, "ep": 2}, "global", False),
    ],
)
def test_only_what_is_whole_somewhere_is_read_beside_a_step(options, clip, is_read):
    assert EngineOptions(**options).is_read_beside(tiny_run(optimizer={"clip": clip})) is is_read
