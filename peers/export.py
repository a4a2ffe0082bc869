"""swarm-export: writes the newest agreed model as files that Transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from peers.command_line.option_values import require_folder
from peers.command_line.options import Options, option, options, program
from swarm.errors import ConfigError

if TYPE_CHECKING:
    from swarm.model.huggingface import Dtype


@program("swarm-export")
@options("initial_peers", "run_id", "tip", "state_dir", "identity_path", "log_format", "log_level")
@option("--out", type=click.Path(path_type=Path), help="Folder to write the newest model into.")
@option(
    "--every",
    metavar="ROUNDS",
    type=click.IntRange(min=1),
    help="Follows the run instead: an export for each so many rounds, and for the last one.",
)
@option(
    "--output-dir",
    type=click.Path(path_type=Path),
    help="With --every: folder of the exports round-000012, ..., and of the link latest.",
)
@option("--keep", type=click.IntRange(min=1), default=3, help="With --every: how many stay.")
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
@option(
    "--push-to-hub",
    metavar="REPO",
    help="Uploads each export there, such as somebody/model; needs the extra hf and a token.",
)
@option(
    "--evaluate",
    dest="is_evaluated",
    is_flag=True,
    help="Measures the export on the run's held-out text, and shows a sample of its text.",
)
@option(
    "--tasks",
    metavar="NAMES",
    help="With --evaluate: tasks of lm-evaluation-harness, such as arc_easy,piqa; spes: those of "
    "the paper, with its shots.",
)
@option(
    "--publish-scores",
    is_flag=True,
    help="With --evaluate: tells them everybody who watches the run, signed by --identity-path "
    "or by the peer of --state-dir.",
)
def main(
    given: Options,
    *,
    out: Path | None,
    every: int | None,
    output_dir: Path | None,
    keep: int,
    dtype: Dtype,
    max_shard_size: str,
    license_name: str | None,
    push_to_hub: str | None,
    is_evaluated: bool,
    tasks: str | None,
    publish_scores: bool,
) -> None:
    """Writes the newest agreed model: safetensors, config.json and tokenizer files.

    With --initial-peers it is fetched from the run's peers, else taken from --state-dir, whose
    peer must not be running. With --every it follows the run until its last round is exported, and
    may be killed and started again at any time.
    """
    if (every is None) != (output_dir is None):
        raise ConfigError("--every and --output-dir go together")
    if (out is None) == (output_dir is None):
        raise ConfigError("name --out DIR, or --every ROUNDS --output-dir DIR")
    folder = out or output_dir
    assert folder is not None
    require_folder(folder)
    # The next ones load torch and hivemind: not for --help
    from peers.actions.exports import (  # as said above
        Plan,
        evaluator_of,  # as said above
        export_newest,
        follow,
        form_of,
        pushed_to,
    )
    from swarm.evaluation.scores import FILE  # as said above

    evaluator = evaluator_of(
        given, folder / FILE, tasks, is_wanted=is_evaluated, publish=publish_scores
    )
    form, published = form_of(dtype, max_shard_size, license_name), pushed_to(push_to_hub)
    if every is None:
        export_newest(given, folder, given.run_id, form, evaluator=evaluator, published=published)
    else:
        plan = Plan(folder, every, keep)
        follow(given, plan, given.run_id, form, evaluator=evaluator, published=published)


if __name__ == "__main__":
    main()
