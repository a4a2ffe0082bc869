from __future__ import annotations

import gc
from dataclasses import asdict, replace

import pytest
import torch

from swarm import codecs
from swarm.data.masks import masks_of
from swarm.model import attention, huggingface, merge
from swarm.model.cost import full_state_bytes, parameters, state_bytes_per_peer
from swarm.network.fetch import fetcher
from swarm.protocol.values import digests
from swarm.train.engine import tensor_file
from swarm.train.engine.engine_options import ActivationCheckpoints, EngineKind, EngineOptions
from swarm.train.engine.hardware import Machine
from swarm.train.engine.host_memory import LiveBytes
from swarm.train.engine.resident import ResidentEngine
from swarm.train.engine.sizes import pipeline_cut, sizes_of
from swarm.train.planning import activations, memory
from swarm.train.planning.ladder import Wishes, fits, plan_engine
from swarm.train.planning.memory import (
    CUDA_BYTES,
    PROCESS_BYTES,
    HostPeaks,
    evaluation_bytes,
    host_peaks,
    largest_tensor_bytes,
    moving_bytes,
    need_of,
    stage_needs,
)
from swarm.train.saving import hashed_file
from tests.train.planning.test_ladder import of_file
from tests.train.runs import new_engine, new_streaming, tiny_run

BF16 = {"compute": "bf16", "frozen": "bf16"}
OWNED = [0, 1, 2, 3]


END = 256


def sized(train, *, layers=3, length=128, vocab=600, hidden=64, attention="window", **model):
    return tiny_run(
        optimizer=model.pop("optimizer", {}),
        model={
            "vocab_size": vocab,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_experts": 8,
            "moe_intermediate_size": hidden,
            **model,
        },
        data={
            "sequence_length": length,
            "validation_bytes": length + 1,
            "attention": attention,
        },
        train={"batch_tokens": 4 * length, "micro_batch_sequences": 2, **train},
    )


def tokens_of(run):
    shape = (run.train.batch_tokens // run.data.sequence_length, run.data.sequence_length + 1)
    tokens_BT1 = torch.randint(0, END, shape, generator=torch.Generator().manual_seed(0))
    if run.data.attention == "document":
        tokens_BT1[:, ::17] = END  # the length with the most padding
    return tokens_BT1


def measured(run, kind, **options):
    """State between steps and peak within a step, in bytes of living tensors."""
    make = new_streaming if kind is EngineKind.STREAMING else new_engine
    masks = masks_of(tokens_of(run), run, END)
    gc.collect()
    with LiveBytes() as live:
        engine = make(run, OWNED, **options)
        engine.step(tokens_of(run), lr=1e-3, masks=masks)
        engine.read(["model.norm.weight"])
        gc.collect()
        state = live.now
        live.reset()
        engine.step(tokens_of(run), lr=1e-3, masks=masks)
        peak = live.peak
    engine.close()
    return state, peak


def streaming(run, **options):
    return replace(EngineOptions.of(run), kind=EngineKind.STREAMING, **options)


def planned(run, kind, **options):
    chosen = replace(EngineOptions.of(run), kind=kind, **options)
    return need_of(run, len(OWNED), chosen)


def test_bytes_of_living_tensors_are_counted_once_and_go():
    with LiveBytes() as live:
        kept = torch.zeros(1000)
        view = kept[:10]
        passing = kept + 1
        assert live.now == 8000
        del passing
        assert (live.now, live.peak) == (4000, 8000)
        del kept
        assert live.now == 4000
        del view
        assert live.now == 0


@pytest.mark.parametrize("frozen", ["fp32", "bf16", "int8"])
def test_state_between_steps_is_the_formula_to_a_hundredth_of_a_percent(frozen):
    run = sized(BF16)
    state, _ = measured(run, EngineKind.RESIDENT, frozen=frozen)
    need = planned(run, EngineKind.RESIDENT, frozen=frozen)
    # The rest is each layer's group numbers: 8 experts x 8 bytes.
    assert state == pytest.approx(need.device_state, rel=1e-4)
    sizes = sizes_of(run.model, len(OWNED))
    if frozen != "int8":
        gradients = 4 * sizes.trained
        frozen_run = sized({"compute": "bf16", "frozen": frozen})
        assert need.device_state + gradients == state_bytes_per_peer(frozen_run, 2)


RESIDENT, STREAMING = EngineKind.RESIDENT, EngineKind.STREAMING
WIDE = {"vocab": 260, "moe_intermediate_size": 256, "num_experts_per_tok": 8}
MUON = {"optimizer": {"kind": "muon"}}
NO_QK_NORM = {"qk_norm": "none", "norm_topk_prob": True}
slow = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("kind", "options", "train", "sizes"),
    [
        (RESIDENT, {}, {}, {}),
        (RESIDENT, {"recompute": "routing"}, BF16, {}),
        (STREAMING, {}, BF16, {}),
        (
            STREAMING,
            {"resident_layers": None, "activation_checkpoints": ActivationCheckpoints.HOST},
            {},
            {},
        ),
        (RESIDENT, {}, BF16, NO_QK_NORM),
        (RESIDENT, {}, {}, MUON),
        (STREAMING, {"moments": "bf16"}, BF16, MUON),
        pytest.param(RESIDENT, {"moments": "int8"}, BF16, MUON, marks=slow),
        (RESIDENT, {}, {}, {"attention": "document"}),
        (RESIDENT, {"recompute": "routing"}, {"batch_tokens": 256}, {"layers": 5}),
        pytest.param(STREAMING, {}, BF16, NO_QK_NORM, marks=slow),
        pytest.param(RESIDENT, {}, {}, {"length": 300}, marks=slow),
        pytest.param(RESIDENT, {}, BF16, {"length": 300}, marks=slow),
        pytest.param(RESIDENT, {}, BF16, {"vocab": 20_000, "layers": 2}, marks=slow),
        pytest.param(RESIDENT, {"moments": "int8", "frozen": "int8"}, BF16, {}, marks=slow),
        pytest.param(STREAMING, {}, {}, {"length": 300}, marks=slow),
        pytest.param(STREAMING, {}, BF16, {"vocab": 20_000, "layers": 2}, marks=slow),
        pytest.param(STREAMING, {"moments": "bf16", "pass_micro_batches": 1}, {}, {}, marks=slow),
    ],
)
def test_peaks_are_predicted_within_5_percent(kind, options, train, sizes):
    run = sized(train, **sizes)
    _, peak = measured(run, kind, **options)
    need = planned(run, kind, **options)
    # On a CPU device and host are one memory.
    assert need.device + need.host == pytest.approx(peak, rel=0.05)


