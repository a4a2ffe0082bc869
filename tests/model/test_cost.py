"""The paper's models: sizes, memory and traffic, against SPES's own figures and our table."""

from dataclasses import dataclass
from typing import Any

import pytest

from swarm.codings import coded_bytes
from swarm.config import Coding, RunConfig, validate_config
from swarm.experts import ELEMENT_BYTES, expert_of_unit
from swarm.model.cost import (
    bytes_sent_per_peer_per_round,
    cost_of,
    disk_bytes,
    forward_flops_per_token,
    full_state_bytes,
    handover_bytes,
    parameters,
    state_bytes_per_peer,
    step_flops_per_token,
    trained_per_peer,
)
from swarm.protocol.values.layout import layout_of
from tests.model.samples import tiny_run


@dataclass(frozen=True)
class Published:
    """One column of the table of sizes: millions of parameters, gigabytes."""

    num_peers: int
    total: int
    shared: int
    per_expert: float
    trained: int
    full_state: float
    state_fp32: float
    state_bf16: float
    sent_fp32: float
    sent_bf16: float


PUBLISHED = {
    "1b": Published(4, 1167, 261, 56.6, 488, 18.7, 10.5, 9.2, 4.29, 2.14),
    "2b": Published(16, 2127, 617, 94.4, 712, 34.0, 17.1, 14.2, 10.3, 5.1),
    "7b": Published(4, 7333, 891, 201.3, 2501, 117.3, 59.3, 49.7, 24.7, 12.3),
    "9b": Published(4, 9431, 975, 1057, 3089, 150.9, 74.8, 62.1, 31.2, 15.6),
}
# layers, heads, KV heads, hidden, expert FFN, experts, top-k, vocabulary, QK-norm
SIZES = {
    "1b": (12, 12, 12, 768, 2048, 16, 2, 151_665, "projection"),
    "2b": (16, 24, 24, 1536, 1280, 16, 2, 151_665, "projection"),
    "7b": (16, 16, 16, 2048, 2048, 32, 4, 151_665, "projection"),
    "9b": (28, 16, 8, 2048, 6144, 8, 2, 151_936, "head"),
}
FIELDS = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "vocab_size",
    "qk_norm",
)


def spes(name: str, *, wire: str = "fp32", frozen: str = "bf16", **sections: Any) -> RunConfig:
    values = {
        "run": {"name": name, "rounds": 10, "peers": PUBLISHED[name].num_peers},
        "model": dict(zip(FIELDS, SIZES[name], strict=True)),
        "data": {"sequence_length": 2048},
        "train": {"batch_tokens": 2048, "micro_batch_sequences": 1, "frozen": frozen},
        "optimizer": {"lr": 5e-4},
        "round": {"local_steps": 100},
        "wire": {"shared": wire, "experts": wire},
    }
    return validate_config(RunConfig, values | sections, source="test")


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_paper(name: str) -> None:
    published, counted = PUBLISHED[name], parameters(spes(name).model)
    assert round(counted.total / 1e6) == published.total
    assert round(counted.shared / 1e6) == published.shared
    assert counted.per_expert / 1e6 == pytest.approx(published.per_expert, rel=1e-3)
    assert round(trained_per_peer(spes(name), published.num_peers) / 1e6) == published.trained


@pytest.mark.parametrize("name", PUBLISHED)
def test_training_state_is_that_of_the_table(name: str) -> None:
    published = PUBLISHED[name]
    for frozen, expected in (("fp32", published.state_fp32), ("bf16", published.state_bf16)):
        num_bytes = state_bytes_per_peer(spes(name, frozen=frozen), published.num_peers)
        assert num_bytes / 1e9 == pytest.approx(expected, abs=0.06)
    assert full_state_bytes(spes(name).model) / 1e9 == pytest.approx(published.full_state, abs=0.06)


@pytest.mark.parametrize("name", ["7b", "2b"])
def test_training_state_is_at_most_45_percent_of_full_training(name: str) -> None:
    run = spes(name)
    state = state_bytes_per_peer(run, PUBLISHED[name].num_peers)
    assert state <= 0.45 * full_state_bytes(run.model)


@pytest.mark.parametrize("name", PUBLISHED)
def test_bytes_per_round_are_those_of_the_table(name: str) -> None:
    published = PUBLISHED[name]
    for wire, expected in (("fp32", published.sent_fp32), ("bf16", published.sent_bf16)):
        sent = bytes_sent_per_peer_per_round(spes(name, wire=wire), published.num_peers)
        # Half of the table's last digit, and the norms and routers that stay fp32.
        last_digit = 0.01 if name == "1b" else 0.1
        assert sent / 1e9 == pytest.approx(expected, abs=0.6 * last_digit)


def test_spes_in_fp32_sends_43_9_percent_less_than_averaging_everything() -> None:
    everything = spes("7b", ownership={"owners_per_expert": 4})
    saved = 1 - bytes_sent_per_peer_per_round(spes("7b"), 4) / bytes_sent_per_peer_per_round(
        everything, 4
    )
    assert saved == pytest.approx(0.439, abs=5e-4)
    # DiLoCo's all-reduce of the whole model, 44.0 GB in the table.
    assert bytes_sent_per_peer_per_round(everything, 4) / 1e9 == pytest.approx(44.0, abs=0.05)


