"""The options that all programs share: flags, environment variables, files, errors, logging.

Precedence: flag, then environment (SWARM_...), then file, then default. `-` and `_` are the same
in a flag. An error is one line on stderr and an exit code of its own (see swarm/errors.py).
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import click

from peers.command_line import option_values
from peers.command_line.command import LOG_FORMATS, LOG_LEVELS, GroupedOption, configure_logging
from peers.command_line.command import Program as Program
from peers.command_line.command import program as program
from peers.command_line.command import version_option as version_option
from swarm.config import COMMAND_LINE, PeerConfig, RunConfig, parse_config, parse_override
from swarm.errors import ConfigError
from swarm.run_files import read_text


def option(flag: str, **attributes: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A click option that the environment variable SWARM_FLAG also sets."""
    twin = "SWARM_" + flag.split("/")[0].removeprefix("--").replace("-", "_").upper()
    names = [flag, attributes.pop("dest")] if "dest" in attributes else [flag]
    return click.option(*names, cls=GroupedOption, envvar=twin, **attributes)


def _flag(flag: str, text: str, *, sets: str = "", **attributes: Any) -> Any:
    """A field of `Options`, which a flag or its environment variable sets.

    Args:
        flag: the flag as on the command line.
        text: help text. The setting's default is added unless the text mentions a default.
        sets: the setting that the flag replaces in a configuration, as `section.field`.
        attributes: attributes of the click option. `default` is also the field's default.
    """
    default = attributes.get("default", () if attributes.get("multiple") else None)
    shown = _shown_default(sets)
    if shown and "default" not in text:
        text = f"{text}  [default: {shown}]"
    declared = {"flag": flag, "sets": sets, "attributes": {"help": text, **attributes}}
    return field(default=default, metadata=declared)


def _shown_default(sets: str) -> str:
    """The default of a machine's setting as the help text shows it. Empty if there is none."""
    section, _, name = sets.partition(".")
    if section not in PeerConfig.model_fields:
        return ""
    default = getattr(getattr(PeerConfig(), section), name)
    if isinstance(default, bool):
        return "yes" if default else "no"
    if isinstance(default, tuple):
        return " ".join(default)
    return f"{default:g}" if isinstance(default, int | float) and default else str(default or "")


def _addresses(flag: str, text: str, *, sets: str) -> Any:
    several = {"metavar": "ADDRESS...", "multiple": True, "callback": option_values.split_addresses}
    return _flag(flag, text, sets=sets, **several)


def _path(flag: str, text: str, **more: Any) -> Any:
    return _flag(flag, text, type=click.Path(path_type=Path), **more)


_POSITIVE = click.IntRange(min=1)