def test_keys_that_are_repeated_for_each_query_are_counted(monkeypatch):
    """As on a GPU in fp32."""
    run, peaks, needs = sized({}, num_key_value_heads=1), [], []
    for repeats in (False, True):
        for module in (attention, activations):
            monkeypatch.setattr(module, "repeats_keys", lambda *_, repeats=repeats: repeats)
        peaks.append(measured(run, RESIDENT)[1])
        needs.append(planned(run, RESIDENT).device)
    assert needs[1] - needs[0] == pytest.approx(peaks[1] - peaks[0], rel=0.05)
    assert needs[1] == pytest.approx(peaks[1], rel=0.05)


def test_keys_that_a_gpu_before_ampere_cannot_share_are_counted(monkeypatch):
    """In 16 bits, for which newer GPUs have kernels. Both behave as on a GPU."""
    run, peaks, needs = sized({}, num_key_value_heads=1), [], []
    decide = attention.repeats_keys
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability in ((8, 0), (7, 5)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda known=capability: known)
        with monkeypatch.context() as asked:
            for module in (attention, activations):
                asked.setattr(module, "repeats_keys", lambda _, dtype: decide(True, dtype))
            peaks.append(measured(run, RESIDENT, compute="fp16")[1])
            needs.append(planned(run, RESIDENT, compute="fp16").device)
    assert needs[1] - needs[0] == pytest.approx(peaks[1] - peaks[0], rel=0.05)
    assert needs[1] > needs[0]


@pytest.mark.parametrize(("keys", "copies"), [(1, 2), (4, 0)])
def test_a_held_out_loss_repeats_keys_only_where_queries_share_them(monkeypatch, keys, copies):
    run = sized({}, num_key_value_heads=keys, head_dim=256, num_experts_per_tok=1)
    micro, needs = activations.MicroBatchBytes(run, EngineOptions.of(run)), []
    for repeats in (False, True):
        monkeypatch.setattr(activations, "repeats_keys", lambda *_, known=repeats: known)
        needs.append(micro.evaluated(0, "fp32"))
    assert needs[1] - needs[0] == copies * 4 * 256 * 4 * micro.tokens  # fp32 of four heads


HOST = {"activation_checkpoints": ActivationCheckpoints.HOST}


