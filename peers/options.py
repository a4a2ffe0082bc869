"""What all programs have in common: flags, their environment twins, files, errors, logging.

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

from peers.command import Program as Program
from peers.command import program as program
from peers.command import version_option as version_option
from peers.option_values import (
    Setting,
    file_of,
    gbit_of,
    gigabytes_of,
    head_digest,
    number_or_all,
    rate_of,
    split_addresses,
)
from peers.program_log import LOG_FORMATS, LOG_LEVELS, configure_logging
from peers.toml_text import toml_value
from swarm.config import COMMAND_LINE, PeerConfig, RunConfig, parse_config, parse_override
from swarm.errors import ConfigError
from swarm.run_files import read_text


def option(flag: str, **attributes: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A click option with its environment twin SWARM_FLAG."""
    twin = "SWARM_" + flag.split("/")[0].removeprefix("--").replace("-", "_").upper()
    names = [flag, attributes.pop("dest")] if "dest" in attributes else [flag]
    return click.option(*names, envvar=twin, show_envvar=True, **attributes)


def _flag(flag: str, text: str, *, sets: str = "", **attributes: Any) -> Any:
    """A field of `Options`, which a flag and its environment twin fill.

    Args:
        flag: as on the command line.
        text: of the help page.
        sets: setting of a configuration that it replaces, as `section.field`.
        attributes: of the click option; `default` is the field's too.
    """
    default = attributes.get("default", () if attributes.get("multiple") else None)
    declared = {"flag": flag, "sets": sets, "attributes": {"help": text, **attributes}}
    return field(default=default, metadata=declared)


def _addresses(flag: str, text: str, *, sets: str) -> Any:
    several = {"metavar": "ADDRESS...", "multiple": True, "callback": split_addresses}
    return _flag(flag, text, sets=sets, **several)


def _path(flag: str, text: str, **more: Any) -> Any:
    return _flag(flag, text, type=click.Path(path_type=Path), **more)


_POSITIVE = click.IntRange(min=1)