@pytest.mark.parametrize(
    ("shared", "experts", "gigabytes"),
    [("bf16", "bf16", 12.34), ("b2", "b2", 1.60), ("b1", "b1", 0.83)],
)
def test_deltas_take_the_bytes_of_their_codings(
    shared: Coding, experts: Coding, gigabytes: float
) -> None:
    coded = {"shared_coding": shared, "experts_coding": experts}
    run = spes("7b")
    run = run.model_copy(update={"wire": run.wire.model_copy(update=coded)})
    sent = bytes_sent_per_peer_per_round(run, 4) / 1e9
    assert sent == pytest.approx(gigabytes, abs=0.006)
    parts = [(expert_of_unit(unit.unit), coded_bytes(unit)) for unit in layout_of(run).units]
    moved = [sum(size for e, size in parts if (e is None) == is_shared) for is_shared in (1, 0)]
    assert sent * 1e9 == pytest.approx((2 * 3 * moved[0] + 3 * moved[1]) / 4, rel=1e-4)


def test_bytes_are_counted_from_what_each_peer_sends() -> None:
    """R = 2 of N = 3 peers, message by message."""
    run = tiny_run()
    run = run.model_copy(
        update={
            "ownership": run.ownership.model_copy(update={"owners_per_expert": 2}),
            "wire": run.wire.model_copy(update={"experts": "bf16"}),
            "round": run.round.model_copy(update={"experts_every": 4}),
        }
    )
    counted = parameters(run.model)
    shared, experts = counted.shared * 4, counted.experts * 2
    # Shared: to the reducer from 2 others, back to 2. Experts: 1 owner to the other, then to 2.
    total = shared * (2 + 2) + experts * (1 + 2) / 4
    assert bytes_sent_per_peer_per_round(run, 3) == pytest.approx(total / 3)


def test_a_round_of_slices_sends_its_share() -> None:
    run = tiny_run()
    slices = {"experts_every": 4, "shared_every": 2, "stagger": True}
    sliced = run.model_copy(update={"round": run.round.model_copy(update=slices)})
    counted = parameters(run.model)
    shared, experts = counted.shared * 4, counted.experts * 2
    # Shared: from 2 others and back, every second round. Experts: to 2, every fourth.
    total = shared * (2 + 2) / 2 + experts * 2 / 4
    assert bytes_sent_per_peer_per_round(sliced, 3) == pytest.approx(total / 3)


def test_one_peer_alone_sends_nothing_and_trains_everything() -> None:
    run = spes("1b")
    assert bytes_sent_per_peer_per_round(run, 1) == 0
    assert trained_per_peer(run, 1) == parameters(run.model).total
    assert state_bytes_per_peer(run, 1) == full_state_bytes(run.model)


def test_experts_that_do_not_divide_are_counted_for_the_peer_with_most() -> None:
    run = spes("1b")
    counted = parameters(run.model)
    assert trained_per_peer(run, 5) == counted.shared + 4 * counted.per_expert


def test_disk_holds_three_manifests_an_offer_three_private_states_and_a_step_down() -> None:
    run = spes("1b")
    counted = parameters(run.model)
    offer = 4 * (counted.shared + 4 * counted.per_expert)
    private = 12 * (counted.shared + 4 * counted.per_expert)
    frozen = ELEMENT_BYTES[run.train.frozen] * 12 * counted.per_expert
    assert disk_bytes(run, 4) == 3 * 4 * counted.total + offer + 3 * private + frozen


@pytest.mark.parametrize(
    ("wire", "rounds"),
    [({"shared_coding": "b2"}, {}), ({}, {"shared_every": 4, "stagger": True})],
)
def test_progress_that_outlives_a_round_is_put_aside_in_fp32(
    wire: dict[str, object], rounds: dict[str, object]
) -> None:
    run = spes("1b")
    lasting = run.model_copy(
        update={
            "wire": run.wire.model_copy(update=wire),
            "round": run.round.model_copy(update=rounds),
        }
    )
    assert disk_bytes(lasting, 4) - disk_bytes(run, 4) == 4 * parameters(run.model).shared


def test_a_hand_over_has_masters_where_the_wire_rounds_them() -> None:
    elements = 4 * parameters(spes("1b").model).per_expert
    assert handover_bytes(spes("1b"), 4) == 8 * elements
    assert handover_bytes(spes("1b", wire="bf16"), 4) == 12 * elements


def test_a_step_of_a_peer_that_trains_everything_is_three_forward_passes() -> None:
    run = spes("7b")
    assert step_flops_per_token(run, 1) == pytest.approx(3 * forward_flops_per_token(run))
    # 2 per used parameter: shared without the embedding, 4 of 32 experts, and attention.
    counted = parameters(run.model)
    met = counted.shared - 151_665 * 2048 + 4 * counted.per_expert
    attention = 16 * 2 * 2048 * 2048
    assert forward_flops_per_token(run) == pytest.approx(2 * met + attention, rel=1e-3)


def test_frozen_experts_save_their_weight_gradients() -> None:
    run = spes("7b")
    saved = step_flops_per_token(run, 1) - step_flops_per_token(run, 4)
    assert saved == pytest.approx(2 * 0.75 * 4 * parameters(run.model).per_expert)


def test_cost_of_gathers_the_figures() -> None:
    run = spes("2b")
    cost = cost_of(run, 16)
    assert cost.parameters_total == parameters(run.model).total
    assert cost.parameters_trained_per_peer == trained_per_peer(run, 16)
    assert cost.bytes_sent_per_peer_per_round == bytes_sent_per_peer_per_round(run, 16)
