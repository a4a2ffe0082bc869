"""Methods at a small scale: their bytes, their learning rates, and resuming a killed search."""

import json
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import torch

from swarm.data.corpus import open_corpus, size_of
from swarm.data.loader import Loader
from swarm.experts import expert_tensor, expert_unit
from swarm.model.routing import RoutingControls
from tests.train.runs import patterned_shards, same

SHARDS = patterned_shards()


def text_in(folder: Path) -> Path:
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}.txt").write_text(f"Line {number} of a small text.\n" * 40)
    return folder


def test_bytes_are_those_of_the_wanted_shares(script: ModuleType) -> None:
    share = {
        name: script.share_of_diloco(name)
        for name, method in (script.HEADLINE | script.EXCHANGES).items()
        if method.peers > 1
    }
    assert share["all-own"] == share["all-own-muon"] == 1
    assert share["home"] == share["home-muon"] < share["home-two-muon"] < 1 / 16
    assert share["home-half-muon"] < 1 / 32
    assert share["home"] < share["exact"] < 1
    assert script.share_of_diloco("h-100") == pytest.approx(share["home"] / 5)


def test_methods_read_the_same_tokens(script: ModuleType) -> None:
    """20 tokens per parameter and 100 cycles, except where batches or cycles are longer."""
    for name, method in script.METHODS.items():
        run = script.run_of(method, 1.0, 1, script.FULL)
        steps = run.run.rounds * run.round.local_steps
        read = steps * run.train.batch_tokens * method.peers
        assert run.schedule_steps == steps
        assert 20 <= read / script.parameters(run.model).total < 20.7, name
        assert steps >= 100 * method.cycle or method.batch > 1 or method.cycle > 20
        assert run.merging.interval_steps % run.round.local_steps == 0


def losses_of(script: ModuleType, method: str, by_rate: dict[float, float]) -> dict:
    return {
        script.variant_of(method, rate): dict.fromkeys(script.TUNING_SEEDS, loss)
        for rate, loss in by_rate.items()
    }


@pytest.mark.parametrize(
    ("known", "wanted", "best"),
    [
        ({}, (0.5, 1, 2), None),
        ({0.5: 2.0, 1: 1.9}, (0.5, 1, 2), None),
        ({0.5: 2.0, 1: 1.9, 2: 2.1}, (0.5, 1, 2), 1),
        ({0.5: 2.0, 1: 1.9, 2: 1.8}, (0.5, 1, 2, 4), None),
        ({0.5: 1.7, 1: 1.9, 2: 1.8}, (0.25, 0.5, 1, 2), None),
        ({0.5: 2.0, 1: 1.9, 2: 1.8, 4: 1.85}, (0.5, 1, 2, 4), 2),
        ({0.5: 2.0, 1: 1.9, 2: 1.8, 4: 1.7, 8: 1.6}, (0.5, 1, 2, 4, 8), 8),
    ],
)
def test_learning_rates_are_searched_until_the_best_is_inside(
    script: ModuleType, known: dict[float, float], wanted: tuple[float, ...], best: float | None
) -> None:
    assert script.tuned(losses_of(script, "home-muon", known), "home-muon") == (wanted, best)


def test_results_begin_once_the_best_rate_is_known_and_recipes_share_it(
    script: ModuleType,
) -> None:
    first = {cell.variant for cell in script.plan({})}
    assert {"home-muon@0.5", "home-muon@1", "home-muon@2"} <= first
    assert not any(variant.startswith("late@") for variant in first)
    losses = losses_of(script, "home-muon", {0.5: 2.0, 1: 1.9, 2: 2.1})
    cells = {(cell.variant, cell.seed) for cell in script.plan(losses)}
    assert {("home-muon@1", seed) for seed in (*range(1, 9), *script.TUNING_SEEDS)} <= cells
    assert {("late@1", seed) for seed in range(1, 5)} <= cells
    assert ("late@1", 101) not in cells


def test_the_search_gives_no_result(script: ModuleType) -> None:
    losses = losses_of(script, "home-muon", {0.5: 2.0, 1: 1.9, 2: 2.1})
    losses["home-muon@1"] |= {1: 1.5, 2: 1.6}
    assert script.results(losses, "home-muon") == {1: 1.5, 2: 1.6}
    losses |= {"late@1": {1: 3.0, 3: 3.0}}
    assert script.against(losses, "late", "home-muon") == [100.0]


def test_an_expert_learns_from_one_part_of_the_batch(script: ModuleType) -> None:
    """The gradient of expert e is that of part e mod 2. Other tensors learn from both parts."""
    from conditions import Conditions, LimitedEngine  # the folder is on the path only in this test

    run = script.run_of(script.METHODS["all-adamw-16"], 1.0, 1, script.QUICK)
    batch_BT1 = torch.randint(0, 256, (2 * run.train.micro_batch_sequences, 17))

    def gradients(readers: int, tokens_BT1: torch.Tensor) -> dict[str, torch.Tensor]:
        engine = LimitedEngine(run, Conditions(readers=readers))
        engine.own(range(run.model.num_experts))
        for parameter in engine._model.parameters():
            values = torch.sin(torch.arange(1.0, parameter.numel() + 1)) / 9
            parameter.data.copy_(values.view_as(parameter))
        engine._accumulate(tokens_BT1, RoutingControls())
        return {name: gradient.clone() for name, gradient in engine._gradients_by_name().items()}

    whole, parted = gradients(1, batch_BT1), gradients(2, batch_BT1)
    halves = [gradients(1, half_BT1) for half_BT1 in batch_BT1.chunk(2)]
    stacks = [name for name in whole if ".experts.owned." in name]
    assert stacks
    for name, gradient in whole.items():
        if name in stacks:
            for row in range(len(gradient)):
                torch.testing.assert_close(parted[name][row], halves[row % 2][name][row] / 2)
        else:
            assert same({name: parted[name]}, {name: gradient})


