"""The names of `import swarm`: files by name, models, exports, and the docstring of each name."""

import inspect
import re
from pathlib import Path

import pytest
import torch

import swarm
from swarm.errors import BadBlob, ConfigError, CorruptState, StateError
from swarm.experts import all_shapes
from swarm.model.huggingface import save_model
from swarm.model.initial_weights import initial_tensors
from swarm.run_files import find_file

DEMO = swarm.load_run("demo")


def test_every_public_name_is_there_and_explained() -> None:
    for name in sorted(set(swarm.__all__) - {"__version__"}):
        public = getattr(swarm, name)
        assert inspect.getdoc(public), name
    assert set(swarm.__all__) <= set(dir(swarm))
    assert set(swarm.__all__) == {*swarm.api.__all__, "__version__"}
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        swarm.nothing_of_the_kind  # noqa: B018 - looked up


@pytest.mark.parametrize(
    "public",
    [
        *(swarm.load_run, swarm.load_peer, swarm.load_export, swarm.load_state),
        *(swarm.build_model, swarm.look, swarm.plan_run, swarm.read_invitation),
        *(swarm.Peer.found, swarm.Peer.join, swarm.Peer.resume, swarm.Peer.start),
    ],
)
def test_a_public_function_says_what_it_takes_and_what_may_go_wrong(public: object) -> None:
    said = inspect.getdoc(public) or ""
    assert "Raises:" in said
    taken = inspect.signature(public).parameters  # type: ignore[arg-type]
    for name in taken:
        assert f"{name}: " in said.partition("Args:")[2], name


def test_a_run_is_found_by_name_from_anywhere_and_a_path_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert swarm.load_run("demo", ["run.rounds=3"]).run.rounds == 3
    (tmp_path / "spes_7b").mkdir()
    assert swarm.load_run("spes_7b").run.name == "spes_7b", "a folder is no run file"
    (tmp_path / "demo").write_text("nothing")
    assert find_file(Path("demo"), "runs") == Path("demo")
    with pytest.raises(ConfigError, match="demo: not valid TOML"):
        swarm.load_run("demo")
    with pytest.raises(ConfigError, match=r"by name there are demo, rehearsal, spes_1b"):
        swarm.load_run("dmo")


def test_a_peer_is_configured_by_name_or_by_overrides_alone() -> None:
    assert swarm.load_peer("gpu").compute.device == "cuda"
    assert swarm.load_peer(overrides=["peer.name=me"]).peer.name == "me"
    with pytest.raises(ConfigError, match=r"by name there are gpu, laptop"):
        swarm.load_peer("lapto")


def test_a_model_has_the_weights_of_the_seed_or_those_that_are_given(tmp_path: Path) -> None:
    seeded = swarm.build_model(DEMO)
    name = "model.embed_tokens.weight"
    initial = initial_tensors(DEMO, [name])[name]
    assert torch.equal(seeded.read([name])[name], initial)
    save_model(tmp_path, DEMO, ((n, t + 1) for n, t in _all_initial().items()))
    weights = swarm.load_export(tmp_path, DEMO)
    assert torch.equal(swarm.build_model(DEMO, weights).read([name])[name], initial + 1)
    assert seeded(torch.zeros(1, 9, dtype=torch.long)).shape == (1, 9, 260)


def test_weights_that_are_not_the_whole_model_are_refused() -> None:
    """Unwritten values are whatever the memory held before."""
    weights = _all_initial()
    missing = list(all_shapes(DEMO.model))[:4]
    for name in missing:
        del weights[name]
    said = rf"{re.escape(missing[0])} is missing; expected \(.*\); 3 more are missing"
    with pytest.raises(BadBlob, match=said):
        swarm.build_model(DEMO, weights)
    with pytest.raises(BadBlob, match="missing"):
        swarm.build_model(DEMO, {})


def test_an_export_of_another_model_is_refused_with_the_first_difference(tmp_path: Path) -> None:
    save_model(tmp_path, DEMO, _all_initial().items())
    other = swarm.load_run("demo", ["model.num_experts=4", "merging.top_k=2"])
    with pytest.raises(ConfigError, match=r"model\.num_experts is 4, there 8"):
        swarm.load_export(tmp_path, other)
    wider = swarm.load_run("demo", ["model.moe_intermediate_size=64"])
    with pytest.raises(ConfigError, match=r"model\.moe_intermediate_size is 64, there 128"):
        swarm.load_export(tmp_path, wider)
    with pytest.raises(ConfigError, match=r"nowhere/config\.json: cannot be read"):
        swarm.load_export(tmp_path / "nowhere", DEMO)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CorruptState, match=r"model\.safetensors"):
        swarm.load_export(tmp_path, DEMO)


def test_what_is_of_training_alone_and_in_no_export_has_its_initial_value(tmp_path: Path) -> None:
    noisy = swarm.load_run("demo", ["model.noisy_top_k=true"])
    save_model(tmp_path, noisy, initial_tensors(noisy, all_shapes(noisy.model)).items())
    assert swarm.load_export(tmp_path, noisy).keys() == all_shapes(noisy.model).keys()


def test_a_folder_without_a_run_has_no_state(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="no such state directory"):
        swarm.load_state(tmp_path / "nowhere")
    with pytest.raises(StateError, match="there is no run in it"):
        swarm.load_state(tmp_path)


def _all_initial() -> dict[str, torch.Tensor]:
    return initial_tensors(DEMO, all_shapes(DEMO.model))