@dataclass(frozen=True)
class Options:
    """The given options, from command line and environment. None or () if not given.

    Each flag is declared only here. Programs name the fields that they take.
    """

    run: Path | None = _path(
        "--run", "A run file, or a name such as demo.", callback=option_values.file_of("runs")
    )
    config: Path | None = _path(
        "--config",
        "Configuration file of this machine, or a name such as laptop.",
        callback=option_values.file_of("peers"),
    )
    state_dir: Path = _path(
        "--state-dir",
        "Folder for this peer's key, model and training state. Each peer needs its own. swarm-plan "
        "says how much disk it takes.",
        default=Path("~/.swarm/default"),
    )
    rounds: int | None = _flag(
        "--rounds",
        "Rounds of the run; the same as --set run.rounds=N.",
        sets="run.rounds",
        type=_POSITIVE,
    )
    peers: int | None = _flag(
        "--peers",
        "Number of peers that the run is planned for. The founder waits for them, unless "
        "--wait-for-peers names another number.",
        sets="run.peers",
        type=_POSITIVE,
    )
    settings: tuple[str, ...] = _flag(
        "--set",
        "Change one setting of the run or of this machine, such as train.batch_tokens=4096. "
        "--print-config lists all. compute.host_memory_gb=16 and compute.device_memory_gb=8 cap "
        "this machine's memory.",
        type=option_values.Setting(),
        multiple=True,
    )
    as_json: bool = _flag("--json", "Print JSON, for programs.", is_flag=True, default=False)
    print_config: str | None = _flag(
        "--print-config",
        "Print the settings in effect, as a file for --run or for --config, and exit.",
        type=click.Choice(["run", "machine"]),
    )
    log_format: str = _flag(
        "--log-format",
        "Form of log lines. auto: colors on a terminal, plain lines elsewhere.",
        type=click.Choice(LOG_FORMATS),
        default="auto",
    )
    log_level: str | None = _flag(
        "--log-level",
        "Lowest severity of the log lines that are shown.",
        type=click.Choice(LOG_LEVELS),
        default=None,
    )
    initial_peers: tuple[str, ...] = _addresses(
        "--initial-peers",
        "Addresses of peers in the run. Several may be given, or @FILE with one address a line.",
        sets="network.initial_peers",
    )
    port: int | None = _flag(
        "--port",
        "Listen on this TCP port, and on the next one for blobs: open both in the firewall.",
        type=click.IntRange(1, 65_534),
    )
    public_ip: str | None = _flag(
        "--public-ip",
        "Address at which others reach --port, if it is not this machine's own: that of a router "
        "that forwards the port, or the public one of a cloud machine.",
        metavar="ADDRESS",
        callback=option_values.ip_of,
    )
    host_maddrs: tuple[str, ...] = _addresses(
        "--host-maddrs",
        "Multiaddresses to listen on, in place of --port.",
        sets="network.host_maddrs",
    )
    announce_maddrs: tuple[str, ...] = _addresses(
        "--announce-maddrs",
        "Multiaddresses that others should dial, in place of --public-ip.",
        sets="network.announce_maddrs",
    )
    identity_path: str | None = _flag(
        "--identity-path",
        "File with this peer's key; by default in --state-dir. Later starts use the same file.",
        sets="network.identity_path",
    )
    client_mode: bool | None = _flag(
        "--client-mode/--no-client-mode",
        "Only dial out, do not listen: no port has to be open here.",
        sets="network.client_mode",
        default=None,
    )
    relay: bool | None = _flag(
        "--relay/--no-relay",
        "Pass messages and blobs on between peers that cannot dial each other.",
        sets="network.relay",
        default=None,
    )
    direct: bool | None = _flag(
        "--direct/--no-direct",
        "Send blobs over separate TCP connections, unencrypted.",
        sets="network.direct",
        default=None,
    )
    direct_port: int | None = _flag(
        "--direct-port",
        "TCP port for blobs; by default the port after that of --host-maddrs or --port.",
        sets="network.direct_port",
        type=click.IntRange(0, 65_535),
    )
    max_upload: float | None = _flag(
        "--max-upload",
        "Send no faster than this rate, such as 20mbit. By default nine tenths of the measured "
        "uplink if that is below 60 Mbit/s.",
        sets="network.max_upload_mbit",
        metavar="RATE",
        callback=option_values.rate_of,
    )
    max_download: float | None = _flag(
        "--max-download",
        "Receive no faster than this rate, such as 100mbit. There is no limit by default.",
        sets="network.max_download_mbit",
        metavar="RATE",
        callback=option_values.rate_of,
    )
    data_quota: float | None = _flag(
        "--data-quota",
        "Leave before the bytes of a calendar month, sent and received, exceed this: 200GB.",
        sets="network.data_quota_gb",
        metavar="SIZE",
        callback=option_values.gigabytes_of,
    )
    run_id: str | None = _flag("--run-id", "Id of the run, where there are several.")
    new_run: bool = _flag(
        "--new-run",
        "Found the run of --run even if --state-dir or --initial-peers belong to another run.",
        is_flag=True,
        default=False,
    )
    tip: str | None = _flag(
        "--tip",
        "Trust this manifest, one of the newest 64, as the starting point, instead of the run's "
        "first one.",
        metavar="HEIGHT:DIGEST",
        callback=option_values.head_digest,
    )
    invitation: str | None = _flag(
        "--invitation",
        "Invitation that swarm-invite or the founder printed. With it this peer votes at once. "
        "@FILE, or - for standard input, keeps the invitation out of the list of processes.",
        metavar="TEXT|@FILE|-",
        callback=option_values.invitation_text,
    )
    name: str | None = _flag("--name", "Display name of this peer.", sets="peer.name")
    capacity: float | None = _flag(
        "--capacity",
        "How many experts to own, compared with other peers: 0.5 is half as many. A peer never "
        "owns more than fit its memory.",
        sets="peer.capacity",
        type=float,
    )
    wait_for_peers: int | None = _flag(
        "--wait-for-peers",
        "The founder starts once this many peers are there, itself included. Others may join at "
        "any time.",
        sets="peer.wait_for_peers",
        type=int,
    )
    open_gathering: bool | None = _flag(
        "--open-gathering",
        "With --wait-for-peers, count the first peers that come, also those without the founder's "
        "invitation. A stranger among them votes for good.",
        sets="peer.open_gathering",
        is_flag=True,
        default=None,
    )
    linger: float | None = _flag(
        "--linger",
        "After the last round, serve until nobody has fetched for this many seconds.",
        sets="peer.linger_s",
        type=float,
    )
    leave_timeout: float | None = _flag(
        "--leave-timeout",
        "Seconds after Ctrl+C to finish the round and hand the experts over.",
        sets="peer.leave_timeout_s",
        type=float,
    )
    device: str | None = _flag(
        "--device",
        "cpu or cuda; auto takes a GPU if there is one. CUDA_VISIBLE_DEVICES=1 chooses which.",
        sets="compute.device",
        type=click.Choice(["auto", "cpu", "cuda"]),
    )
    threads: int | None = _flag(
        "--threads",
        "CPU threads of the model. By default the fastest number is measured.",
        sets="compute.threads",
        type=int,
    )
    engine: str | None = _flag(
        "--engine",
        "resident: the whole model is on the device. streaming: most of it is in host memory. "
        "auto takes the fastest that fits.",
        sets="compute.engine",
        type=click.Choice(["auto", "resident", "streaming"]),
    )
    gpus: int | str | None = _flag(
        "--gpus",
        "How many GPUs of this machine compute as one peer, or all; by default one.",
        sets="compute.parallel",
        metavar="N|all",
        callback=option_values.number_or_all,
    )
    workers_from: str | None = _flag(
        "--workers-from",
        "Accept workers of other machines, which run swarm-worker, at this address.",
        sets="compute.workers_from",
        metavar="HOST:PORT",
    )
    remote_workers: int | None = _flag(
        "--remote-workers",
        "How many workers of other machines to wait for, in addition to those of --gpus.",
        sets="compute.remote_workers",
        type=_POSITIVE,
    )
    bus: str | None = _flag(
        "--bus",
        "Connection between the GPUs of a machine; measured by default.",
        sets="compute.bus",
        type=click.Choice(["auto", "nvlink", "pcie"]),
    )
    between: float | None = _flag(
        "--between",
        "Rate between the machines of the workers, such as 25gbit.  [default: 10gbit]",
        sets="compute.between_gbit",
        metavar="RATE",
        callback=option_values.gbit_of,
    )
    key: str | None = _flag(
        "--key",
        "File with the key that swarm-worker and its peer share. By default the peer makes "
        "workers.key in its state folder.",
        sets="compute.workers_key",
        metavar="FILE",
    )
    gpu: str | None = _flag(
        "--gpu", "Plan for a GPU with this much memory, such as 24GB; 0 for none.", metavar="SIZE"
    )
    host: str | None = _flag(
        "--host", "Plan for this much host memory, such as 64GB.", metavar="SIZE"
    )
    disk: str | None = _flag(
        "--disk", "Plan for this much free disk, such as 500GB.", metavar="SIZE"
    )
    corpus: str | None = _flag(
        "--corpus",
        "Folder with the text to train on: .txt, .md, .py, .html, .json, .jsonl and .parquet "
        "files, or shards that swarm-data made. By default the folder of the last start, or the "
        "Python standard library.",
        sets="corpus.folder",
        metavar="FOLDER",
    )
    follow_links: bool | None = _flag(
        "--follow-links",
        "Follow links that lead out of the folder of text, and links to folders.",
        sets="corpus.follow_links",
        is_flag=True,
        default=None,
    )
    list_skipped: bool | None = _flag(
        "--list-skipped",
        "Name every file, line and row of text that is not read.",
        sets="corpus.list_skipped",
        is_flag=True,
        default=None,
    )
    tokenizer: Path | None = _path(
        "--tokenizer",
        "Folder with the tokenizer.json that a founder gives its run; sets data.tokenizer to file.",
    )
    initialise_from: Path | None = _path(
        "--initialise-from",
        "Checkpoint folder with the weights that a founder gives its run; sets run.initial to "
        "given. swarm-upcycle config makes the run file.",
    )
    tensorboard: Path | None = _path(
        "--tensorboard", "Folder to write losses into for TensorBoard."
    )
    from_environment: frozenset[str] = frozenset()
    """Fields with values from the environment, which any flag overrides."""

    founds: bool = False
    """Whether the program may found a run, since it has --wait-for-peers."""

    def run_settings(self) -> tuple[str, ...]:
        """Overrides of the run configuration: --set, --rounds, --peers and what a founder gives.

        Raises:
            ConfigError: a --set names a section of neither configuration.
        """
        is_file = ('data.tokenizer="file"',) if self.tokenizer else ()
        is_given = ('run.initial="given"',) if self.initialise_from else ()
        return (*self._overrides(RunConfig), *is_file, *is_given)

    def peer_settings(self) -> tuple[str, ...]:
        """Overrides of the peer configuration: --set of its sections and the flags for it.

        Raises:
            ConfigError: a --set names a section of neither configuration.
        """
        return self._overrides(PeerConfig)

    def asked_of_run(self) -> dict[str, Any]:
        """Values of all overridden `section.field`s. The run that a peer joins must have them."""
        parsed = (parse_override(setting) for setting in self.run_settings())
        return {f"{section}.{field}": value for section, field, value in parsed}

    def run_config(self) -> RunConfig:
        """The run configuration from --run and its overrides.

        Raises:
            ConfigError: --run or its file is missing, or a setting is wrong.
        """
        if self.run is None:
            raise ConfigError("--run is missing", hint="for example --run demo")
        text = read_text(self.run, "runs")
        return parse_config(RunConfig, text, source=str(self.run), overrides=self.run_settings())

    def peer_config(self) -> PeerConfig:
        """The configuration of this machine from --config, --set and the flags.

        Raises:
            ConfigError: the file is missing or a setting is wrong.
        """
        text = read_text(self.config, "peers") if self.config else ""
        source = str(self.config) if self.config else COMMAND_LINE
        return parse_config(PeerConfig, text, source=source, overrides=self.peer_settings())

    def _short_forms(self) -> list[tuple[str, str]]:
        """Settings behind --port, --public-ip and a founder's --peers, by the option's name.

        Raises:
            ConfigError: an option and its long form are both given, or --public-ip lacks a port.
        """
        if self.port and self.host_maddrs:
            raise ConfigError("--port and --host-maddrs say the same", hint="give one of them")
        if self.public_ip and self.announce_maddrs:
            raise ConfigError(
                "--public-ip and --announce-maddrs say the same", hint="give one of them"
            )
        if self.public_ip and not self.port:
            raise ConfigError(
                "--public-ip is given without a port", hint="add --port N, the port that is open"
            )
        found = []
        if self.founds and self.peers and self.run:
            found.append(("peers", f"peer.wait_for_peers={self.peers}"))
        if self.port:
            listen = [f"/ip4/0.0.0.0/tcp/{self.port}"]
            if self.public_ip and ":" in self.public_ip:
                listen.append(f"/ip6/::/tcp/{self.port}")
            found.append(("port", f"network.host_maddrs={option_values.toml_value(listen)}"))
        if self.public_ip:
            kind = "ip6" if ":" in self.public_ip else "ip4"
            address = f"/{kind}/{self.public_ip}/tcp/{self.port}"
            found.append(
                ("public_ip", f"network.announce_maddrs={option_values.toml_value([address])}")
            )
        return found

    def _overrides(self, kind: type[RunConfig | PeerConfig]) -> tuple[str, ...]:
        """Overrides in rising precedence: the environment's flags, --set, command-line flags."""
        flags: dict[bool, list[str]] = {True: [], False: []}
        if kind is PeerConfig:
            for name, setting in self._short_forms():
                flags[name in self.from_environment].append(setting)
        for name in flags_of(kind):
            value = getattr(self, name)
            if value not in (None, ()):
                setting = f"{_DECLARED[name]['sets']}={option_values.toml_value(value)}"
                flags[name in self.from_environment].append(setting)
        settings = _of_sections(self.settings, kind)
        if "settings" in self.from_environment:
            return (*settings, *flags[True], *flags[False])
        return (*flags[True], *settings, *flags[False])


