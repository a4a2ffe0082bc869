"""Workers on two GPUs, over NCCL, against one GPU. Not measured: nobody has run them yet.

The tests are those of gloo, with its tolerances. `--gpu2-on-cpu` runs them on the CPU. Bits are
equal on GPUs if the kernels always add up in the same order.
"""

import subprocess
import sys

import pytest
import torch

from swarm.peer.machine.gpu_bus import slowest_copy
from tests.train.crews import assert_holders_answer, lent_engines, shared_crews
from tests.train.engine.test_pipeline import run_of
from tests.train.parallel.test_tensor_parallel import RUN as HEADED
from tests.train.runs import batch, new_engine, new_streaming, tiny_run
from tests.train.saving.test_expert_parallel import assert_as_one_process
from tests.train.workers.test_parallel import (
    BF16,
    CLIPPED,
    OWNED,
    RUN,
    assert_a_kill_costs_nothing,
    assert_equal,
    is_same,
    train,
)

pytestmark = pytest.mark.gpu2

STAGED = run_of(train={"micro_batch_sequences": 1})


@pytest.fixture(scope="module")
def device(request):
    return "cpu" if request.config.getoption("--gpu2-on-cpu") else "cuda"


@pytest.fixture(scope="module")
def crews(device):
    with shared_crews(device) as crews:
        yield crews


@pytest.fixture
def on_two(crews):
    """Makes engines of two workers."""
    with lent_engines(crews) as make:
        yield make


@pytest.fixture
def on_one(device):
    """Makes an engine in this process."""
    return lambda run: new_engine(run, OWNED, device=device)


@pytest.mark.parametrize(
    ("run", "options"),
    [
        pytest.param(RUN, {}, id="dp"),
        pytest.param(tiny_run(**BF16), {}, id="dp, bf16"),
        pytest.param(STAGED, {"pp": 2}, id="pp"),
        pytest.param(STAGED, {"pp": 2, "schedule": "gpipe"}, id="pp, gpipe"),
        pytest.param(tiny_run(**CLIPPED), {"shards": 2}, id="cut state"),
        pytest.param(tiny_run(**BF16), {"shards": 2}, id="cut state, bf16"),
    ],
)
def test_five_steps_on_two_gpus_have_the_bits_of_one(on_two, on_one, run, options):
    assert_equal(run, on_two(run, OWNED, **options), on_one(run))


@pytest.mark.parametrize("options", [{}, {"shards": 2}], ids=["whole", "cut state"])
def test_with_experts_dealt_out_they_are_those_of_one_to_2_percent(on_two, on_one, options):
    assert_as_one_process(RUN, on_two(RUN, OWNED, ep=2, **options), on_one(RUN))


def test_with_heads_and_tokens_cut_they_are_those_of_one_to_2_percent(on_two, on_one):
    assert_as_one_process(HEADED, on_two(HEADED, OWNED, ep=2, tp=2), on_one(HEADED))


@pytest.mark.parametrize("options", [{}, {"ep": 2}, {"shards": 2}], ids=["dp", "ep", "cut state"])
def test_whoever_holds_a_tensor_answers_for_it(on_two, options):
    engine = on_two(RUN, OWNED, **options)
    train(engine, RUN, range(2))
    assert_holders_answer(engine, RUN, ["model.norm.weight"])


def test_a_worker_that_is_killed_in_a_step_costs_no_bit(on_two, on_one, caplog):
    engine, straight = on_two(RUN, OWNED), on_one(RUN)
    assert train(engine, RUN, range(2)) == train(straight, RUN, range(2))
    assert_a_kill_costs_nothing(engine, straight, RUN, 1, caplog)
    assert is_same(RUN, engine, straight)


def test_the_measured_bus_is_one(device):
    """Between 1 and 1,000 GB/s. On the CPU it is that of its memory."""
    devices = [torch.device("cpu")] * 2
    if device == "cuda":
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    assert 1 < slowest_copy(devices) < 1000


def stream_on_the_second() -> None:
    """A step of rank 1 in a separate process, which does not use the first GPU."""
    torch.cuda.set_device(1)
    engine = new_streaming(RUN, OWNED, device="cuda")
    engine.step(batch(RUN, 0), lr=1e-2)
    engine.read(["model.norm.weight"])  # the updates have ended
    assert torch._C._cuda_hasPrimaryContext(1)
    assert not torch._C._cuda_hasPrimaryContext(0), "0.5 GB of another rank's GPU"
    engine.close()


def test_a_rank_that_streams_takes_no_memory_of_the_first_gpu(device):
    if device == "cpu":
        pytest.skip("there is no context")
    code = f"from {__name__} import {stream_on_the_second.__name__} as run; run()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