@pytest.mark.parametrize(
    ("run", "options"),
    [
        pytest.param(sized(BF16), HOST, id="as usual"),
        pytest.param(sized(BF16), {"resident_layers": None}, id="weights stay"),
        pytest.param(sized(BF16, vocab=260, hidden=256, length=64), HOST, id="large layers"),
        pytest.param(
            sized(BF16, **WIDE, layers=2, hidden=16, length=512), HOST, id="more than a step"
        ),
    ],
)
def test_the_peak_of_a_held_out_loss_is_predicted_within_5_percent(run, options):
    gc.collect()
    with LiveBytes() as live:
        engine = new_streaming(run, OWNED, **options)
        engine.step(tokens_of(run), lr=1e-3)
        engine.read(["model.norm.weight"])
        gc.collect()
        state = live.now
        live.reset()
        engine.evaluate(tokens_of(run))
        peak = live.peak
        gc.collect()
        assert live.now == state
    engine.close()
    need = planned(run, STREAMING, **options)
    beside = evaluation_bytes(run, len(OWNED), streaming(run, **options))
    assert need.device_state + beside + need.host == pytest.approx(peak, rel=0.05)
    assert peak < 1.05 * (need.device + need.host)


@pytest.mark.gpu
def test_a_held_out_loss_on_a_gpu_takes_no_more_than_is_predicted():
    run = sized(BF16, layers=2, hidden=512, num_experts=32, vocab=4001, length=512)
    engine = new_streaming(run, OWNED, device="cuda")
    engine.evaluate(tokens_of(run))  # and allocates the libraries' workspaces
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    engine.evaluate(tokens_of(run))
    found = torch.cuda.max_memory_allocated() - before
    engine.close()
    options = streaming(run, device="cuda")
    need, beside = need_of(run, 4, options), evaluation_bytes(run, 4, options)
    assert found < beside + 0.05 * need.device


@pytest.mark.gpu
def test_an_evaluation_with_shared_keys_keeps_no_weights_of_all_pairs_on_a_gpu():
    run = sized(BF16, length=8192)
    engine, tokens = new_engine(run, OWNED, device="cuda"), tokens_of(run)[:1]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert engine.evaluate(tokens) > 0
    all_pairs = 4 * 4 * 8192**2
    assert torch.cuda.max_memory_allocated() - before < all_pairs


@pytest.mark.parametrize("tied", [False, True])
def test_the_state_of_each_stage_of_a_pipeline_is_the_formula(tied):
    run = sized(BF16, layers=4, tie_word_embeddings=tied)
    options = replace(EngineOptions.of(run), pp=3, moments="int8")
    stages, needs = pipeline_cut(run, options).stages, stage_needs(run, len(OWNED), options)
    for stage, need in zip(stages, needs, strict=True):
        with LiveBytes() as live:
            engine = ResidentEngine(run, options, stage=stage)
            engine.own(OWNED)
            gc.collect()
            state = live.now
        micro_batches, ends = 2, stage.is_first + stage.is_last
        state += micro_batches * (2 - ends) * 4 * 2 * 128 * 64  # inputs from other stages
        # Int8 codes are padded to whole blocks, and each layer has its group numbers.
        assert state == pytest.approx(need.device_state, rel=0.01)
    assert need_of(run, len(OWNED), options) in needs


def test_the_streaming_peak_is_the_same_for_4_and_32_layers_but_for_their_routing():
    """With activation checkpoints on the host nothing on the device grows with the layers."""
    found = {}
    for layers in (4, 32):
        run = sized({}, layers=layers, hidden=64, length=64)
        with LiveBytes() as live:
            engine = new_streaming(run, OWNED, activation_checkpoints=ActivationCheckpoints.HOST)
            engine.step(tokens_of(run), lr=1e-3)
            engine.read(["model.norm.weight"])
            gc.collect()
            live.reset()
            engine.step(tokens_of(run), lr=1e-3)
        # Logits and probabilities with their gradients, and weights, choices and sorted rows.
        routing = layers * 2 * 128 * (2 * 2 * 4 * 8 + 2 * (4 + 4 * 8))
        found[layers] = live.peak - engine.host_bytes - routing
        engine.close()
    assert found[32] == pytest.approx(found[4], rel=0.02)


def test_activations_at_four_times_the_context_are_as_planned():
    found = {}
    for length in (64, 256):
        run = sized({}, length=length, vocab=300)
        state, peak = measured(run, STREAMING)
        # The measurement includes inputs of layers, because this level keeps them on the device.
        found[length] = peak - state
        assert planned(run, STREAMING).activations == pytest.approx(peak - state, rel=0.05)
    assert 3 < found[256] / found[64] < 4.1


