"""swarm-export: writes the newest agreed model as files that Transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from peers.option_values import require_folder
from peers.options import Options, option, options, program

if TYPE_CHECKING:
    from swarm.model.huggingface import Dtype


@program("swarm-export")
@options("initial_peers", "tip", "state_dir", "log_format", "log_level")
@option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write into.")
@option("--run-id", help="Which run, where there are several.")
@option(
    "--dtype",
    type=click.Choice(["agreed", "float32", "bfloat16"]),
    default="agreed",
    help="Type of the weights; agreed: as peers exchange them.",
)
@option(
    "--max-shard-size",
    metavar="SIZE",
    default="800MB",
    help="Of a file of weights, such as 5GB; a shard is in memory twice while it is written.",
)
@option(
    "--license",
    dest="license_name",
    metavar="NAME",
    help="Of the model, for its card, such as apache-2.0.",
)
def main(
    given: Options,
    *,
    out: Path,
    run_id: str | None,
    dtype: Dtype,
    max_shard_size: str,
    license_name: str | None,
) -> None:
    """Writes the newest agreed model: safetensors, config.json and tokenizer files.

    With --initial-peers it is fetched from the run's peers, else taken from --state-dir, whose
    peer must not be running.
    """
    require_folder(out)
    from peers.exporting import export_newest, form_of  # loads torch and hivemind: not for --help

    export_newest(given, out, run_id, form_of(dtype, max_shard_size, license_name))


if __name__ == "__main__":
    main()