_DECLARED = {each.name: each.metadata for each in fields(Options) if each.metadata}
_GROUPS = {
    "Run": "run initial_peers run_id invitation tip new_run peers wait_for_peers open_gathering "
    "rounds settings",
    "Text and weights": "corpus follow_links list_skipped tokenizer initialise_from",
    "This machine": "state_dir config name capacity linger leave_timeout identity_path",
    "Network": "port public_ip host_maddrs announce_maddrs client_mode relay direct direct_port "
    "max_upload max_download data_quota",
    "Compute": "device engine threads gpus bus workers_from remote_workers between key "
    "gpu host disk",
    "Output": "tensorboard as_json print_config log_format log_level",
}
"""Headings of the help texts, in their order, and the fields of `Options` below each."""
_GROUP_OF = {name: group for group, names in _GROUPS.items() for name in names.split()}
OPTIONS = {
    name: option(_DECLARED[name]["flag"], dest=name, group=group, **_DECLARED[name]["attributes"])
    for name, group in _GROUP_OF.items()
}
"""All common options, by the name of their field in `Options`."""


def flags_of(kind: type[RunConfig | PeerConfig]) -> tuple[str, ...]:
    """Fields of `Options` that replace a setting of this configuration."""
    sections = {name: declared["sets"].partition(".")[0] for name, declared in _DECLARED.items()}
    return tuple(name for name, section in sections.items() if section in kind.model_fields)


