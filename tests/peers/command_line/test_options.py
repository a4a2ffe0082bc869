"""Flags, environment, files and defaults: precedence, and errors."""

import importlib
import json
import tomllib
from collections.abc import Callable
from dataclasses import fields
from io import StringIO
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from peers.command_line.option_values import as_toml, invitation_text
from peers.command_line.options import OPTIONS, Options, Program, flags_of, options, program
from peers.peer import main as peer_main
from swarm import errors
from swarm.config import PeerConfig, RunConfig, parse_config, valid_keys
from swarm.errors import ConfigError, NobodyReachable
from swarm.run_files import PAGES, read_text

RUNS = Path(__file__).parents[3] / "configs" / "runs"
DEMO = str(RUNS / "demo.toml")
PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"

Call = Callable[..., Options]


@pytest.fixture
def given() -> Call:
    """Runs a program that takes every option, and returns their values."""

    def call(*args: str, **environment: str) -> Options:
        found: list[Options] = []

        @program("swarm-test")
        @options(*OPTIONS)
        def main(common: Options) -> None:
            found.append(common)

        result = CliRunner().invoke(main, args, env=environment)
        assert result.exit_code == 0, result.output
        return found[0]

    return call


def failing(error: Exception) -> Program:
    @program("swarm-test")
    @options("rounds", "settings", "run", "initial_peers")
    def main(common: Options) -> None:
        if common.run:
            common.run_config()
        raise error

    return main


def run_failing(*args: str, error: Exception | None = None) -> Result:
    return CliRunner().invoke(failing(error or NobodyReachable("no peer answers")), args)


# ---------------------------------------------------------------- precedence


def test_a_flag_wins_over_the_environment_that_wins_over_the_file_that_wins_over_the_default(
    given: Call, tmp_path: Path
) -> None:
    file = tmp_path / "peer.toml"
    file.write_text("[peer]\ncapacity = 3.0\nname = 'from-file'\n")
    config = ["--config", str(file)]
    assert given().peer_config().peer.capacity == 1.0
    assert given(*config).peer_config().peer.capacity == 3.0
    assert given(*config, SWARM_CAPACITY="4").peer_config().peer.capacity == 4.0
    chosen = given(*config, "--capacity", "5", SWARM_CAPACITY="4").peer_config()
    assert (chosen.peer.capacity, chosen.peer.name) == (5.0, "from-file")


def test_set_wins_over_the_environment_and_the_named_flag_over_set(given: Call) -> None:
    run = ("--run", DEMO)
    assert given(*run, "--set", "run.rounds=3", SWARM_ROUNDS="4").run_config().run.rounds == 3
    assert given(*run, "--set", "run.rounds=3", "--rounds", "5").run_config().run.rounds == 5
    assert given(*run, "--rounds", "5", SWARM_SET="run.rounds=3").run_config().run.rounds == 5
    both = given(*run, SWARM_SET="run.seed=7;run.rounds=3", SWARM_ROUNDS="4").run_config()
    assert (both.run.seed, both.run.rounds) == (7, 4)


@pytest.mark.parametrize("field", sorted(OPTIONS))
def test_every_option_has_its_environment_twin(field: str) -> None:
    @click.command()
    @OPTIONS[field]
    def main() -> None:
        """Takes one option."""

    (parameter,) = main.params
    flag = max(parameter.opts, key=len)
    assert parameter.envvar == "SWARM_" + flag.removeprefix("--").replace("-", "_").upper()
    assert parameter.name == field


def test_dash_and_underscore_are_the_same(given: Call) -> None:
    assert given("--state_dir", "x").state_dir == given("--state-dir", "x").state_dir
    assert given("--initial_peers", "a_b", "c_d").initial_peers == ("a_b", "c_d")


