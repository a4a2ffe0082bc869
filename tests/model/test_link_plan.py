"""The plan of a run on a link: a table for the 7B, and accepted inputs of the program."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from swarm.config import RunConfig, parse_config
from swarm.config.amounts import LinkRates
from swarm.model import link_plan
from swarm.model.cost import bytes_sent_per_peer_per_round
from swarm.model.link_plan import (
    SETTINGS,
    TRANSFERS_ALONE,
    Assumptions,
    Setting,
    carried_mbit,
    cycle_bytes,
    exchange_s,
    needed_mbit,
    plan_link,
    private_bytes,
    setting_of,
    settings_for,
    stall_s,
    with_rounds,
)

RUNS = Path(__file__).parents[2] / "configs" / "runs"
STEP_S = 36.0
"""Seconds of the 7B's last phase on 8 GPUs per peer: 50 steps are half an hour."""
COMPUTE_S = 50 * STEP_S


def run_7b(*overrides: str) -> RunConfig:
    path = RUNS / "spes_7b.toml"
    return parse_config(RunConfig, path.read_text(), source=str(path), overrides=overrides)


RUN = run_7b()

FAST_DISK = Assumptions(disk_bytes_per_s=math.inf)


def test_a_private_state_is_saved_once_a_cycle_and_takes_its_time() -> None:
    # Source: 12 bytes of 0.893 + 6.44 / 4 billion parameters, 30 GB; at 2 GB/s 15 s.
    setting = Setting("b2", "b1", 5, 1, 5)
    assert private_bytes(RUN, setting, 4) / 1e9 == pytest.approx(30, rel=0.01)
    at_once = {"compute_s": COMPUTE_S, "assumed": replace(TRANSFERS_ALONE, disk_bytes_per_s=2e9)}
    assert stall_s(RUN, setting, 4, **at_once) == pytest.approx(15, rel=0.01)


def test_eight_cores_make_and_adopt_what_a_cycle_exchanges_in_some_seconds() -> None:
    # Computed apart: (5 x 0.891 x 5 + 1.611 x 9) / 8,
    # and (5 x 0.891 x 2 + 1.611 x 0.1 + 4.832 x 0.4) / 8.
    setting = Setting("b2", "b1", 5, 1, 5, overlap=True)
    offer_s, adopt_s = exchange_s(RUN, setting, 4)
    assert (5 * offer_s, 5 * adopt_s) == pytest.approx((4.60, 1.38), rel=0.01)
    alone = exchange_s(RUN, setting, 4, Assumptions(cores=1))
    assert alone == pytest.approx((8 * offer_s, 8 * adopt_s))


def test_beside_a_step_of_36_s_neither_offers_nor_private_states_take_time() -> None:
    # 50 steps are 1,800 s. An offer takes 0.9 s, and the private state 15 s during one of them.
    setting, how = Setting("b2", "b1", 5, 1, 5, overlap=True), {"compute_s": COMPUTE_S}
    assert stall_s(RUN, setting, 4, **how) == pytest.approx(1.38, rel=0.01)
    waiting = Assumptions(is_beside=False)
    assert stall_s(RUN, setting, 4, **how, assumed=waiting) == pytest.approx(20.98, rel=0.01)
    short = {"compute_s": COMPUTE_S / 3}  # 12 s a step: 3.9 s of the state are left
    assert stall_s(RUN, setting, 4, **short) == pytest.approx(1.38 + 15 + 0.92 - 12, rel=0.03)
    for up in (100.0, 20.0):
        plan = plan_link(RUN, setting, (up, 100.0), compute_s=COMPUTE_S, num_peers=4)
        assert plan.utilisation > 0.999


