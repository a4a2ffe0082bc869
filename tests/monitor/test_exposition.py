"""`/metrics`: every figure once, under its definition, with the values of the snapshot."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from swarm.monitor import exposition as exposition_module
from swarm.monitor.exposition import FAMILIES, exposition, help_of
from swarm.monitor.metrics import METRICS
from swarm.monitor.schema import as_json
from tests.monitor.crowds import crowd

STATE = json.loads(json.dumps(as_json(crowd(5, 8, 9))))


def families() -> dict[str, dict[frozenset[str], float]]:
    text = exposition(STATE).decode()
    return {
        family.name: {frozenset(s.labels.values()): s.value for s in family.samples}
        for family in text_string_to_metric_families(text)
    }


def test_every_figure_is_exposed_once_with_its_definition_as_help() -> None:
    assert sorted(f.metric.title for f in FAMILIES) == sorted(m.title for m in METRICS)
    text = exposition(STATE).decode()
    for family in FAMILIES:
        name = family.name + "_total" if family.kind == "counter" else family.name
        assert f"# HELP {name} {help_of(family.metric)}\n" in text
        assert re.fullmatch(r"swarm_[a-z_]+", family.name)


def test_values_are_those_of_the_snapshot() -> None:
    found = families()
    for peer in STATE["peers"]:
        labels = frozenset((peer["peer_id"], peer["name"]))
        assert found["swarm_peer_tokens_per_second"][labels] == peer["tokens_per_s"]
        assert found["swarm_peer_sent_bytes"][labels] == peer["blob_bytes_sent"]
        assert found["swarm_peer_experts"][labels] == len(peer["owned_experts"])
        assert found["swarm_peer_seen_seconds_ago"][labels] == STATE["at"] - peer["published"]
        for phase, seconds in peer["last_round"]["phases"].items():
            assert found["swarm_peer_phase_seconds"][labels | {phase}] == seconds
    first = frozenset((STATE["peers"][0]["peer_id"], STATE["peers"][0]["name"]))
    workers = STATE["peers"][0]["workers"]
    assert found["swarm_peer_bubble_share"] == {first: workers["bubble"]}
    kinds = {first | {kind}: share for kind, share in workers["shares"].items()}
    assert found["swarm_peer_worker_share"] == kinds
    assert found["swarm_round"][frozenset()] == STATE["round"]
    assert found["swarm_held_out_loss"][frozenset()] == STATE["losses"][-1][1]
    assert found["swarm_utilisation"][frozenset()] == STATE["pace"]["utilisation"]
    ages = {frozenset((str(e["expert"]),)): e["age"] for e in STATE["experts"]}
    assert found["swarm_expert_age_rounds"] == ages


def test_what_is_not_known_is_left_out_and_names_of_peers_end_no_line() -> None:
    peers = [{**STATE["peers"][0], "name": 'a"\n# b', "loss": None, "routing": None}]
    text = exposition({**STATE, "peers": peers, "losses": [], "coverage": None}).decode()
    assert "swarm_peer_loss{" not in text and "swarm_held_out_loss " not in text.split("HELP")[-1]
    assert r'name="a\"\n# b"' in text
    list(text_string_to_metric_families(text))


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    path = Path(__file__).parents[2] / "configs" / "grafana" / "swarm.json"
    dashboard = json.loads(path.read_text())
    exposed = {f.name + ("_total" if f.kind == "counter" else "") for f in FAMILIES}
    asked: set[str] = set()
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            asked |= set(re.findall(r"swarm_[a-z_]+", target["expr"]))
    assert asked and asked <= exposed


def test_every_metric_is_on_the_page_and_nothing_else() -> None:
    page = (Path(exposition_module.__file__).parent / "README.md").read_text()
    listed = page[page.index("**Metrics.**") :].partition("\n\n")[2].partition("\n\n")[0]
    described = {
        name: (*(("peer", "name") if name.startswith("swarm_peer_") else ()), *labels.split(","))
        for name, labels in re.findall(r"`(swarm_[a-z_]+)(?:\{([a-z,]+)\})?`", listed)
    }
    assert {name: tuple(filter(None, labels)) for name, labels in described.items()} == {
        f.name + ("_total" if f.kind == "counter" else ""): tuple(f.labels) for f in FAMILIES
    }


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
def test_promtool_accepts_what_prometheus_will_read() -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=exposition(STATE), capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr.decode()
