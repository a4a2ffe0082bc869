"""swarm-export: writes the newest agreed model as files that Transformers loads."""

from __future__ import annotations

from pathlib import Path

import click

from peers.option_values import require_folder
from peers.options import Options, option, options, program


@program("swarm-export")
@options("initial_peers", "tip", "state_dir", "log_format", "log_level")
@option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write into.")
@option("--run-id", help="Which run, where there are several.")
def main(given: Options, out: Path, run_id: str | None) -> None:
    """Writes the newest agreed model: safetensors, config.json and tokenizer files.

    With --initial-peers it is fetched from the run's peers, else taken from --state-dir, whose
    peer must not be running.
    """
    require_folder(out)
    from peers.exporting import export_newest  # loads torch and hivemind: not for --help

    export_newest(given, out, run_id)


if __name__ == "__main__":
    main()