# Computed apart from this program, for the 7B, H = 50, N = 4: GB a peer and cycle, then for 100/100
# and for 20/100 Mbit/s: seconds of transfer, utilisation in percent, delay in steps.
TABLE = [
    (Setting("fp32", "fp32", owners=4), 44.00, (4142, 30.3, 0.0), (20708, 8.0, 0.0)),
    (Setting("fp32", "fp32"), 24.68, (2323, 43.6, 0.0), (11614, 13.4, 0.0)),
    (Setting("fp32", "bf16"), 15.02, (1413, 55.9, 0.0), (7066, 20.3, 0.0)),
    (Setting("bf16", "bf16"), 12.34, (1162, 60.7, 0.0), (5808, 23.6, 0.0)),
    (Setting("b2", "b2"), 1.60, (150, 92.1, 0.0), (752, 70.4, 0.0)),
    (Setting("b2", "b2", 4, 4, 4, overlap=True), 1.60, (150, 99.9, 1.2), (752, 99.9, 5.4)),
    (Setting("b2", "b2", 4, 1, 4, overlap=True), 2.65, (250, 99.9, 1.8), (1248, 99.9, 8.8)),
    (Setting("b2", "b2", 2, 1, 4, overlap=True), 1.33, (125, 99.9, 1.8), (624, 99.9, 8.8)),
    (Setting("b2", "b2", 4, 1, 8, 2, overlap=True), 2.24, (210, 99.9, 1.6), (1052, 99.9, 7.4)),
    (Setting("b2", "b1", 5, 1, 5, overlap=True), 2.40, (226, 99.9, 1.4), (1129, 99.9, 6.4)),
    (Setting("b1", "b1", 5, 5, 5, overlap=True), 0.83, (78, 99.9, 0.6), (389, 99.9, 2.3)),
    (Setting("b2", "b1", 5, 1, 5, 2, overlap=True), 2.61, (246, 99.9, 1.5), (1230, 99.9, 6.9)),
    (Setting("b2", "b2", 5, 1, 10, 2, overlap=True), 2.59, (244, 99.9, 1.5), (1218, 99.9, 6.9)),
    (Setting("b1", "b1"), 0.83, (78, 95.7, 0.0), (389, 82.1, 0.0)),
]


@pytest.mark.parametrize(("setting", "gigabytes", "fast", "slow"), TABLE)
def test_the_table_of_the_7b_follows_from_the_formulas(
    setting: Setting,
    gigabytes: float,
    fast: tuple[float, float, float],
    slow: tuple[float, float, float],
) -> None:
    assert cycle_bytes(RUN, setting, 4) / 1e9 == pytest.approx(gigabytes, rel=0.01)
    for up, (transfer_s, percent, delay_steps) in ((100.0, fast), (20.0, slow)):
        plan = plan_link(
            RUN, setting, (up, 100.0), compute_s=COMPUTE_S, num_peers=4, assumed=FAST_DISK
        )
        assert plan.transfer_s == pytest.approx(transfer_s, rel=0.01)
        assert 100 * plan.utilisation == pytest.approx(percent, abs=1.0)
        assert 50 * plan.delay_share == pytest.approx(delay_steps, abs=0.15)


def test_a_runs_own_setting_sends_what_the_cost_counts() -> None:
    slices = ["round.shared_every=5", "round.experts_every=5", "round.stagger=true"]
    for overrides, rounds in (
        ([], 1),
        (["wire.shared=bf16"], 1),
        (["round.experts_every=3", "wire.experts=fp32"], 1),
        (slices, 5),
    ):
        run = run_7b(*overrides)
        for num_peers in (2, 4, 16):
            sent = rounds * bytes_sent_per_peer_per_round(run, num_peers)
            assert cycle_bytes(run, setting_of(run), num_peers) == pytest.approx(sent, rel=1e-9)