def test_rounds_is_a_setting_of_the_run(given: Call) -> None:
    asked = given("--rounds", "5", "--set", "peer.capacity=2", "--set", "run.seed=1")
    assert asked.run_settings() == ("run.seed=1", "run.rounds=5")
    assert asked.asked_of_run() == {"run.seed": 1, "run.rounds": 5}
    assert asked.peer_config().peer.capacity == 2.0


def test_a_tokenizer_sets_the_key(given: Call, tmp_path: Path) -> None:
    assert given("--run", DEMO).run_config().data.tokenizer == "byte"
    named = given("--run", DEMO, "--tokenizer", str(tmp_path))
    assert named.tokenizer == tmp_path and named.run_config().data.tokenizer == "file"
    assert named.asked_of_run() == {"data.tokenizer": "file"}


def test_a_checkpoint_sets_the_key_and_is_for_founders_alone(given: Call, tmp_path: Path) -> None:
    assert given("--run", DEMO).run_config().run.initial == "seed"
    named = given("--run", DEMO, "--initialise-from", str(tmp_path))
    assert named.initialise_from == tmp_path and named.run_config().run.initial == "given"
    joining = CliRunner().invoke(peer_main, ["--initial-peers", "/ip4/1", "--initialise-from", "d"])
    assert joining.exit_code == 2 and "takes --run too" in joining.output


def test_caps_and_quotas_are_written_with_units(given: Call) -> None:
    network = given("--max-upload", "20mbit", SWARM_MAX_DOWNLOAD="1gbit").peer_config().network
    assert (network.max_upload_mbit, network.max_download_mbit) == (20.0, 1000.0)
    assert network.data_quota_gb is None
    assert given("--data-quota", "1.5TB").peer_config().network.data_quota_gb == 1500.0


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--max-upload", "20", "it has no unit: write 20mbit"),
        ("--max-download", "20MB/s", "if you mean bytes, write 160mbit"),
        ("--data-quota", "200", "write it as 200GB"),
        ("--max-upload", "0.5mbit", "network.max_upload_mbit = 0.5"),
    ],
)
def test_a_cap_that_could_mean_two_things_or_stops_a_peer_is_refused(
    flag: str, value: str, words: str
) -> None:
    result = CliRunner().invoke(peer_main, ["--print-config", "machine", flag, value])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


# ---------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    "args",
    [
        ("--initial-peers", "A", "B", "C"),
        ("--initial-peers", "A,B", "C"),
        ("--initial-peers", "A B C"),
        ("--initial-peers=A", "B", "--initial-peers", "C"),
        ("--initial-peers", "A", "--rounds", "3", "--initial-peers", "B", "C"),
    ],
)
def test_several_addresses_are_given_in_any_common_way(given: Call, args: tuple[str, ...]) -> None:
    assert given(*args).initial_peers == ("A", "B", "C")


def test_addresses_come_from_a_file_or_the_environment(given: Call, tmp_path: Path) -> None:
    file = tmp_path / "peers.txt"
    file.write_text("A # the first\n\n# none here\nB C\n")
    assert given("--initial-peers", f"@{file}", "D").initial_peers == ("A", "B", "C", "D")
    assert given(SWARM_INITIAL_PEERS="A,B C").initial_peers == ("A", "B", "C")
    assert given(SWARM_INITIAL_PEERS=f"D,@{file} E").initial_peers == ("D", "A", "B", "C", "E")
    network = given("--host-maddrs", "/ip4/1.2.3.4/tcp/5", "--client-mode").peer_config().network
    assert network.host_maddrs == ("/ip4/1.2.3.4/tcp/5",) and network.client_mode


def test_a_flag_without_its_address_is_an_error() -> None:
    assert run_failing("--initial-peers", "--rounds", "3").exit_code == 2


# ---------------------------------------------------------------- errors


def test_an_error_is_one_line_on_stderr_with_its_exit_code() -> None:
    result = run_failing(error=NobodyReachable("no peer\nanswers", hint="wait"))
    assert result.exit_code == NobodyReachable.exit_code
    assert result.stdout == ""
    assert result.stderr == "swarm-test: error: no peer answers (wait)\n"


