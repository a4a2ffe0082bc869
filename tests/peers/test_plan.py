"""swarm-plan: the promised keys and the paper's figures."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from peers.actions.plan_tables import link_named
from peers.plan import in_words, main, seconds
from swarm.config import RunConfig, parse_config
from swarm.errors import DoesNotFit
from swarm.model.cost import expert_wire_bytes, shared_wire_bytes
from swarm.protocol.values.layout import layout_of

RUNS = Path(__file__).parents[2] / "configs" / "runs"


def plan(name: str, *args: str) -> dict[str, Any]:
    result = CliRunner().invoke(main, ["--run", str(RUNS / f"{name}.toml"), "--json", *args])
    figures: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert result.exit_code == (0 if figures["fits"] else DoesNotFit.exit_code), result.output
    return figures


# Source: SPES.md, "Sizes": total, shared, trained per peer (millions), state with bf16 frozen (GB).
PAPER = {
    "spes_1b": (1167, 261, 488, 9.2),
    "spes_2b": (2127, 617, 712, 14.2),
    "spes_7b": (7333, 891, 2501, 49.7),
    "spes_9b": (9431, 975, 3089, 62.1),
}


@pytest.mark.parametrize("name", sorted(PAPER))
def test_the_papers_models_have_the_papers_sizes(name: str) -> None:
    total, shared, trained, state_gb = PAPER[name]
    figures = plan(name)
    assert round(figures["parameters_total"] / 1e6) == total
    assert round(figures["parameters_shared"] / 1e6) == shared
    assert round(figures["parameters_trained_per_peer"] / 1e6) == trained
    assert figures["state_bytes_per_peer"] / 1e9 == pytest.approx(state_gb, abs=0.05)


@pytest.mark.parametrize("name", ["spes_2b", "spes_7b"])
def test_a_peer_needs_at_most_45_percent_of_full_trainings_state(name: str) -> None:
    figures = plan(name)
    assert figures["state_bytes_per_peer"] <= 0.45 * 16 * figures["parameters_total"]


def test_json_has_exactly_the_promised_keys() -> None:
    assert list(plan("demo")) == [
        "parameters_total",
        "parameters_shared",
        "parameters_per_expert",
        "parameters_trained_per_peer",
        "state_bytes_per_peer",
        "disk_bytes",
        "bytes_sent_per_peer_per_round",
        "handover_bytes",
        "engine",
        "level",
        "fits",
        "owned_experts",
        "experts_that_fit",
        "losses_survived",
        "losses_until_pause",
        "micro_batch_tokens",
        "device_peak_bytes",
        "host_peak_bytes",
        "host_training_bytes",
        "host_round_bytes",
        "host_merge_bytes",
        "engine_disk_bytes",
        "step_s",
        "round_training_s",
        "round_averaging_s",
        "run_days",
        "tflops",
        "mbit",
    ]


def test_a_described_machine_gets_its_own_engine() -> None:
    large = plan("spes_2b", "--gpu", "80GB", "--host", "128GB", "--disk", "1TB")
    small = plan("spes_2b", "--gpu", "8GB", "--host", "16GB", "--disk", "0.5TB")
    assert (large["engine"], small["engine"]) == ("resident", "streaming")
    assert large["fits"]
    assert small["fits"]
    assert small["device_peak_bytes"] < 8e9
    assert small["host_peak_bytes"] < 16e9
    assert small["engine_disk_bytes"] == 0  # frozen experts are mapped from the agreed blobs
    other = plan(
        "spes_2b", "--gpu", "8GB", "--host", "16GB", "--disk", "1TB", "--set", "wire.experts=fp32"
    )
    assert other["level"] == small["level"]
    assert other["engine_disk_bytes"] > 0  # these are fp32, frozen ones bf16: copies
    assert small["experts_that_fit"] < large["experts_that_fit"] == 16
    asked = plan("spes_2b", "--gpu", "80GB", "--host", "128GB", "--engine", "streaming")
    assert asked["engine"] == "streaming"
    none = plan("spes_2b", "--gpu", "2GB", "--host", "4GB")
    assert not none["fits"]
    assert none["experts_that_fit"] is None


def refused(*args: str) -> str:
    result = CliRunner().invoke(main, ["--run", str(RUNS / "spes_7b.toml"), *args])
    assert result.exit_code == 12
    return " ".join(result.stderr.split())


LARGE = ("--gpu", "80GB", "--host", "128GB")


def test_a_disk_that_is_too_small_is_said_with_the_numbers() -> None:
    needed = plan("spes_7b", *LARGE, "--disk", "2TB")["disk_bytes"]
    said = refused(*LARGE, "--disk", "100GB")
    assert f"{needed / 1e9:,.1f} GB of disk needed, 100.0 GB usable: free some" in said
    assert "memory" not in said
    figures = plan("spes_7b", *LARGE, "--disk", "100GB")
    assert not figures["fits"]
    assert figures["engine"] == "resident"


def test_memory_that_is_too_small_is_said_with_the_numbers() -> None:
    said = refused("--gpu", "2GB", "--host", "4GB", "--disk", "2TB")
    assert "GB of GPU memory needed, 1.2 GB usable" in said
    assert "GB of host memory needed, 3.0 GB usable" in said
    assert "disk" not in said
    said = refused("--gpu", "0", "--host", "16GB", "--disk", "2TB")
    assert re.search(r"[\d.]+ GB of host memory needed, 15.0 GB usable", said)


def test_the_number_of_experts_that_fit_is_named_as_the_remedy() -> None:
    size = ("--gpu", "80GB", "--disk", "2TB", "--engine", "resident", "--host")
    most = plan("spes_7b", "--peers", "1", *size, "128GB")["experts_that_fit"]
    said = refused("--peers", "1", *size, "128GB")
    assert 0 < most < 32
    assert f"own at most {most} experts" in said


def test_a_plan_says_how_many_such_machines_may_be_lost() -> None:
    size = ("--gpu", "80GB", "--disk", "2TB", "--host", "128GB", "--peers", "4")
    figures = plan("spes_7b", *size)
    most, peers = figures["experts_that_fit"], 4
    enough = next(n for n in range(1, peers + 1) if n * most >= 32)
    assert figures["losses_survived"] == peers - enough
    half = next(n for n in range(1, peers + 1) if n * most >= 16)
    assert figures["losses_until_pause"] == peers - half
    said = CliRunner().invoke(main, ["--run", str(RUNS / "spes_7b.toml"), *size]).stdout
    assert f"4 such peers, each with room for {most} experts and owner of 8" in said
    assert re.search(rf"peers that may be lost +{peers - enough} +before an expert waits", said)


def test_a_table_is_printed_before_it_is_said_that_nothing_fits() -> None:
    small = ["--gpu", "2GB", "--host", "4GB"]
    result = CliRunner().invoke(main, ["--run", str(RUNS / "spes_7b.toml"), *small])
    assert "nothing fits" in result.stdout
    assert "does not fit" in result.stderr


@pytest.mark.parametrize("flag", ["--gpu", "--host", "--disk"])
@pytest.mark.parametrize(
    ("size", "words"),
    [("24", "write it as 24GB"), ("24B", "too small"), ("63MB", "too small"), ("lots", "a size")],
)
def test_a_size_without_unit_or_sense_is_a_wrong_option(flag: str, size: str, words: str) -> None:
    result = CliRunner().invoke(main, ["--run", str(RUNS / "demo.toml"), flag, size])
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())
    assert f"{flag} '{size}'" in result.stderr


def test_a_table_for_people_names_engine_and_reason() -> None:
    result = CliRunner().invoke(
        main,
        ["--run", str(RUNS / "spes_2b.toml"), "--gpu", "24GB", "--host", "64GB", "--disk", "1TB"],
    )
    assert result.exit_code == 0, result.output
    assert "on a machine with 24.0 GB GPU, 64.0 GB memory" in result.stdout
    assert "the fastest that fits" in result.stdout


def test_the_number_of_peers_may_differ_from_the_files() -> None:
    four, eight = plan("spes_7b"), plan("spes_7b", "--peers", "8")
    expert = four["parameters_per_expert"]
    # 32 experts: 8 each of 4 peers, 4 each of 8.
    assert four["parameters_trained_per_peer"] - eight["parameters_trained_per_peer"] == 4 * expert
    again = plan("spes_7b", "--set", "run.peers=8")
    # Seconds of a step depend on this machine's present speed.
    paced = dict.fromkeys(("step_s", "tflops", "round_training_s", "run_days"), 0)
    assert again | paced == eight | paced


def test_an_fp32_wire_sends_the_papers_bytes() -> None:
    figures = plan("spes_7b", "--set", "wire.experts=fp32")
    # Source: SPES.md, "Sizes": 24.7 GB up = down.
    assert figures["bytes_sent_per_peer_per_round"] / 1e9 == pytest.approx(24.7, abs=0.05)


def test_people_get_a_table() -> None:
    result = CliRunner().invoke(main, ["--run", str(RUNS / "spes_7b.toml")])
    for fact in ("each of 4 peers", "7,333 M", "2,501 M", "49.7 GB", "42% of training all"):
        assert fact in result.stdout


@pytest.mark.parametrize(
    ("num_bytes", "words"), [(1e6, "0.1 s"), (1e9, "80.0 s"), (1e10, "13 min"), (1e11, "2.2 h")]
)
def test_durations_are_said_in_fitting_units(num_bytes: float, words: str) -> None:
    assert seconds(num_bytes, 100) == words


@pytest.mark.parametrize("name", ["demo", *sorted(PAPER)])
def test_the_plan_counts_the_bytes_that_the_layout_cuts(name: str) -> None:
    path = RUNS / f"{name}.toml"
    for wire in ([], ["wire.shared=bf16"], ["wire.experts=fp32"]):
        run = parse_config(RunConfig, path.read_text(), source=name, overrides=wire)
        assert layout_of(run).num_bytes == shared_wire_bytes(run) + expert_wire_bytes(run)


def test_a_plan_says_how_long_a_round_and_the_run_take_and_at_which_speeds() -> None:
    slow = plan("spes_2b", "--gpu", "80GB", "--host", "128GB", "--disk", "1TB")
    fast = plan("spes_2b", "--gpu", "80GB", "--host", "128GB", "--disk", "1TB", "--mbit", "1000")
    run = parse_config(RunConfig, (RUNS / "spes_2b.toml").read_text(), source="x")
    training_s = run.round.local_steps * slow["step_s"]
    assert slow["round_training_s"] == pytest.approx(training_s, rel=0.01)
    sent = slow["bytes_sent_per_peer_per_round"]
    assert slow["round_averaging_s"] == pytest.approx(sent * 8 / 100e6, rel=0.001)
    assert fast["round_averaging_s"] == pytest.approx(slow["round_averaging_s"] / 10, rel=0.001)
    # The run file: 420 rounds of 100 steps of twice the batch, then 720 of 50.
    training_s = (420 * 100 * 2 + 720 * 50) * slow["step_s"]
    run_s = training_s + 1140 * slow["round_averaging_s"]
    assert slow["run_days"] == pytest.approx(run_s / 86400, rel=0.001)
    assert (slow["tflops"], slow["mbit"], fast["mbit"]) == (100.0, 100.0, 1000.0)


def test_people_read_times_with_the_speeds_that_they_follow_from() -> None:
    given = ["--run", str(RUNS / "demo.toml"), "--gpu", "24GB", "--host", "64GB"]
    said = CliRunner().invoke(main, given, env={"COLUMNS": "120"}).stdout
    assert re.search(r"speed +100 TFLOP/s +of matrix products, assumed", said)
    assert re.search(r"link +100 Mbit/s", said)
    assert re.search(r"a round .* m?s .*\n +training .* 50 steps", said)
    assert re.search(r"the run .* 8 rounds", said)
    here = CliRunner().invoke(main, given[:2], env={"COLUMNS": "120"}).stdout
    assert "of matrix products, measured here" in here


BIG = ("--gpu", "80GB", "--host", "256GB", "--disk", "2TB", "--step-seconds", "36")


def test_where_rounds_overlap_their_bytes_move_beside_the_steps() -> None:
    """A round lasts for the longer of both."""
    fast, slow = (plan("spes_7b_home", *BIG, "--mbit", mbit) for mbit in ("100", "1"))
    days, rounds = 86_400, 36_540
    assert fast["round_averaging_s"] < fast["round_training_s"] < slow["round_averaging_s"]
    # The run file: 13,460 rounds of 20 steps of twice the batch, 72 s each, then 23,080 of 10.
    training_s = 13_460 * 20 * 72 + 23_080 * 10 * 36
    assert fast["run_days"] * days == pytest.approx(training_s, rel=0.001)
    assert slow["run_days"] * days == pytest.approx(rounds * slow["round_averaging_s"], rel=0.001)
    said = CliRunner().invoke(main, ["--run", str(RUNS / "spes_7b_home.toml"), *BIG]).output
    assert "of its bytes, during the steps" in said


def test_a_link_is_planned_with_the_run_as_it_is_and_the_settings_that_fit() -> None:
    figures = plan("spes_7b", *BIG, "--link", "100/20mbit,100ms", "--utilisation", "0.95")
    link = figures["link"]
    assert (link["up_mbit"], link["down_mbit"], link["rtt_ms"]) == (20, 100, 100)
    assert figures["mbit"] == 20 and link["wanted_utilisation"] == 0.95
    # Source: the table in tests/model/test_link_plan.py: at 20/100 Mbit/s it computes 20.3 %.
    assert link["run"]["utilisation"] == pytest.approx(0.203, abs=0.01)
    assert link["settings"] and all(s["utilisation"] >= 0.95 for s in link["settings"])
    assert link["settings"][0]["price"]["loss_pct"] == -6.4
    low = plan("spes_7b", *BIG, "--link", "home-20", "--utilisation", "0.2")["link"]
    assert {s["shared"] for s in low["settings"]} > {s["shared"] for s in link["settings"]}
    assert "link" not in plan("spes_7b", *BIG)


def test_rounds_of_an_agreed_time_are_planned_as_those_of_as_many_steps(tmp_path: Path) -> None:
    without_phases = (RUNS / "spes_7b_home.toml").read_text().partition("[[phases]]")[0]
    (tmp_path / "home.toml").write_text(without_phases)
    asked = (*BIG, "--link", "100/20mbit,100ms")
    steps, timed = (
        plan(str(tmp_path / "home"), *asked, *more)["link"]
        for more in ((), ("--set", "round.seconds=360"))
    )
    assert steps["run"]["utilisation"] > 0.99  # the head of the run file says 99.9 %
    assert timed["run"] == steps["run"] and timed["settings"] == steps["settings"]


def test_a_cap_is_the_rate_and_a_quota_is_said_in_days() -> None:
    capped = ("--link", "1gbit,10ms", "--max-upload", "20mbit", "--max-download", "50mbit")
    link = plan("spes_7b", *BIG, *capped)["link"]
    assert (link["up_mbit"], link["down_mbit"]) == (20, 50)
    args = ["--run", str(RUNS / "spes_7b.toml"), *BIG, *capped, "--data-quota", "2TB"]
    said = CliRunner().invoke(main, args, env={"COLUMNS": "120"}).stdout
    assert re.search(r"quota +2,000 GB +are used up in \d+\.\d+ days", said)
    assert "in toy runs" in said and "Assumed: transfers reach 85% of the link" in said


@pytest.mark.parametrize("flag", ["--max-upload", "--max-download"])
def test_a_cap_counts_without_a_link_too(flag: str) -> None:
    figures = plan("spes_7b", *BIG, flag, "20mbit")
    sent = figures["bytes_sent_per_peer_per_round"]
    assert figures["round_averaging_s"] == pytest.approx(sent * 8 / 20e6, rel=0.001)
    assert figures["mbit"] == 20
    assert plan("spes_7b", *BIG, "--mbit", "5", flag, "20mbit")["mbit"] == 5


def test_steps_wait_for_offers_of_an_engine_that_cannot_be_read_meanwhile() -> None:
    """Background offers: workers with cut state, and an engine that streams and clips by unit."""
    asked = ("--link", "100mbit", "--step-seconds", "36", "--gpu", "24GB", "--host", "200GB")
    by_unit = ("--set", "optimizer.clip=unit")
    of_one, of_unit = (plan("spes_7b_home", *asked, *more) for more in ((), by_unit))
    assert of_one["engine"] == of_unit["engine"] == "streaming"
    eight = (*asked[:4], *EIGHT, "--bus", "nvlink")
    of_eight = plan("spes_7b_home", *eight, "--set", "compute.shard=none")
    of_cut = plan("spes_7b_home", *eight, "--set", "compute.shard=state")
    each = (of_one, of_eight, of_unit, of_cut)
    one, many, unit, cut = (found["link"]["run"]["utilisation"] for found in each)
    assert one == many > 0.999 > unit == cut


def test_what_a_link_carries_under_loss_is_said() -> None:
    args = ["--run", str(RUNS / "spes_7b.toml"), *BIG, "--link", "100/20mbit,100ms,0.1%"]
    said = CliRunner().invoke(main, args, env={"COLUMNS": "120"}).stdout
    assert re.search(r"carried +13.5 down, 13.5 up +0.1 % loss with cubic or reno; with bbr", said)
    nothing = [*args, "--utilisation", "0.9999"]
    said = CliRunner().invoke(main, nothing, env={"COLUMNS": "120"}).stdout
    assert "No setting that is known reaches 100.0%; the best is" in said


@pytest.mark.parametrize(
    ("link", "words"),
    [
        ("20/100mbit", "write 100/20mbit, or if it is meant, down=20mbit,up=100mbit"),
        ("100/20", "write it as 100/20mbit,100ms (down/up, round trip)"),
        ("100", "it has no unit: write 100mbit"),
        ("20MB", "if you mean bytes, write 160mbit"),
        ("up=20mbit,100ms", "does not say how fast down is"),
        ("100mbit,50mbit", "says up twice"),
        ("100mbit,5", "it has no unit: write 5mbit"),
        ("100mbit,rtt=5%", "is not a valid rtt"),
        ("100mbit,speed=5", "a link has no 'speed'"),
    ],
)
def test_a_link_that_could_mean_two_things_is_refused_with_advice(link: str, words: str) -> None:
    result = CliRunner().invoke(main, ["--run", str(RUNS / "demo.toml"), "--link", link])
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("link", "down", "up", "rtt", "loss"),
    [
        ("100/20mbit,100ms", 100, 20, 100, 0),
        ("1gbit/500kbit", 1000, 0.5, 50, 0),
        ("50mbit/s, 20 ms, 0.1%", 50, 50, 20, 0.1),
        ("up=100mbit,down=20mbit,rtt=7ms,loss=1%", 20, 100, 7, 1),
        ("home-100", 100, 40, 30, 0),
    ],
)
def test_links_are_written_in_these_ways(
    link: str, down: float, up: float, rtt: float, loss: float
) -> None:
    rates = link_named(link)
    assert (rates.down_mbit, rates.up_mbit, rates.rtt_ms, rates.loss_pct) == (down, up, rtt, loss)


@pytest.mark.parametrize(
    ("duration_s", "words"),
    [
        (0.005, "5.0 ms"),
        (30.0, "30.0 s"),
        (600.0, "10 min"),
        (7200.0, "2.0 h"),
        (864e3, "10.0 days"),
    ],
)
def test_times_are_in_the_unit_that_suits_them(duration_s: float, words: str) -> None:
    assert in_words(duration_s) == words


EIGHT = ("--gpus", "8x80GB", "--host", "800GB", "--disk", "4TB")


def test_many_gpus_are_planned_as_one_peer() -> None:
    figures = plan("spes_7b", *EIGHT, "--bus", "nvlink")
    workers = figures["workers"]
    assert (workers["number"], workers["machines"], workers["bus"]) == (8, 1, "nvlink")
    (rank,) = workers["ranks"]
    assert (rank["workers"], rank["holds"]) == (8, "all layers, 32 experts")
    assert rank["device_bytes"] == figures["device_peak_bytes"] < 80e9
    assert rank["host_bytes"] == figures["host_peak_bytes"] and rank["disk_bytes"] == 0
    best, *rest = workers["ways"]
    assert (best["expert_parallel"], best["pipeline"], best["fits"]) == (1, 1, True)
    assert best["step_s"] == figures["step_s"]
    assert best["tokens_per_s"] == pytest.approx(1_048_576 / best["step_s"], rel=1e-3)
    parts = ("products", "waiting", "tokens", "outputs", "stream", "sums", "updates")
    for way in workers["ways"]:
        assert sum(way[f"{part}_s"] for part in parts) == pytest.approx(way["step_s"], abs=1e-3)
        assert way["step_s"] >= best["step_s"] or not way["fits"]
    streaming = [way for way in rest if way["engine"] == "streaming"]
    assert [way["fits"] for way in streaming] == [True]
    rest.remove(streaming[0])
    assert {(way["expert_parallel"], way["pipeline"]) for way in rest} == {
        (2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (1, 8),
    }  # fmt: skip
    assert "workers" not in plan("demo")


def test_the_bus_and_the_network_decide_how_a_model_is_cut() -> None:
    cards = ("--gpus", "8x24GB", "--host", "512GB", "--disk", "4TB", "--bus", "pcie")
    figures = plan("spes_7b", *cards)
    assert [rank["holds"] for rank in figures["workers"]["ranks"]] == [
        f"layers {layers}, 32 experts, 1/2 of masters and moments"
        for layers in ("0-4", "5-9", "10-14", "15-15")
    ]
    (dealt,) = plan("spes_7b", *cards, "--set", "compute.pipeline=1")["workers"]["ranks"]
    assert dealt["holds"] == "all layers, 1/4 of 32 experts, 1/8 of masters and moments"
    without = ("--set", "compute.shard=none", "--set", "compute.tensor_parallel=1")
    stages = plan("spes_7b", *cards, *without)["workers"]["ranks"]
    assert [rank["workers"] for rank in stages] == [2] * 4
    assert stages[0]["holds"] == "layers 0-4, 32 experts"
    chunks = ("--set", "compute.pipeline=2", "--set", "compute.pipeline_schedule=interleaved")
    first, last = plan("spes_7b", *cards, *chunks)["workers"]["ranks"]
    assert re.fullmatch(
        r"layers 0-\d and \d+-\d+, 32 experts, 1/4 of masters and moments", first["holds"]
    )
    assert re.fullmatch(
        r"layers \d-\d and \d+-15, 32 experts, 1/4 of masters and moments", last["holds"]
    )
    nodes = plan("spes_7b", *cards, "--remote-workers", "8", "--between", "25gbit")["workers"]
    assert (nodes["number"], nodes["machines"], nodes["between_gbit"]) == (16, 2, 25.0)
    asked = plan("spes_7b", *EIGHT, "--bus", "nvlink", "--set", "compute.expert_parallel=4")
    assert asked["workers"]["ranks"][0]["holds"] == "all layers, 1/4 of 32 experts"
    assert len(asked["workers"]["ways"]) == 1


def test_gpus_that_cannot_hold_a_model_in_any_way_stream_from_one_host_copy() -> None:
    args = ("--gpus", "4x16GB", "--host", "128GB", "--disk", "4TB", "--bus", "pcie")
    figures = plan("spes_7b", *args)
    assert (figures["engine"], figures["fits"]) == ("streaming", True)
    assert figures["workers"]["ways"][0]["engine"] == "streaming"
    (rank,) = figures["workers"]["ranks"]
    assert (rank["workers"], rank["holds"]) == (4, "streams all layers from the one host copy")
    assert 4 * rank["host_bytes"] < 128e9
    said = CliRunner().invoke(main, ["--run", str(RUNS / "spes_7b.toml"), *args]).stdout
    assert re.search(r"\n +1 +1 +1 +fp32 s +yes ", said)


def test_people_read_what_each_worker_holds_and_every_other_way() -> None:
    args = ["--run", str(RUNS / "spes_7b.toml"), *EIGHT, "--bus", "pcie"]
    said = CliRunner().invoke(main, args, env={"COLUMNS": "120"}).stdout
    assert "on a machine with 8 x 80.0 GB GPU, 800.0 GB memory" in said
    assert "8 workers: 8 in a machine over pcie" in said
    assert re.search(r"4 +layers 0-10, 32 experts +45\.\d GB", said)
    assert re.search(r"\n +8 +1 +1 +fp32 +yes +3[01]\.\d GB +9\.\d+ +0 ", said)
    assert "of matrix products, assumed" in said
    assert "of each worker" in said
    narrow = CliRunner().invoke(main, args, env={"COLUMNS": "80"}).stdout
    assert "layers 0-10" in narrow and "…" not in narrow


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--gpus", "8x80GB"], "say --bus nvlink or --bus pcie"),
        (["--gpus", "8x80GB", "--gpu", "24GB"], "both say what a GPU has"),
        (["--gpus", "80GBx8"], "write 8x80GB, 8 or all"),
        (["--gpus", "all", "--gpu", "80GB", "--bus", "pcie"], "write 8x80GB"),
        (["--gpus", "0x80GB"], "is no number of GPUs"),
        (["--remote-workers", "8"], "give --gpus too"),
        (["--gpus", "2x80"], "write it as 80GB"),
        (["--gpus", "2x80GB", "--bus", "pcie", "--between", "25GB"], "write 200000mbit"),
    ],
)
def test_gpus_that_could_mean_two_things_are_refused(args: list[str], words: str) -> None:
    result = CliRunner().invoke(main, ["--run", str(RUNS / "demo.toml"), *args])
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())