def test_a_round_that_lasts_longer_than_the_steps_beside_it_holds_them_up() -> None:
    setting = Setting("b2", "b2", overlap=True)
    plan = plan_link(
        RUN, setting, (5.0, 100.0), compute_s=COMPUTE_S, num_peers=4, assumed=FAST_DISK
    )
    assert plan.transfer_s == pytest.approx(4 * 752, rel=0.01)
    assert plan.utilisation == pytest.approx(COMPUTE_S / (plan.transfer_s + 4 + 1.5), rel=1e-3)
    assert plan.delay_share == 1.0


def test_the_needed_rate_is_the_one_with_which_the_share_is_reached() -> None:
    for setting in (Setting("fp32", "bf16"), Setting("b2", "b1", 5, 1, 5, overlap=True)):
        mbit = needed_mbit(RUN, setting, compute_s=COMPUTE_S, num_peers=4, wanted=0.9)
        how = {"compute_s": COMPUTE_S, "num_peers": 4, "assumed": TRANSFERS_ALONE}
        reached = plan_link(RUN, setting, (mbit, mbit), **how).utilisation
        assert reached == pytest.approx(1.0 if setting.overlap else 0.9)
        slower = plan_link(RUN, setting, (mbit * 0.99, mbit), **how).utilisation
        assert slower < reached


def test_loss_limits_a_connection_unless_bbr_sends() -> None:
    # Source: 1460 B x 1.22 / (0.1 s sqrt(0.001)) = 4.5 Mbit/s a connection.
    link = LinkRates(up_mbit=20, down_mbit=100, rtt_ms=100, loss_pct=0.1)
    up, down = carried_mbit(link, 4)
    assert (up, down) == (pytest.approx(3 * 4.5, rel=0.01), pytest.approx(3 * 4.5, rel=0.01))
    assert carried_mbit(link, 4, is_bbr=True) == (20, 100)
    assert carried_mbit(LinkRates(20, 100, 100), 4) == (20, 100)
    assert carried_mbit(LinkRates(5, 100, 10, 0.1), 16)[0] == 5


def test_rounds_of_a_cycle_divide_the_local_steps() -> None:
    assert {s.rounds for s in settings_for(run_7b())} == {1, 5}
    assert {s.rounds for s in settings_for(run_7b("round.local_steps=20"))} == {1, 5}
    ten = run_7b("round.local_steps=4", "merging.alpha=0")
    assert {s.rounds for s in settings_for(ten)} == {1, 4}
    assert {s.rounds for s in settings_for(run_7b("round.local_steps=7", "merging.alpha=0"))} == {1}
    assert max(s.owners for s in settings_for(run_7b("run.peers=1"))) == 1
    moved = with_rounds(Setting("b2", "b2", 4, 1, 8, owners=2, overlap=True), 5)
    assert moved == Setting("b2", "b2", 5, 1, 10, owners=2, overlap=True)


def test_each_setting_is_one_of_a_run_file() -> None:
    for setting in SETTINGS:
        wire = [
            f"wire.{kind}{'' if name in ('fp32', 'bf16') else '_coding'}={name}"
            for kind, name in (("shared", setting.shared), ("experts", setting.experts))
        ]
        rounds = [
            f"round.shared_every={setting.shared_every}",
            f"round.experts_every={setting.experts_every}",
            f"round.stagger={str(setting.rounds > 1).lower()}",
            f"ownership.owners_per_expert={setting.owners}",
            f"round.overlap={'round' if setting.overlap else 'none'}",
        ]
        period = max(setting.shared_every, setting.experts_every)
        assert setting_of(run_7b(*wire, *rounds)) == replace(setting, rounds=period)


def test_prices_are_of_settings_that_differ_and_name_their_runs() -> None:
    assert len(set(SETTINGS)) == len(SETTINGS)
    exact = SETTINGS[0]
    assert exact.price and exact.price.loss_pct == 0.0
    for setting in SETTINGS[1:]:
        if setting.price:
            assert "steps" in setting.price.source and setting.price.seeds >= 2
    assert set(link_plan.CODING_BYTES) >= {s.shared for s in SETTINGS}
