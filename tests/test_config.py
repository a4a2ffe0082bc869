"""Configurations: refusals and their texts, precedence of overrides, shipped files."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.config import (
    PeerConfig,
    RunConfig,
    parse_config,
    parse_override,
    valid_keys,
    validate_config,
)
from swarm.errors import ConfigError
from swarm.model.link_plan import Setting, cycle_bytes, setting_of

CONFIGS = Path(__file__).parents[1] / "configs"
RUN_FILES = sorted((CONFIGS / "runs").glob("*.toml"))
PEER_FILES = sorted((CONFIGS / "peers").glob("*.toml"))
DEMO = (CONFIGS / "runs" / "demo.toml").read_text()


def demo(*overrides: str, text: str = DEMO) -> RunConfig:
    return parse_config(RunConfig, text, source="demo.toml", overrides=overrides)


def refusal(*overrides: str, text: str = DEMO) -> str:
    with pytest.raises(ConfigError) as refused:
        demo(*overrides, text=text)
    return str(refused.value)


# ---------------------------------------------------------------- shipped files


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.stem)
def test_a_shipped_run_ends_where_its_schedule_does(path: Path) -> None:
    run = parse_config(RunConfig, path.read_text(), source=str(path))
    assert run.run.name == path.stem
    steps = tokens = 0
    for _ in range(run.run.rounds):
        phase = run.phase_at(tokens)
        steps += phase.local_steps
        tokens += phase.local_steps * phase.batch_tokens * run.run.peers
    assert steps == run.schedule_steps
    for phase in run.phases:
        # The paper changes batch and H after 70 % of the tokens.
        assert phase.until_tokens / tokens == pytest.approx(0.7, abs=1e-3)
        assert phase.batch_tokens == 2 * run.train.batch_tokens
        # Slices of a cycle have its steps together.
        slices = run.round.experts_every
        assert (slices * phase.local_steps, slices * run.round.local_steps) == (100, 50)


HOME_FILES = [path for path in RUN_FILES if path.stem.endswith("_home")]
DILOCO = Setting("fp32", "fp32", owners=2**16)


@pytest.mark.parametrize("path", HOME_FILES, ids=lambda path: path.stem)
def test_a_run_for_home_links_is_the_exact_one_at_a_sixteenth_of_dilocos_bytes(path: Path) -> None:
    exact_path = path.with_stem(path.stem.removesuffix("_home"))
    home, exact = (
        parse_config(RunConfig, each.read_text(), source=str(each)) for each in (path, exact_path)
    )
    ours, theirs = home.model_dump(), exact.model_dump()
    differ = {name for name in ours if ours[name] != theirs[name]}
    assert differ == {"run", "round", "wire", "phases", "optimizer"}
    assert {**theirs["optimizer"], "kind": "muon"} == ours["optimizer"]
    assert {key for key in ours["run"] if ours["run"][key] != theirs["run"][key]} == {
        "name",
        "rounds",
    }
    peers, setting = home.run.peers, setting_of(home)
    sent = cycle_bytes(home, setting, peers)
    assert cycle_bytes(exact, DILOCO, peers) / sent > 16


@pytest.mark.parametrize("path", PEER_FILES, ids=lambda path: path.stem)
def test_a_shipped_machine_loads(path: Path) -> None:
    assert parse_config(PeerConfig, path.read_text(), source=str(path)) != PeerConfig()


def test_the_shipped_files_are_those_that_the_readme_names() -> None:
    names = [path.stem for path in RUN_FILES]
    assert names == [
        "demo", "rehearsal", "spes_1b", "spes_2b", "spes_2b_home", "spes_7b", "spes_7b_home",
        "spes_9b",
    ]  # fmt: skip
    assert [path.stem for path in PEER_FILES] == ["gpu", "laptop"]


def test_the_demo_merges_before_it_ends() -> None:
    run = demo()
    assert run.merging.alpha > 0
    first = run.merging.interval_steps
    assert first < min(run.merging.decay_steps, run.run.rounds * run.round.local_steps)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.round=3", "unknown key run.round; did you mean run.rounds?"),
        ("modle.hidden_size=1", "unknown key modle; did you mean model?"),
        ("round.lr=1", "did you mean optimizer.lr?"),
        ("wire.shard=fp32", "did you mean wire.shared?"),
        ("zzz.q=1", "valid keys: run, model, data"),
        ("run.qqqqqqqq=1", "valid keys: run.name, run.seed, run.rounds, run.peers"),
        ("run.rounds=many", "run.rounds = 'many': input should be a valid integer"),
        ("run.rounds=2.5", "run.rounds = 2.5: input should be a valid integer"),
        ("run.rounds=0", "run.rounds = 0: input should be greater than 0"),
        ("run.rounds=true", "run.rounds = True: input should be a valid integer"),
        ("run.name='a b'", "run.name = 'a b'"),
        ("run.name=3", "run.name = 3: input should be a valid string"),
        ("run.seed=1979-05-27", "run.seed = '1979-05-27'"),
        ("train.compute=fp8", "train.compute = 'fp8': input should be 'fp32' or 'bf16'"),
        ("data.mode=ours", "input should be 'common' or 'own'"),
        ("model.norm_topk_prob=1", "input should be a valid boolean"),
        ("optimizer.lr=0", "optimizer.lr = 0: input should be greater than 0"),
        ("optimizer.lr=nan", "optimizer.lr = nan: input should be a finite number"),
        ("optimizer.weight_decay=inf", "input should be a finite number"),
        ("optimizer.betas=[0.9]", "optimizer.betas[1] is missing"),
        ("optimizer.betas=[0.9, 1.5]", "optimizer.betas[1] = 1.5: input should be less than"),
        ("merging.alpha=-0.1", "merging.alpha = -0.1"),
        ("phases.until_tokens=1", "phases = {'until_tokens': 1}: input should be a valid array"),
        # cross-checks, each with its reason
        ("model.hidden_size=130", "is not a multiple of num_attention_heads 4; set head_dim"),
        ("model.head_dim=31", "31 is odd; rotary embeddings need pairs"),
        ("model.num_key_value_heads=3", "3 does not divide num_attention_heads 4"),
        ("model.num_experts_per_tok=9", "model.num_experts_per_tok: 9 exceeds num_experts 8"),
        ("model.vocab_size=256", "256 bytes and two specials, at least 258"),
        ("merging.interval_steps=70", "70 is not a multiple of the local steps 50"),
        ("round.shared_every=2", "round.shared_every: needs round.stagger = true, or most rounds"),
        ("round.shared_every=65", "round.shared_every = 65: input should be less than or equal"),
        ("merging.top_k=8", "8 must be below model.num_experts 8, since an expert does not"),
        ("train.batch_tokens=100", "100 is not a multiple of a micro-batch of 8 x 64 tokens"),
        ("routing.bias_update_rate=0.01", "needs model.scoring_func = sigmoid; no decoder of"),
        ("routing.capacity_factor=0", "routing.capacity_factor = 0: input should be greater"),
        ("routing.balance_factor=0", "routing.balance_factor = 0: input should be greater"),
        ('wire.experts_coding="int8"', "should be 'none', 'bf16', 'b2' or 'b1'"),
        ("outer.momentum=128", "unknown key outer"),
        ("optimizer.lr=1e9", "lr = 1000000000.0: input should be less than or equal to 1"),
        ("ownership.owners_per_expert=50", "50 owners are more than run.peers 4"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(override: str, words: str) -> None:
    message = refusal(override)
    assert message.startswith("command line: ")
    assert words in message
    assert "\n" not in message and "pydantic" not in message


def test_experts_that_share_no_token_cannot_be_compared() -> None:
    message = refusal("model.num_experts_per_tok=1", "loss.similarity_weight=0.1")
    assert "loss.similarity_weight: compares experts that get the same token" in message


def test_a_head_of_one_expert_cannot_be_renormalised() -> None:
    message = refusal("model.num_experts_per_tok=1", "model.norm_topk_prob=true")
    assert "the router gets no gradient" in message


def test_a_sigmoid_router_needs_an_architecture_to_be_exported_as() -> None:
    message = refusal("model.scoring_func=sigmoid", "model.qk_norm=projection")
    assert "scoring_func: sigmoid needs qk_norm = head, since no architecture" in message
    one = refusal(
        "model.scoring_func=sigmoid", "model.num_experts_per_tok=1", "model.norm_topk_prob=true"
    )
    assert "the router gets no gradient" in one
    message = refusal("model.scoring_func=sigmoid", "model.qk_norm=none")
    assert "no architecture of Transformers has attention without QK-norm, a" in message
    message = refusal("model.norm_topk_prob=false", "model.qk_norm=none")
    assert "norm_topk_prob: qk_norm = none exports as Mixtral, which always renorm" in message


def test_olmoe_heads_divide_the_hidden_size() -> None:
    message = refusal("model.qk_norm=projection", "model.head_dim=64")
    assert "OLMoE" in message and "head_dim" in message


def test_merging_is_checked_only_when_it_is_on() -> None:
    assert demo("merging.alpha=0", "merging.interval_steps=70").merging.alpha == 0


PHASE = "[[phases]]\nuntil_tokens = {}\nlocal_steps = 50\nbatch_tokens = 512\n"
SCHEDULED = DEMO.replace("[optimizer]", "[optimizer]\nschedule_steps = 400")


def phased(*until: int) -> str:
    return SCHEDULED + "".join(PHASE.format(tokens) for tokens in until)


def test_phases_hold_until_their_tokens() -> None:
    run = demo(text=phased(1000, 3000))
    assert [run.phase_at(tokens).until_tokens for tokens in (0, 999, 1000, 2999)] == [
        1000,
        1000,
        3000,
        3000,
    ]
    assert run.phase_at(3000).local_steps == run.round.local_steps


def test_wrong_phases_are_refused() -> None:
    assert "must rise strictly, is [3000, 1000]" in refusal(text=phased(3000, 1000))
    assert "must rise strictly" in refusal(text=phased(1000, 1000))
    wrong_key = phased(1000).replace("until_tokens", "until_token")
    assert "unknown key phases[0].until_token; did you mean phases.until_tokens?" in refusal(
        text=wrong_key
    )
    unscheduled = DEMO + PHASE.format(1000)
    assert "optimizer.schedule_steps: is needed with phases" in refusal(text=unscheduled)
    assert "not a multiple of the local steps 30" in refusal(
        text=phased(1000).replace("local_steps = 50\nbatch", "local_steps = 30\nbatch")
    )
    assert "phases.batch_tokens: 500" in refusal(
        text=phased(1000).replace("batch_tokens = 512\n", "batch_tokens = 500\n")
    )


def test_rounds_of_a_given_time_have_no_phases_and_merge_at_any_interval() -> None:
    assert "round.seconds: cannot be combined with phases" in refusal(
        "round.seconds=60", text=phased(1000)
    )
    assert "not a multiple of the local steps" in refusal("merging.interval_steps=70")
    steps = "optimizer.schedule_steps=400"
    assert demo("round.seconds=60", "merging.interval_steps=70", steps).schedule_steps == 400
    assert "schedule_steps: is needed with round.seconds" in refusal("round.seconds=60")
    assert "round.seconds" in refusal("round.seconds=0")


def test_a_missing_setting_is_named() -> None:
    text = "\n".join(line for line in DEMO.splitlines() if not line.startswith("rounds"))
    assert "demo.toml: run.rounds is missing" in refusal(text=text)
    with pytest.raises(ConfigError, match=r"x: model is missing; it has model\.vocab_size, "):
        parse_config(RunConfig, "[run]\nname = 'x'\nrounds = 1\n", source="x")


def test_text_that_is_no_toml_is_refused_with_its_place() -> None:
    assert "demo.toml: not valid TOML" in refusal(text="[run\n")
    assert "line 2" in refusal(text="a = 1\nb\n")


@given(st.text(max_size=60))
def test_any_text_gives_a_configuration_or_a_config_error(text: str) -> None:
    try:
        parse_config(PeerConfig, text, source="x")
    except ConfigError as error:
        assert str(error).startswith("x: ")


# ---------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("override", "parsed"),
    [
        ("run.rounds=8", ("run", "rounds", 8)),
        (" run.rounds = 8 ", ("run", "rounds", 8)),
        ("round.local-steps=5", ("round", "local_steps", 5)),
        ("optimizer.betas=[0.9, 0.99]", ("optimizer", "betas", [0.9, 0.99])),
        ("train.compute=bf16", ("train", "compute", "bf16")),
        ('train.compute="bf16"', ("train", "compute", "bf16")),
        ("run.name=a=b", ("run", "name", "a=b")),
        ("corpus.folder=/data/my text", ("corpus", "folder", "/data/my text")),
        ("network.client_mode=true", ("network", "client_mode", True)),
    ],
)
def test_an_override_is_toml_or_a_bare_word(override: str, parsed: tuple[str, str, Any]) -> None:
    assert parse_override(override) == parsed


@pytest.mark.parametrize("override", ["run.rounds", "rounds=3", "a.b.c=1", ".x=1", "run.=1", "="])
def test_an_override_of_another_form_is_refused_with_an_example(override: str) -> None:
    with pytest.raises(ConfigError, match=r"expected section\.field=value, as run\.rounds=8"):
        parse_override(override)


def test_a_later_override_wins_over_an_earlier_and_both_over_the_file() -> None:
    assert demo().run.rounds != 3
    assert demo("run.rounds=2", "run.rounds=3").run.rounds == 3
    assert demo("ownership.owners_per_expert=2").ownership.owners_per_expert == 2


# ---------------------------------------------------------------- values


def test_the_same_settings_have_one_fingerprint_however_they_were_written() -> None:
    plain = demo()
    assert demo("loss.balance_weight=0.01").fingerprint() == plain.fingerprint()
    assert demo("run.rounds=9").fingerprint() != plain.fingerprint()
    again = RunConfig.model_validate_json(plain.canonical_json())
    assert again == plain and again.canonical_json() == plain.canonical_json()
    assert json.loads(plain.canonical_json())["run"]["name"] == "demo"


def test_every_setting_is_in_the_canonical_form_also_at_its_default() -> None:
    written = {
        f"{section}.{key}"
        for section, values in json.loads(demo().canonical_json()).items()
        if isinstance(values, dict)
        for key in values
    }
    assert written == {key for key in valid_keys(RunConfig) if not key.startswith("phases")}


@pytest.mark.parametrize("other", ['wire.experts_coding="b1"', "data.attention=document"])
def test_a_setting_that_differs_changes_the_fingerprint(other: str) -> None:
    changed = demo(other)
    assert changed.fingerprint() != demo().fingerprint()
    assert RunConfig.model_validate_json(changed.canonical_json()) == changed


def test_integers_and_reals_of_one_value_have_one_fingerprint() -> None:
    assert demo("optimizer.lr=1").fingerprint() == demo("optimizer.lr=1.0").fingerprint()


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        demo().run.rounds = 3  # type: ignore[misc]


def test_defaults_follow_from_other_settings() -> None:
    run = demo()
    assert run.model.dim_per_head == run.model.hidden_size // run.model.num_attention_heads
    assert demo("model.head_dim=64").model.dim_per_head == 64
    assert run.schedule_steps == run.run.rounds * run.round.local_steps
    assert demo("optimizer.schedule_steps=7").schedule_steps == 7


def test_all_keys_are_listed_with_their_sections() -> None:
    keys = valid_keys(RunConfig)
    assert {"run.rounds", "phases.until_tokens", "wire.part_bytes"} <= set(keys)
    assert len(set(keys)) == len(keys)
    assert "network.initial_peers" in valid_keys(PeerConfig)


def test_plain_values_and_text_give_the_same() -> None:
    assert validate_config(RunConfig, demo().model_dump(mode="json"), source="x") == demo()


def test_a_wrong_file_is_not_blamed_on_an_override() -> None:
    wrong = DEMO.replace("rounds = 8", "rounds = 'eight'")
    assert refusal("run.seed=1", text=wrong).startswith("demo.toml: run.rounds = 'eight': ")
