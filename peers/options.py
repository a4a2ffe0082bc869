"""What all programs have in common: flags, their environment twins, files, errors, logging.

Precedence: flag, then environment (SWARM_...), then file, then default. `-` and `_` are the same
in a flag. An error is one line on stderr and an exit code of its own (see swarm/errors.py).
"""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import click

from peers.option_values import Setting, file_of, head_digest, split_addresses
from peers.program_log import LOG_FORMATS, LOG_LEVELS, configure_logging
from swarm.config import COMMAND_LINE, PeerConfig, RunConfig, parse_config, parse_override
from swarm.errors import ConfigError, SwarmError
from swarm.peer.local_faults import named_fault
from swarm.protocol.printable import printable
from swarm.run_files import read_text
from swarm.version import __version__

TAKES_SEVERAL = ("--initial-peers", "--host-maddrs", "--announce-maddrs")
"""Flags after which several values may follow, as in hivemind: `--initial-peers A B`."""


class Program(click.Command):
    """A command whose errors are one line and an exit code."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Lets several values follow one flag."""
        return super().parse_args(ctx, list(_one_value_each(args)))

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Runs the program; in standalone mode it never returns."""
        run = functools.partial(
            super().main, args, prog_name, complete_var, standalone_mode=False, **extra
        )
        if not standalone_mode:
            return run()
        try:
            code: Any = run()
        except SwarmError as error:
            self._fail(str(error), error.exit_code)
        except click.ClickException as error:
            self._fail(error.format_message(), error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            self._fail("interrupted", 130)
        except (MemoryError, RuntimeError, OSError) as error:
            typed = named_fault(error)
            if typed is None:
                raise
            self._fail(str(typed), typed.exit_code)
        sys.exit(code if isinstance(code, int) else 0)

    def _fail(self, message: str, exit_code: int) -> NoReturn:
        line = printable(" ".join(message.split()))
        click.echo(f"{self.name}: {click.style('error', fg='red')}: {line}", err=True)
        sys.exit(exit_code)


def program(name: str) -> Callable[[Callable[..., Any]], Program]:
    """Makes a function the program of this name; its docstring is the help text."""
    settings = {
        "token_normalize_func": lambda token: token.replace("_", "-"),
        "help_option_names": ["-h", "--help"],
        "show_default": True,
    }
    command = click.command(name, cls=Program, context_settings=settings)
    version = click.version_option(__version__, prog_name=name, message="%(prog)s %(version)s")
    return lambda function: command(version(function))


def _one_value_each(args: Iterable[str]) -> Iterable[str]:
    flag, filled = None, False
    for arg in args:
        if flag and not arg.startswith("-"):
            if filled:
                yield flag
            filled = True
        else:
            name = arg.partition("=")[0].replace("_", "-")
            flag, filled = (name if name in TAKES_SEVERAL else None), "=" in arg
        yield arg


def option(flag: str, **attributes: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A click option with its environment twin SWARM_FLAG."""
    twin = "SWARM_" + flag.split("/")[0].removeprefix("--").replace("-", "_").upper()
    names = [flag, attributes.pop("dest")] if "dest" in attributes else [flag]
    return click.option(*names, envvar=twin, show_envvar=True, **attributes)