@dataclass(frozen=True)
class Options:
    """What was given on the command line or in the environment; None or () where nothing was.

    A flag is declared here and nowhere else; programs name the fields that they take.
    """

    run: Path | None = _path(
        "--run", "A run file, or a name such as demo.", callback=file_of("runs")
    )
    config: Path | None = _path(
        "--config",
        "Configuration of this machine: a file, or a name such as laptop.",
        callback=file_of("peers"),
    )
    state_dir: Path = _path(
        "--state-dir", "Where this peer keeps its state.", default=Path("~/.swarm/default")
    )
    rounds: int | None = _flag(
        "--rounds", "The same as --set run.rounds=N.", sets="run.rounds", type=_POSITIVE
    )
    peers: int | None = _flag("--peers", "Number of peers.", sets="run.peers", type=_POSITIVE)
    settings: tuple[str, ...] = _flag(
        "--set", "Changes one setting.", type=Setting(), multiple=True
    )
    as_json: bool = _flag("--json", "One JSON object, last.", is_flag=True, default=False)
    print_config: bool = _flag(
        "--print-config", "Prints the settings in effect, and exits.", is_flag=True, default=False
    )
    log_format: str = _flag(
        "--log-format",
        "auto: colours on a terminal, plain lines off it.",
        type=click.Choice(LOG_FORMATS),
        default="auto",
    )
    log_level: str | None = _flag(
        "--log-level", "The least that is said.", type=click.Choice(LOG_LEVELS), default=None
    )
    initial_peers: tuple[str, ...] = _addresses(
        "--initial-peers",
        "Addresses of peers; several, or @FILE with one a line.",
        sets="network.initial_peers",
    )
    host_maddrs: tuple[str, ...] = _addresses(
        "--host-maddrs", "Addresses to listen on.", sets="network.host_maddrs"
    )
    announce_maddrs: tuple[str, ...] = _addresses(
        "--announce-maddrs",
        "Addresses that others shall dial, if not those listened on.",
        sets="network.announce_maddrs",
    )
    identity_path: str | None = _flag(
        "--identity-path",
        "Key file, kept for later starts; by default in the state folder.",
        sets="network.identity_path",
    )
    client_mode: bool | None = _flag(
        "--client-mode/--no-client-mode",
        "Only dial out, do not listen.",
        sets="network.client_mode",
        default=None,
    )
    relay: bool | None = _flag(
        "--relay/--no-relay",
        "Pass messages on between peers that cannot dial each other (default: yes).",
        sets="network.relay",
        default=None,
    )
    direct: bool | None = _flag(
        "--direct/--no-direct",
        "Blobs over TCP connections of their own, unencrypted (default: yes).",
        sets="network.direct",
        default=None,
    )
    direct_port: int | None = _flag(
        "--direct-port",
        "Where those are taken (default: the port after that of --host-maddrs).",
        sets="network.direct_port",
        type=click.IntRange(0, 65_535),
    )
    max_upload: float | None = _flag(
        "--max-upload",
        "Sends no faster: 20mbit.",
        sets="network.max_upload_mbit",
        metavar="RATE",
        callback=rate_of,
    )
    max_download: float | None = _flag(
        "--max-download",
        "Receives no faster: 100mbit.",
        sets="network.max_download_mbit",
        metavar="RATE",
        callback=rate_of,
    )
    data_quota: float | None = _flag(
        "--data-quota",
        "Leaves before it has moved so much in a calendar month, both ways together: 200GB.",
        sets="network.data_quota_gb",
        metavar="SIZE",
        callback=gigabytes_of,
    )
    run_id: str | None = _flag("--run-id", "Which run, where there are several.")
    new_run: bool = _flag(
        "--new-run",
        "Founds the run of --run even if --state-dir, or who is at --initial-peers, is in another.",
        is_flag=True,
        default=False,
    )
    tip: str | None = _flag(
        "--tip",
        "Believes what follows from this manifest, which somebody you trust has named, "
        "instead of what follows from the run's first.",
        metavar="HEIGHT:DIGEST",
        callback=head_digest,
    )
    invitation: str | None = _flag(
        "--invitation",
        "What an anchor's swarm-invite printed: with it this peer votes at once.",
        metavar="TEXT",
    )
    name: str | None = _flag("--name", "For people only.", sets="peer.name")
    capacity: float | None = _flag(
        "--capacity", "Relative share of experts to own.", sets="peer.capacity", type=float
    )
    wait_for_peers: int | None = _flag(
        "--wait-for-peers",
        "A founder starts when so many are there.",
        sets="peer.wait_for_peers",
        type=int,
    )
    linger: float | None = _flag(
        "--linger", "Seconds to serve on after the last fetch.", sets="peer.linger_s", type=float
    )
    leave_timeout: float | None = _flag(
        "--leave-timeout",
        "Seconds that finishing the round and handing over may take after Ctrl+C.  [default: 120]",
        sets="peer.leave_timeout_s",
        type=float,
    )
    device: str | None = _flag("--device", "auto, cpu or cuda.", sets="compute.device")
    threads: int | None = _flag(
        "--threads",
        "CPU threads of the model; measured by default.",
        sets="compute.threads",
        type=int,
    )
    engine: str | None = _flag(
        "--engine",
        "What holds the model; auto takes the fastest that fits.",
        sets="compute.engine",
        type=click.Choice(["auto", "resident", "streaming"]),
    )
    gpus: int | str | None = _flag(
        "--gpus",
        "Computes on so many GPUs of this machine, or all, as one peer; by default on one.",
        sets="compute.parallel",
        metavar="N|all",
        callback=number_or_all,
    )
    workers_from: str | None = _flag(
        "--workers-from",
        "Takes workers of other machines, which run swarm-worker, at this address of ours.",
        sets="compute.workers_from",
        metavar="HOST:PORT",
    )
    remote_workers: int | None = _flag(
        "--remote-workers",
        "Waits for so many of these workers, beside those of --gpus.",
        sets="compute.remote_workers",
        type=_POSITIVE,
    )
    bus: str | None = _flag(
        "--bus",
        "What the GPUs of a machine reach each other by; measured by default.",
        sets="compute.bus",
        type=click.Choice(["auto", "nvlink", "pcie"]),
    )
    between: float | None = _flag(
        "--between",
        "Network between the machines of the workers: 25gbit.  [default: 10gbit]",
        sets="compute.between_gbit",
        metavar="RATE",
        callback=gbit_of,
    )
    key: str | None = _flag(
        "--key",
        "File with the key that swarm-worker and its peer share; by default workers.key in the "
        "peer's state folder, which it makes.",
        sets="compute.workers_key",
        metavar="FILE",
    )
    gpu: str | None = _flag("--gpu", "Plans for such a GPU: 24GB; 0 for none.", metavar="SIZE")
    host: str | None = _flag("--host", "Plans for so much memory: 64GB.", metavar="SIZE")
    disk: str | None = _flag("--disk", "Plans for so much free disk: 500GB.", metavar="SIZE")
    corpus: str | None = _flag(
        "--corpus",
        "Text to train on: .txt, .md, .py, .html, .json, .jsonl and .parquet files, or shards that "
        "swarm-data made. By default the folder that the run's text came from before, or the "
        "Python standard library.",
        sets="corpus.folder",
        metavar="FOLDER",
    )
    follow_links: bool | None = _flag(
        "--follow-links",
        "Follows links in it that leave it, and links to folders.",
        sets="corpus.follow_links",
        is_flag=True,
        default=None,
    )
    list_skipped: bool | None = _flag(
        "--list-skipped",
        "Names every file, line and row of text that is not read.",
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
        "given.",
    )
    tensorboard: Path | None = _path("--tensorboard", "Writes losses there for TensorBoard.")
    from_environment: frozenset[str] = frozenset()
    """Fields whose values come from the environment, which any flag overrides."""

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
        """`section.field` -> value of every override: what a joiner's run must agree with."""
        parsed = (parse_override(setting) for setting in self.run_settings())
        return {f"{section}.{field}": value for section, field, value in parsed}

    def run_config(self) -> RunConfig:
        """The run configuration from --run and its overrides.

        Raises:
            ConfigError: --run is missing, the file is, or a setting is wrong.
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

    def _overrides(self, kind: type[RunConfig | PeerConfig]) -> tuple[str, ...]:
        """Later ones win: the environment's flags, then --set, then the command line's flags."""
        flags: dict[bool, list[str]] = {True: [], False: []}
        for name in flags_of(kind):
            value = getattr(self, name)
            if value not in (None, ()):
                setting = f"{_DECLARED[name]['sets']}={toml_value(value)}"
                flags[name in self.from_environment].append(setting)
        settings = _of_sections(self.settings, kind)
        if "settings" in self.from_environment:
            return (*settings, *flags[True], *flags[False])
        return (*flags[True], *settings, *flags[False])


_DECLARED = {each.name: each.metadata for each in fields(Options) if each.metadata}
OPTIONS = {
    name: option(declared["flag"], dest=name, **declared["attributes"])
    for name, declared in _DECLARED.items()
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
            )
            configure_logging(common.log_format, common.log_level or "info")
            return function(common, **values)

        decorated: Callable[..., Any] = collected
        for name in reversed(names):
            decorated = OPTIONS[name](decorated)
        return decorated

    return decorate


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
