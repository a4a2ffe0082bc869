"""What all programs are: click commands whose errors are one line and an exit code."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any, NoReturn

import click
from rich.console import Console

from swarm.errors import SwarmError, shortened
from swarm.peer.local_faults import named_fault
from swarm.protocol.printable import printable
from swarm.run_files import PAGES, named_pages
from swarm.version import __version__

FILE_WIDTH = 160
"""Characters a line in a file or pipe."""
TAKES_SEVERAL = ("--initial-peers", "--host-maddrs", "--announce-maddrs")
"""Flags after which several values may follow, as in hivemind: `--initial-peers A B`."""


class GroupedOption(click.Option):
    """An option that the help text shows under a heading.

    Attributes:
        group: the heading; "Options" for those of one program alone.
    """

    def __init__(self, *arguments: Any, group: str = "Options", **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.group = group


class Program(click.Command):
    """A command whose errors are one line and an exit code."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """All options under the headings of their groups, then how to set them elsewhere."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                group = getattr(parameter, "group", "Other")
                groups.setdefault(group, []).append(record)
        for group in sorted(groups, key=lambda name: (name == "Other", name != "Options")):
            with formatter.section(group):
                formatter.write_dl(groups[group])
        if isinstance(self, click.Group):
            self.format_commands(ctx, formatter)
        if any(page.is_file() for page in named_pages(self.help or "")):
            formatter.write_paragraph()
            formatter.write(f"Pages are in {PAGES}\n")  # a path that is cut cannot be copied
        if twin := next((p.envvar for p in self.params if p.envvar), None):
            formatter.write_paragraph()
            flag = "--" + str(twin).removeprefix("SWARM_").replace("_", "-").lower()
            formatter.write_text(
                f"The environment sets any option, too: {flag} is {twin}. The command line wins."
            )

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
        sys.modules.setdefault("scipy.optimize", _ScipyOptimize("scipy.optimize"))
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
        line = printable(shortened(" ".join(message.split())))
        click.echo(f"{self.name}: {click.style('error', fg='red')}: {line}", err=True)
        sys.exit(exit_code)


class _ScipyOptimize(ModuleType):
    """Stands in for scipy.optimize until somebody looks into it.

    hivemind imports it for its averager, which no peer uses: 0.4 s of the start of each program.
    """

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name != "__path__":  # asked of every module that there is
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(sys.modules["scipy"].optimize, name)  # scipy imports it when it is asked


def program(name: str) -> Callable[[Callable[..., Any]], Program]:
    """Makes a function the program of this name; its docstring is the help text."""
    settings = {
        "token_normalize_func": lambda token: token.replace("_", "-"),
        "help_option_names": ["-h", "--help"],
        "show_default": True,
    }
    command = click.command(name, cls=Program, context_settings=settings)
    return lambda function: command(version_option(name)(function))


@contextlib.contextmanager
def ending_as_ctrl_c() -> Iterator[None]:
    """SIGTERM and SIGHUP are as Ctrl+C while this lasts, for a program that ends others first.

    The first one alone: a shell whose terminal is closed repeats it while they end. What nohup has
    the program ignore it ignores.
    """
    heard = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]

    def on_signal(_number: int, _frame: FrameType | None) -> NoReturn:
        for number in heard:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, on_signal) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def for_tables() -> Console:
    """Where tables are printed: as wide as the terminal; in a file or pipe nobody's screen cuts."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = FILE_WIDTH
    return console


def version_option(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option --version of the program of this name."""
    return click.version_option(__version__, prog_name=name, message="%(prog)s %(version)s")


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