@pytest.mark.parametrize(
    ("name", "peers", "bf16", "int8"),
    [("spes_2b", 16, 0.45, 0.39), ("spes_7b", 4, 0.45, 0.39), ("spes_7b", 16, 0.28, 0.23)],
)
def test_training_state_against_that_of_training_everything(name, peers, bf16, int8):
    run = of_file(name)
    owned = run.model.num_experts // peers
    trained = sizes_of(run.model, owned).trained
    for frozen, limit in (("bf16", bf16), ("int8", int8)):
        options = EngineOptions.of(run).but(frozen=frozen)
        need = need_of(run, owned, options)
        state = need.device_state + 4 * trained
        assert state <= limit * full_state_bytes(run.model)


def test_the_7b_plan_streams_within_a_tenth_of_full_training_on_the_device():
    run = of_file("spes_7b")
    options = replace(EngineOptions.of(run), kind=EngineKind.STREAMING, resident_layers=0)
    assert need_of(run, 8, options).device_state < 0.1 * 16 * parameters(run.model).total


GB = 10**9


def test_the_formulas_count_what_the_parts_hold() -> None:
    assert memory.CHUNK_ELEMENTS == codecs.CHUNK_ELEMENTS
    assert memory.MERGE_COLUMNS == merge.COLUMNS
    assert memory.PIECE_BYTES == digests.PIECE_BYTES
    assert memory.FLOWS_PER_PEER == fetcher.FLOWS_PER_PEER
    assert memory.FLOWS == fetcher.FLOWS
    assert memory.SAVED_CHUNK_BYTES == tensor_file.CHUNK_BYTES
    assert memory.SAVED_CHUNKS >= hashed_file.CHUNKS_AHEAD + 2
    assert memory.SHARD_BYTES == huggingface.MAX_SHARD_BYTES


@pytest.mark.parametrize("num_peers", [4, 256])
@pytest.mark.parametrize("kind", list(EngineKind))
def test_no_phase_of_a_round_of_the_7b_needs_more_than_2_gb_beside_the_engine(
    kind: EngineKind, num_peers: int
) -> None:
    run = of_file("spes_7b")
    options = replace(EngineOptions.of(run, device="cpu"), kind=kind)
    need = need_of(run, 8, options)
    peaks = host_peaks(run, 8, options, num_peers=num_peers)
    allowed = 2 * GB + largest_tensor_bytes(run.model)
    phases = asdict(peaks)
    for phase in phases.keys() - {"training", "exporting", "adopting"}:
        assert phases[phase] - need.device_state - need.host < allowed, phase
    # Exchanged experts have their masters twice, in place of a step's gradients.
    again = moving_bytes(run, 8, options) if kind is EngineKind.RESIDENT else 0
    assert phases["adopting"] - need.device_state - need.host < allowed + again
    assert phases["adopting"] < phases["training"]
    assert phases["exporting"] < 2 * allowed


def test_a_host_must_hold_the_highest_phase_not_only_a_step() -> None:
    run = of_file("spes_7b")
    options = replace(EngineOptions.of(run, device="cuda"), kind=EngineKind.STREAMING)
    need, peaks = need_of(run, 8, options), host_peaks(run, 8, options, num_peers=4)
    assert peaks.training > need.host + PROCESS_BYTES + CUDA_BYTES
    machine = Machine("cuda", 999 * GB, (peaks.highest + 4 * GB) / 0.95, 1000 * GB)
    assert fits(need, peaks, machine)
    high = HostPeaks(**(asdict(peaks) | {"merging": peaks.highest + 50 * GB}))
    assert not fits(need, high, machine)


@pytest.mark.parametrize("num_peers", [4, 256])
def test_where_rounds_overlap_offers_and_means_are_made_beside_a_step(num_peers: int) -> None:
    home = of_file("spes_7b_home")
    options = EngineOptions.of(home, device="cuda")
    peaks = host_peaks(home, 8, options, num_peers=num_peers)
    blocking = home.model_copy(update={"round": of_file("spes_7b").round})
    rest = host_peaks(blocking, 8, options, num_peers=num_peers)
    assert peaks.offering == rest.offering
    more = rest.offering + rest.averaging - 2 * rest.training
    assert 0.15 * GB < peaks.training - rest.training == pytest.approx(more)


def test_a_plan_shows_the_peaks_of_its_engine() -> None:
    run = of_file("spes_7b")
    plan = plan_engine(run, 8, Machine("cuda", 24 * GB, 96 * GB, 500 * GB), Wishes())
    assert plan.fits
    assert plan.peaks == host_peaks(run, 8, plan.options, num_peers=4)
    assert plan.peaks.highest >= max(plan.peaks.training, plan.peaks.merging)