def options(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a program these common options, as one `Options` in its first argument.

    Logging is set up before the program runs.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def collected(**values: Any) -> Any:
            source_of = click.get_current_context().get_parameter_source
            environment = click.core.ParameterSource.ENVIRONMENT
            common = Options(
                **{name: values.pop(name) for name in names},
                from_environment=frozenset(n for n in names if source_of(n) is environment),
                founds="wait_for_peers" in names,
            )
            configure_logging(common.log_format, common.log_level or "info")
            return function(common, **values)

        decorated: Callable[..., Any] = collected
        for name in reversed([name for name in OPTIONS if name in names]):
            decorated = OPTIONS[name](decorated)
        return decorated

    return decorate


def require_founder(options: Options) -> None:
    """Refuses options for the founder of a run in a program that founds none.

    Raises:
        ConfigError: the message names the option.
    """
    if options.initialise_from and not options.run:
        raise ConfigError(
            "--initialise-from is for who founds a run, which takes --run too",
            hint="leave it out to join one, whose members have the weights",
        )


def _of_sections(settings: Sequence[str], kind: type[RunConfig | PeerConfig]) -> list[str]:
    kept = []
    known = [*RunConfig.model_fields, *PeerConfig.model_fields]
    for setting in settings:
        section, field, _ = parse_override(setting)
        if section not in known:
            close = difflib.get_close_matches(section, known, n=1) or known
            raise ConfigError(
                f"--set {setting!r}: unknown section {section}; did you mean "
                f"{' or '.join(f'{name}.{field}' for name in close)}?"
            )
        if section in kind.model_fields:
            kept.append(setting)
    return kept