@pytest.mark.parametrize("name", ["skip-4", "rotate-4", "balance-4"])
def test_a_peer_without_some_experts_trains_without_them(script: ModuleType, name: str) -> None:
    from in_process import InProcessSwarm

    method = script.METHODS[name]
    run = script.run_of(method, 1.0, 1, script.QUICK)
    with Loader(SHARDS, run) as loader:
        swarm = InProcessSwarm(run, loader, method.conditions)
        held = {peer: set(held) for peer, held in swarm.held.items()}
        for _ in range(6):
            swarm.round()
        for peer, engine in swarm.engines.items():
            assert len(swarm.held[peer]) == 4 and set(engine.owned) < swarm.held[peer]
            assert (swarm.held[peer] == held[peer]) == (name != "rotate-4")
            for expert in range(8):
                part = swarm.layout.by_unit[expert_unit(expert)].slices[0]
                weight = engine.read([part.name])[part.name]
                assert bool(weight.any()) == (expert in swarm.held[peer])


def test_experts_may_have_a_rate_and_a_momentum_of_their_own(script: ModuleType) -> None:
    from conditions import Conditions, LimitedEngine

    run = script.run_of(script.METHODS["all-muon-16"], 1.0, 1, script.QUICK)
    batch_BT1 = torch.arange(run.train.micro_batch_sequences * 17).view(-1, 17) % 256
    query = "model.layers.0.self_attn.q_proj.weight"
    gate, names = expert_tensor(0, 3, "gate"), [query, expert_tensor(0, 3, "gate")]

    def trained(**conditions: float) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Values and momentum after a step from the same weights."""
        torch.manual_seed(2)
        engine = LimitedEngine(run, Conditions(**conditions))
        engine.own(range(run.model.num_experts))
        for parameter in engine._model.parameters():
            parameter.data.copy_(0.02 * torch.randn_like(parameter))
        engine.step(batch_BT1, lr=1e-3)
        return engine.read(names), engine.read_moments(names)

    (usual, short), (fast, _), (still, _) = (trained(expert_lr=each) for each in (1, 2, 1e-9))
    assert torch.equal(usual[query], fast[query])
    torch.testing.assert_close(fast[gate] - still[gate], 2 * (usual[gate] - still[gate]))
    _, long = trained(expert_decay=0.98)
    assert torch.equal(long[f"momentum.{query}"], short[f"momentum.{query}"])
    torch.testing.assert_close(long[f"momentum.{gate}"], 0.4 * short[f"momentum.{gate}"])


def test_own_texts_are_parts_of_the_whole(script: ModuleType, tmp_path: Path) -> None:
    from cells import _part_of

    corpus = open_corpus(str(text_in(tmp_path / "text")))
    parts = [_part_of(corpus, part, 4) for part in range(4)]
    assert tuple(file for part in parts for file in part.files) == corpus.files
    sizes = [size_of(part.root, part.files) for part in parts]
    assert max(sizes) < 1.2 * min(sizes)


def test_a_killed_search_goes_on_and_processes_change_nothing(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = text_in(tmp_path / "text")
    common = ["--quick", "--corpus", str(folder), "--cache", str(tmp_path / "tokens")]
    wanted = [
        f"headline/{name}@{{}}/{seed}" for name in ("centralised", "home") for seed in (101, 102)
    ]
    few = [pattern.format("0.5") for pattern in wanted]

    def trained(name: str, *calls: list[str]) -> list[dict]:
        for call in calls:
            script.main([*common, "--out", str(tmp_path / name), *call])
        lines = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        return sorted(
            ({k: v for k, v in line.items() if "seconds" not in k} for line in lines),
            key=lambda line: line["cell"],
        )

    whole = trained("whole.jsonl", ["--cells", *few, "--processes", "2"])
    cut = trained("cut.jsonl", ["--cells", few[0]], ["--cells", *few])
    assert cut == whole
    assert [line["cell"] for line in whole] == few
    assert {line["tokens"] for line in whole} == {16 * 16 * 20}
    assert [" delay=1" in line["run"] for line in whole] == [False, False, True, True]

    svg = tmp_path / "quality.svg"
    out = ["--out", str(tmp_path / "losses.jsonl")]
    lines = [
        {"cell": f"headline/{name}@{rate}/{seed}", "run": "", "commit": "", "losses": {"20": loss}}
        for name, better in (("centralised", 0.0), ("home", 0.5))
        for rate, loss in (("0.5", 2.0), ("1", 1.0 + better), ("2", 2.0))
        for seed in (1, 2, *script.TUNING_SEEDS)
    ]
    (tmp_path / "losses.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    capsys.readouterr()
    script.main([*common, *out, "--cells", "--plot", str(svg)])
    printed = capsys.readouterr().out
    assert "| home: b2, experts b1, 5 slices | 0.004 | 1/18.4 | 2 | 1.5000 | +50.0 [" in printed
    circles = ElementTree.parse(svg).getroot().findall("{http://www.w3.org/2000/svg}circle")
    assert len(circles) == 2