def _addresses(flag: str, text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return option(flag, metavar="ADDRESS...", multiple=True, callback=split_addresses, help=text)


def _path(flag: str, text: str, **more: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return option(flag, type=click.Path(path_type=Path), help=text, **more)


_POSITIVE = click.IntRange(min=1)
OPTIONS = {
    "run": _path("--run", "A run file, or a name such as demo.", callback=file_of("runs")),
    "config": _path(
        "--config",
        "Configuration of this machine: a file, or a name such as laptop.",
        callback=file_of("peers"),
    ),
    "state_dir": _path(
        "--state-dir", "Where this peer keeps its state.", default=Path("~/.swarm/default")
    ),
    "rounds": option("--rounds", type=_POSITIVE, help="The same as --set run.rounds=N."),
    "peers": option("--peers", type=_POSITIVE, help="Number of peers."),
    "settings": option(
        "--set", dest="settings", type=Setting(), multiple=True, help="Changes one setting."
    ),
    "as_json": option("--json", dest="as_json", is_flag=True, help="One JSON object, last."),
    "print_config": option(
        "--print-config", is_flag=True, help="Prints the settings in effect, and exits."
    ),
    "log_format": option(
        "--log-format",
        type=click.Choice(LOG_FORMATS),
        default="auto",
        help="auto: colours on a terminal, plain lines off it.",
    ),
    "log_level": option(
        "--log-level", type=click.Choice(LOG_LEVELS), default=None, help="The least that is said."
    ),
    "initial_peers": _addresses(
        "--initial-peers", "Addresses of peers; several, or @FILE with one a line."
    ),
    "host_maddrs": _addresses("--host-maddrs", "Addresses to listen on."),
    "announce_maddrs": _addresses(
        "--announce-maddrs", "Addresses that others shall dial, if not those listened on."
    ),
    "identity_path": option("--identity-path", help="Key file; by default in the state folder."),
    "client_mode": option(
        "--client-mode/--no-client-mode", default=None, help="Only dial out, do not listen."
    ),
    "relay": option(
        "--relay/--no-relay",
        default=None,
        help="Pass messages on between peers that cannot dial each other (default: yes).",
    ),
    "run_id": option("--run-id", help="Which run to join, where several are announced."),
    "new_run": option(
        "--new-run",
        is_flag=True,
        help="Founds the run of --run even where the peers of --initial-peers are in another.",
    ),
    "tip": option(
        "--tip",
        metavar="HEIGHT:DIGEST",
        callback=head_digest,
        help="Believes what follows from this manifest, which somebody you trust has named, "
        "instead of what follows from the run's first.",
    ),
    "invitation": option(
        "--invitation",
        metavar="TEXT",
        help="What an anchor's swarm-invite printed: with it this peer votes at once.",
    ),
    "name": option("--name", help="For people only."),
    "capacity": option("--capacity", type=float, help="Relative share of experts to own."),
    "wait_for_peers": option(
        "--wait-for-peers", type=int, help="A founder starts when so many are there."
    ),
    "linger": option("--linger", type=float, help="Seconds to serve after the end."),
    "leave_timeout": option(
        "--leave-timeout",
        type=float,
        help="Seconds that finishing the round and handing over may take after Ctrl+C.  "
        "[default: 120]",
    ),
    "device": option("--device", help="auto, cpu or cuda."),
    "engine": option(
        "--engine",
        type=click.Choice(["auto", "resident", "streaming"]),
        default=None,
        help="What holds the model; auto takes the fastest that fits.",
    ),
    "gpu": option("--gpu", metavar="SIZE", help="Plans for such a GPU: 24GB; 0 for none."),
    "host": option("--host", metavar="SIZE", help="Plans for so much memory: 64GB."),
    "disk": option("--disk", metavar="SIZE", help="Plans for so much free disk: 500GB."),
    "threads": option("--threads", type=int, help="CPU threads of the model; measured by default."),
    "corpus": option(
        "--corpus",
        metavar="FOLDER",
        help="Text to train on: .txt, .md, .py and .jsonl files. By default the folder that the "
        "run's text came from before, or the Python standard library.",
    ),
}
"""All common options, by the name of their field in `Options`."""

_SETTING_OF = {
    "initial_peers": ("network", "initial_peers"),
    "host_maddrs": ("network", "host_maddrs"),
    "announce_maddrs": ("network", "announce_maddrs"),
    "identity_path": ("network", "identity_path"),
    "client_mode": ("network", "client_mode"),
    "relay": ("network", "relay"),
    "name": ("peer", "name"),
    "capacity": ("peer", "capacity"),
    "wait_for_peers": ("peer", "wait_for_peers"),
    "linger": ("peer", "linger_s"),
    "leave_timeout": ("peer", "leave_timeout_s"),
    "device": ("compute", "device"),
    "threads": ("compute", "threads"),
    "engine": ("compute", "engine"),
    "corpus": ("corpus", "folder"),
}
"""Field of `Options` -> the setting of `PeerConfig` that its flag replaces."""


@dataclass(frozen=True)
class Options:
    """What was given on the command line or in the environment; None or () where nothing was."""

    run: Path | None = None
    config: Path | None = None
    state_dir: Path = Path("~/.swarm/default")
    rounds: int | None = None
    peers: int | None = None
    settings: tuple[str, ...] = ()
    as_json: bool = False
    print_config: bool = False
    log_format: str = "auto"
    log_level: str | None = None
    initial_peers: tuple[str, ...] = ()
    host_maddrs: tuple[str, ...] = ()
    announce_maddrs: tuple[str, ...] = ()
    identity_path: str | None = None
    client_mode: bool | None = None
    relay: bool | None = None
    run_id: str | None = None
    new_run: bool = False
    tip: str | None = None
    invitation: str | None = None
    name: str | None = None
    capacity: float | None = None
    wait_for_peers: int | None = None
    linger: float | None = None
    leave_timeout: float | None = None
    device: str | None = None
    threads: int | None = None
    engine: str | None = None
    gpu: str | None = None
    host: str | None = None
    disk: str | None = None
    corpus: str | None = None
    from_environment: frozenset[str] = frozenset()
    """Fields whose values come from the environment, which any flag overrides."""

    def run_settings(self) -> tuple[str, ...]:
        """Overrides of the run configuration: --set of its sections, --rounds, --peers.

        Raises:
            ConfigError: a --set names a section of neither configuration.
        """
        places = {"rounds": ("run", "rounds"), "peers": ("run", "peers")}
        return self._overrides(RunConfig, places)

    def peer_settings(self) -> tuple[str, ...]:
        """Overrides of the peer configuration: --set of its sections and the flags for it.

        Raises:
            ConfigError: a --set names a section of neither configuration.
        """
        return self._overrides(PeerConfig, _SETTING_OF)

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
        text = read_text(self.run)
        return parse_config(RunConfig, text, source=str(self.run), overrides=self.run_settings())

    def peer_config(self) -> PeerConfig:
        """The configuration of this machine from --config, --set and the flags.

        Raises:
            ConfigError: the file is missing or a setting is wrong.
        """
        text = read_text(self.config) if self.config else ""
        source = str(self.config) if self.config else COMMAND_LINE
        return parse_config(PeerConfig, text, source=source, overrides=self.peer_settings())

    def _overrides(
        self, kind: type[RunConfig | PeerConfig], places: Mapping[str, tuple[str, str]]
    ) -> tuple[str, ...]:
        """Later ones win: the environment's flags, then --set, then the command line's flags."""
        flags: dict[bool, list[str]] = {True: [], False: []}
        for field, (section, key) in places.items():
            value = getattr(self, field)
            if value not in (None, ()):
                from_environment = field in self.from_environment
                flags[from_environment].append(f"{section}.{key}={_toml(value)}")
        settings = _of_sections(self.settings, kind)
        if "settings" in self.from_environment:
            return (*settings, *flags[True], *flags[False])
        return (*flags[True], *settings, *flags[False])


def options(*fields: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a program these common options, as one `Options` in its first argument.

    Logging is set up before the program runs.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def collected(**values: Any) -> Any:
            source_of = click.get_current_context().get_parameter_source
            environment = click.core.ParameterSource.ENVIRONMENT
            common = Options(
                **{field: values.pop(field) for field in fields},
                from_environment=frozenset(f for f in fields if source_of(f) is environment),
            )
            configure_logging(common.log_format, common.log_level or "info")
            return function(common, **values)

        decorated: Callable[..., Any] = collected
        for field in reversed(fields):
            decorated = OPTIONS[field](decorated)
        return decorated

    return decorate


def as_toml(*configs: RunConfig | PeerConfig) -> str:
    """Configurations as TOML that reads back as the same; defaults included."""
    lines: list[str] = []
    for config in configs:
        for name, section in config.model_dump().items():
            several = section if isinstance(section, tuple) else (section,)
            header = f"[[{name}]]" if isinstance(section, tuple) else f"[{name}]"
            for values in several:
                lines += ["", header]
                kept = {key: value for key, value in values.items() if value is not None}
                lines += [f"{key} = {_toml(value)}" for key, value in kept.items()]
    return "\n".join(lines).strip()


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


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, str):
        quoted = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{quoted}"'
    return repr(value)
