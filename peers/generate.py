"""swarm-generate: continues a text with an exported model."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from peers.command_line.options import Options, option, options, program
from swarm.protocol.records.printable import printable


@program("swarm-generate")
@options("log_format", "log_level")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@option("--prompt", metavar="TEXT", help="Beginning of the text; by default all of stdin.")
@option(
    "--max-new-tokens", type=click.IntRange(min=1), default=128, help="End after this many tokens."
)
@option(
    "--temperature",
    type=click.FloatRange(min=0.0),
    default=0.8,
    help="Higher values give more varied text; 0 takes the most likely token each time.",
)
@option(
    "--top-p",
    type=click.FloatRange(min=0.0, max=1.0, min_open=True),
    default=0.95,
    help="Draw from the most likely tokens that have this much probability together.",
)
@option("--seed", type=click.IntRange(min=0), help="Equal seeds give equal texts.")
def main(
    _: Options,
    *,
    folder: Path,
    prompt: str | None,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int | None,
) -> None:
    """Continues a text with the exported model in DIR, and prints tokens as they come."""
    # The next import loads torch: not for --help
    from swarm.export.generation import Sampling, generate, require_export  # as said above

    require_export(folder)
    given = sys.stdin.buffer.read() if prompt is None else os.fsencode(prompt)
    sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    generate(folder, given.decode(errors="replace"), sampling, _show)
    click.echo()


def _show(text: str) -> None:
    """Prints text with its lines and tabs. Other control characters are shown as escapes."""
    parts = ("\t".join(printable(p, len(p)) for p in line.split("\t")) for line in text.split("\n"))
    click.echo("\n".join(parts), nl=False)


if __name__ == "__main__":
    main()