PROMISED = {
    errors.ConfigError: 2,
    errors.NobodyReachable: 3,
    errors.DataError: 4,
    errors.TrainingDiverged: 5,
    errors.StateError: 6,
    errors.RunMismatch: 7,
    errors.HostileInput: 8,
    errors.NetworkDown: 9,
    errors.LinkTooSlow: 10,
    errors.OutOfMemory: 11,
    errors.DoesNotFit: 12,
    errors.InvitationError: 13,
    errors.DataQuotaSpent: 14,
    errors.WorkersFailed: 15,
}
"""Exit codes that scripts rely on. All subclasses of each error have the same code."""


def test_a_program_ends_with_the_promised_exit_code_of_each_error() -> None:
    branches = {e for e in errors.SwarmError.__subclasses__() if e.__module__ == errors.__name__}
    assert PROMISED.keys() == branches
    for kind, code in {errors.SwarmError: 1, **PROMISED}.items():
        words = ("a_reason", "why") if kind is errors.HostileInput else ("why",)
        result = run_failing(error=kind(*words))
        assert (result.exit_code, result.stderr) == (code, "swarm-test: error: why\n"), kind


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--rouns", "3"), "--rounds"),
        (("--rounds", "0"), "0 is not in the range x>=1"),
        (("--set", "rounds=3", "--run", DEMO), "expected section.field=value"),
        (("--set", "rnd.local_steps=3", "--run", DEMO), "did you mean round.local_steps?"),
        (("--set", "run.round=3", "--run", DEMO), "did you mean run.rounds?"),
        (("--set", "run.rounds=x", "--run", DEMO), "error: command line: run.rounds = 'x'"),
        (("--run", str(RUNS / "dmeo.toml")), f"did you mean {DEMO}?"),
        (("--run", "/no/such/file.toml"), "/no/such/file.toml: No such file"),
        (("--run", str(RUNS)), "Is a directory\n"),
        (("--initial-peers", "@/no/such"), "/no/such: No such file"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_one_helpful_line(
    args: tuple[str, ...], words: str
) -> None:
    result = run_failing(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith("swarm-test: error: ") and result.stderr.count("\n") == 1
    assert words in result.stderr


def test_a_bug_is_not_disguised_as_an_error_of_the_user() -> None:
    assert isinstance(run_failing(error=ZeroDivisionError("bug")).exception, ZeroDivisionError)


def test_an_interrupt_ends_with_130() -> None:
    interrupted = KeyboardInterrupt()

    @program("swarm-test")
    def main() -> None:
        """Is interrupted."""
        raise interrupted

    assert CliRunner().invoke(main).exit_code == 130


def test_a_missing_run_file_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"--run is missing .*--run demo"):
        Options().run_config()


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file"):
        read_text(file)


# ---------------------------------------------------------------- printing


@pytest.mark.parametrize("path", sorted(RUNS.glob("*.toml")), ids=lambda path: path.stem)
def test_a_printed_run_configuration_reads_back_as_itself(path: Path) -> None:
    run = parse_config(RunConfig, path.read_text(), source=str(path))
    assert parse_config(RunConfig, as_toml(run), source="printed") == run


def test_a_printed_machine_reads_back_as_itself() -> None:
    values = {"network": {"initial_peers": ['a"b', "c\\d"]}, "corpus": {"folder": "/x y\n"}}
    config = PeerConfig.model_validate_json(json.dumps(values))
    assert parse_config(PeerConfig, as_toml(config), source="printed") == config
    with_run = as_toml(parse_config(RunConfig, Path(DEMO).read_text(), source="x"), config)
    assert "[run]" in with_run and "[network]" in with_run


def test_each_flag_of_a_setting_names_one_that_there_is_and_belongs_to_one_configuration() -> None:
    known = {*valid_keys(RunConfig), *valid_keys(PeerConfig)}
    sets = {each.name: each.metadata["sets"] for each in fields(Options) if each.metadata}
    settings = {name: setting for name, setting in sets.items() if setting}
    assert set(settings.values()) <= known
    assert len(set(settings.values())) == len(settings), "one flag a setting"
    of_runs, of_peers = flags_of(RunConfig), flags_of(PeerConfig)
    assert of_runs == ("rounds", "peers")
    assert {*of_runs, *of_peers} == settings.keys()


def test_the_files_that_come_with_swarm_are_options_by_their_names(given: Call) -> None:
    assert given("--run", "demo").run_config().run.name == "demo"
    assert given("--config", "gpu").peer_config().compute.device == "cuda"


def test_gpus_are_a_number_or_all(given: Call) -> None:
    assert given().peer_config().compute.parallel == "off"
    assert given("--gpus", "2").peer_config().compute.parallel == 2
    assert given("--gpus", "all").peer_config().compute.parallel == "all"
    assert given(SWARM_GPUS="3").peer_config().compute.parallel == 3
    for wrong in ("0", "none", "-1"):
        result = CliRunner().invoke(peer_main, ["--gpus", wrong])
        assert result.exit_code == 2
        assert "is no number of GPUs" in result.output


# ---------------------------------------------------------------- short forms, help


@pytest.mark.parametrize(
    ("words", "listens", "announces"),
    [
        (["--port", "31330"], ("/ip4/0.0.0.0/tcp/31330",), ()),
        (
            ["--port", "31330", "--public-ip", "203.0.113.7"],
            ("/ip4/0.0.0.0/tcp/31330",),
            ("/ip4/203.0.113.7/tcp/31330",),
        ),
        (
            ["--port", "31330", "--public-ip", "2001:DB8::7"],
            ("/ip4/0.0.0.0/tcp/31330", "/ip6/::/tcp/31330"),
            ("/ip6/2001:db8::7/tcp/31330",),
        ),
    ],
)
def test_a_port_and_a_public_address_stand_for_the_addresses_to_listen_on_and_to_announce(
    given: Call, words: list[str], listens: tuple[str, ...], announces: tuple[str, ...]
) -> None:
    network = given(*words).peer_config().network
    assert (network.host_maddrs, network.announce_maddrs) == (listens, announces)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--port", "1", "--host-maddrs", "/ip4/0.0.0.0/tcp/1"], "--port and --host-maddrs"),
        (["--public-ip", "203.0.113.7"], "without a port"),
        (
            [
                *("--port", "1", "--public-ip", "203.0.113.7"),
                *("--announce-maddrs", "/ip4/203.0.113.7/tcp/1"),
            ],
            "--public-ip and --announce-maddrs",
        ),
    ],
)
def test_short_and_long_forms_do_not_go_together(
    given: Call, words: list[str], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        given(*words).peer_config()


def test_a_founder_of_a_run_for_two_peers_waits_for_two(given: Call) -> None:
    assert given("--run", DEMO, "--peers", "2").peer_config().peer.wait_for_peers == 2
    both = given("--run", DEMO, "--peers", "4", "--wait-for-peers", "2")
    assert both.peer_config().peer.wait_for_peers == 2
    assert given("--peers", "2").peer_config().peer.wait_for_peers == 1


@pytest.mark.parametrize(("kind", "flag"), [("run", "--run"), ("machine", "--config")])
def test_printed_settings_are_taken_back_by_the_option_for_such_files(
    given: Call, tmp_path: Path, kind: str, flag: str
) -> None:
    words = ["--run", DEMO, "--set", "run.rounds=3", "--capacity", "2.5"]
    printed = CliRunner().invoke(
        peer_main, [*words, "--state-dir", str(tmp_path), "--print-config", kind]
    )
    assert printed.exit_code == 0, printed.output
    file = tmp_path / "printed.toml"
    file.write_text(printed.output)
    before, after = given(*words), given(flag, str(file))
    if kind == "run":
        assert after.run_config() == before.run_config()
    else:
        assert after.peer_config() == before.peer_config()


PROGRAMS = sorted(tomllib.loads(PYPROJECT.read_text())["project"]["scripts"].items())


def commands_of(command: click.Command) -> list[click.Command]:
    """A program and its subcommands."""
    below = command.commands.values() if isinstance(command, click.Group) else ()
    return [command, *(found for each in below for found in commands_of(each))]


@pytest.mark.parametrize(("name", "place"), PROGRAMS, ids=[name for name, _ in PROGRAMS])
def test_the_help_of_each_program_fits_a_terminal_and_names_no_variable_at_each_option(
    name: str, place: str
) -> None:
    module, _, function = place.partition(":")
    found = getattr(importlib.import_module(module), function)
    for command in commands_of(found if isinstance(found, click.Command) else peer_main):
        context = click.Context(command, info_name=name, terminal_width=80)
        text = command.get_help(context).replace(f"Pages are in {PAGES}", "")  # never cut
        assert [line for line in text.splitlines() if len(line) > 80] == []
        assert "env var" not in text
        for below in getattr(command, "commands", {}):
            assert f"  {below} " in text
        if any(parameter.envvar for parameter in command.params):
            assert " is SWARM_" in " ".join(text.split())


def test_the_options_of_a_peer_are_in_groups_and_show_their_defaults() -> None:
    text = CliRunner().invoke(peer_main, ["--help"]).output
    headings = [line for line in text.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings == [
        "Run:", "Text and weights:", "This machine:", "Network:", "Compute:", "Output:", "Other:"
    ]  # fmt: skip
    folded = " ".join(text.split())
    for default in ("[default: 120]", "[default: yes]", "[default: auto]"):
        assert default in folded
    assert "--state-dir is SWARM_STATE_DIR" in folded or "--run is SWARM_RUN" in folded


ANSWERS = {
    "which ports must be open": "on the next one for blobs: open both in the firewall",
    "what if I cannot open one": "no port has to be open here",
    "how do I limit the upload": "Send no faster than this rate, such as 20mbit",
    "where is what it keeps, how much disk is that": "swarm-plan says how much disk it takes",
    "how do I resume, what if I stop it": "the same command resumes, also after a kill -9",
    "how do I train on a GPU, and which": "CUDA_VISIBLE_DEVICES=1 chooses which",
    "how do I cap memory": "compute.host_memory_gb=16 and compute.device_memory_gb=8 cap",
    "how do I start from a checkpoint": "upcycle config makes the run file",
    "how do I train fewer experts": "0.5 is half as many",
    "how do I wait for friends": "The founder starts once this many peers are there",
}


def test_the_help_alone_answers_what_strangers_ask() -> None:
    text = " ".join(CliRunner().invoke(peer_main, ["--help"]).output.split())
    assert {question for question, answer in ANSWERS.items() if answer not in text} == set()


def test_each_common_option_has_a_group() -> None:
    assert set(OPTIONS) == {each.name for each in fields(Options) if each.metadata}


def test_an_invitation_may_come_from_a_file_or_standard_input(
    given: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other users of a machine can see command lines."""
    path = tmp_path / "line"
    path.write_text("swarm-invitation-x\n")
    assert given("--invitation", f"@{path}").invitation == "swarm-invitation-x"
    monkeypatch.setattr("sys.stdin", StringIO("swarm-invitation-y\n"))
    nothing: Any = None
    assert invitation_text(nothing, nothing, "-") == "swarm-invitation-y"
    assert given("--invitation", "swarm-invitation-z").invitation == "swarm-invitation-z"
    assert given("--open-gathering").peer_config().peer.open_gathering
    assert not given().peer_config().peer.open_gathering
