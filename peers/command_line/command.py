"""The base of all programs: click commands whose errors are one line and an exit code.

Logs go to stderr: colored on a terminal, plain lines elsewhere, or JSON.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bars

from swarm.errors import SwarmError, shortened
from swarm.peer.machine.local_faults import named_fault
from swarm.progress import Progress
from swarm.progress import logger as progress_logger
from swarm.protocol.records.printable import printable
from swarm.run_files import PAGES, named_pages
from swarm.version import __version__

LOG_FORMATS = ("auto", "plain", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")


class PrintableFormatter(logging.Formatter):
    """One printable line for each message, followed by the indented lines of a traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line."""
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        """The traceback with all lines escaped, since the error's message may quote a peer."""
        lines = super().formatException(ei).split("\n")
        return "\n".join("    " + printable(line) for line in lines)


class PlainFormatter(PrintableFormatter):
    """`2026-01-31T12:00:00Z INFO message`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%SZ")
        self.converter = time.gmtime


class JsonFormatter(PrintableFormatter):
    """One JSON object a line: time (seconds since 1970), level, logger, message, error."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line."""
        fields = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "logger": record.name,
            "message": printable(record.getMessage()),
        }
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class TerminalHandler(RichHandler):
    """Shows colored lines, and a progress bar below them for long work."""

    def __init__(self, console: Console) -> None:
        super().__init__(console=console, show_path=False, markup=False)
        self.setFormatter(PrintableFormatter("%(message)s", "[%H:%M:%S]"))
        words = TextColumn("{task.description}", markup=False)
        self.bars = Bars(BarColumn(20), words, console=console, transient=True)

    def emit(self, record: logging.LogRecord) -> None:
        """Shows a line or a new state of the bar. Shows nothing on a closed terminal."""
        progress = getattr(record, "progress", None)
        if isinstance(progress, Progress):
            with contextlib.suppress(OSError):
                self.draw(progress)
        else:
            super().emit(record)

    def close(self) -> None:
        """Shows the cursor again at the end of the program."""
        with contextlib.suppress(OSError):
            self.bars.stop()
        super().close()

    def draw(self, progress: Progress) -> None:
        """Shows the progress of the work, and removes the bar once the work is done."""
        words = printable(str(progress))
        if progress.done >= progress.total:
            self.bars.stop()
            for task in self.bars.task_ids:
                self.bars.remove_task(task)
            return
        if not self.bars.task_ids:
            self.bars.add_task(words, total=progress.total)
            self.bars.start()
        self.bars.update(
            self.bars.task_ids[0],
            completed=progress.done,
            total=progress.total,
            description=words,
        )


def configure_logging(log_format: str, level: str = "info") -> None:
    """Sets up the root logger, and removes its earlier handlers.

    Args:
        log_format: one of `LOG_FORMATS`. "auto" depends on whether stderr is a terminal.
        level: one of `LOG_LEVELS`, the lowest level that is logged.
    """
    handler: logging.Handler
    draws = log_format == "auto" and sys.stderr.isatty() and level in ("debug", "info")
    if log_format == "auto" and sys.stderr.isatty():
        handler = TerminalHandler(Console(stderr=True))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter() if log_format == "json" else PlainFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    progress_logger.setLevel(logging.DEBUG if draws else max(logging.INFO, logging.root.level))
    theirs = logging.getLogger("hivemind")
    theirs.setLevel(logging.WARNING)  # hivemind's INFO lines are for its authors
    # hivemind's own handler would print messages of p2pd and of other peers unescaped.
    theirs.handlers.clear()
    theirs.propagate = True


FILE_WIDTH = 160
"""Characters per line in a file or pipe."""
TAKES_SEVERAL = ("--initial-peers", "--host-maddrs", "--announce-maddrs")
"""Flags after which several values may follow, as in hivemind: `--initial-peers A B`."""


class GroupedOption(click.Option):
    """An option that the help text shows under a heading.

    Attributes:
        group: the heading. "Options" for options that only one program has.
    """

    def __init__(self, *arguments: Any, group: str = "Options", **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.group = group


class Program(click.Command):
    """A command whose errors are one line and an exit code."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes all options under the headings of their groups, then a note on the environment."""
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
            formatter.write(f"Pages are in {PAGES}\n")  # unwrapped, so that the path can be copied
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
        """Runs the program. Never returns in standalone mode."""
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
    """Stands in for scipy.optimize until an attribute is read.

    hivemind imports scipy.optimize for its averager, which no peer uses. The import would add 0.4 s
    to the start of each program.
    """

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name != "__path__":  # Python reads these of every module
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(sys.modules["scipy"].optimize, name)  # scipy imports `optimize` on access


def program(name: str) -> Callable[[Callable[..., Any]], Program]:
    """Makes a function the program with this name. The function's docstring is the help text."""
    settings = {
        "token_normalize_func": lambda token: token.replace("_", "-"),
        "help_option_names": ["-h", "--help"],
        "show_default": True,
    }
    command = click.command(name, cls=Program, context_settings=settings)
    return lambda function: command(version_option(name)(function))


@contextlib.contextmanager
def ending_as_ctrl_c() -> Iterator[None]:
    """Within the block, SIGTERM and SIGHUP act as Ctrl+C: the program first ends its processes.

    Only the first signal counts, since the shell of a closed terminal repeats SIGHUP. A signal that
    nohup ignores stays ignored.
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
    """The console for tables: as wide as the terminal, or `FILE_WIDTH` in a file or pipe."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = FILE_WIDTH
    return console


def version_option(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option --version of the program with this name."""
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
