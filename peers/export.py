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
    help="Follow the run instead: export a model every so many rounds, and the last one.",
)
@option(
    "--output-dir",
    type=click.Path(path_type=Path),
    help="With --every: folder for the exports round-000012, ..., and for the link latest.",
)
@option(
    "--keep", type=click.IntRange(min=1), default=3, help="With --every: how many exports to keep."
)
@option(
    "--dtype",
    type=click.Choice(["agreed", "float32", "bfloat16"]),
    default="agreed",
    help="Type of the weights. agreed: the types in which peers exchange them.",
)
@option(
    "--max-shard-size",
    metavar="SIZE",
    default="800MB",
    help="Largest file of weights, such as 5GB. Writing a file needs twice its size in memory.",
)
@option(
    "--license",
    dest="license_name",
    metavar="NAME",
    help="License of the model, for its card, such as apache-2.0.",
)
@option(
    "--push-to-hub",
    metavar="REPO",
    help="Upload each export to this repository, such as somebody/model. Needs the extra hf, and a "
    "token.",
)
@option(
    "--evaluate",
    dest="is_evaluated",
    is_flag=True,
    help="Measure the export on the run's held-out text, and show a sample of generated text.",
)
@option(
    "--tasks",
    metavar="NAMES",
    help="With --evaluate: tasks of lm-evaluation-harness, such as arc_easy,piqa. spes: those of "
    "the paper, with its numbers of examples.",
)
@option(
    "--publish-scores",
    is_flag=True,
    help="With --evaluate: publish the scores to all monitors of the run, signed with the key in "
    "--identity-path or with that of the peer in --state-dir.",
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

    With --initial-peers the model is fetched from the run's peers. Otherwise it is taken from
    --state-dir, whose peer must not be running. With --every the program follows the run until the
    last round is exported. It may be killed and started again at any time.
    """
    if (every is None) != (output_dir is None):
        raise ConfigError("--every and --output-dir go together")
    if (out is None) == (output_dir is None):
        raise ConfigError("name --out DIR, or --every ROUNDS --output-dir DIR")
    folder = out or output_dir
    assert folder is not None
    require_folder(folder)
    # The next imports load torch and hivemind: not for --help
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
