"""swarm-upcycle: makes run files for checkpoints, and mixtures of experts from dense models."""

from __future__ import annotations

from pathlib import Path

import click

from peers.command_line.command import configure_logging
from peers.command_line.option_values import as_toml, require_folder
from peers.command_line.options import OPTIONS, Program, option, version_option
from swarm import durable
from swarm.errors import ConfigError
from swarm.model.described import run_of_checkpoint
from swarm.progress import Reporter

_FOLDER = click.Path(path_type=Path)


class Upcycle(Program, click.Group):
    """A program with its own work and an additional command."""

    command_class = Program


@click.group(
    "swarm-upcycle",
    cls=Upcycle,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@version_option("swarm-upcycle")
@option("--from", dest="dense", type=_FOLDER, help="Checkpoint folder of a dense Qwen3 or Llama.")
@option("--out", type=_FOLDER, help="Folder to write the mixture into.")
@option("--num-experts", type=click.IntRange(min=1), default=8, help="Copies of each MLP, E.")
@option("--top-k", type=click.IntRange(min=1), default=2, help="Experts per token, K.")
@option(
    "--router",
    type=click.Choice(["normal", "zeros"]),
    default="normal",
    help="Router weights. normal: N(0, 1e-4), which spreads tokens at once. zeros: as in SPES.",
)
@option(
    "--noise",
    type=click.FloatRange(min=0),
    default=0.02,
    help="Standard deviation of the noise added to a random half of each expert; 0 for none.",
)
@option(
    "--no-norm-topk-prob",
    is_flag=True,
    help="Do not divide the weights of a token's experts by their sum; scale down_proj by E / K.",
)
@option(
    "--exact-spes",
    is_flag=True,
    help="Do not scale down_proj, and give a tied head a copy of its own.",
)
@option("--seed", type=click.IntRange(min=0), default=0, help="Seed of router and noise.")
@OPTIONS["log_format"]
@OPTIONS["log_level"]
def main(
    *,
    dense: Path | None,
    out: Path | None,
    no_norm_topk_prob: bool,
    log_format: str,
    log_level: str | None,
    **recipe: object,
) -> None:
    """Makes a mixture of experts from a dense checkpoint, for a run to start from.

    \b
    swarm-upcycle --from DENSE --num-experts 8 --top-k 2 --out MIXTURE
    swarm-upcycle config MIXTURE --out run.toml
    swarm-peer --run run.toml --initialise-from MIXTURE

    Qwen3 becomes Qwen3-MoE, and Llama a Mixtral.
    """  # noqa: D301 - click reads the backspace
    configure_logging(log_format, log_level or "info")
    if click.get_current_context().invoked_subcommand:
        return
    if dense is None or out is None:
        raise ConfigError("--from and --out are both needed", hint="see swarm-upcycle --help")
    require_folder(out)
    from swarm.model.upcycling import Recipe, Upcycling  # loads torch: not for --help

    chosen = Recipe(**recipe, norm_topk_prob=not no_norm_topk_prob)  # type: ignore[arg-type]
    work = Upcycling(dense, chosen)
    durable.make_folder(out)
    work.save(out, Reporter("upcycling", "tensor").each(work.tensors(), work.num_tensors))
    model = work.run.model
    click.echo(
        f"{out}: {model.num_experts} experts in {model.num_hidden_layers} layers, "
        f"{model.num_experts_per_tok} of them for a token"
    )
    click.echo(f"swarm-upcycle config {out} --out run.toml")


@main.command("config")
@click.argument("folder", type=_FOLDER)
@click.option("--out", type=_FOLDER, help="File to write; by default the run file is printed.")
def config(folder: Path, out: Path | None) -> None:
    """Writes a run file for a checkpoint: its [model], and moderate settings for the rest.

    A checkpoint or tokenizer.json that a founder would refuse is refused here, too.
    """
    folder = folder.expanduser()
    run = run_of_checkpoint(folder)
    from swarm.data.tokenizer_file import FILE  # loads torch: not for --help
    from swarm.peer.text.run_start import founders_tokenizer, founders_weights  # loads torch, too

    founders_weights(run, folder)
    flags = f"--initialise-from {folder}"
    if (folder / FILE).exists():
        founders_tokenizer(run, folder)
        flags += f" --tokenizer {folder}"
    text = as_toml(run) + "\n"
    if out is None:
        click.echo(text, nl=False)
        return
    try:
        durable.write_file(out, text.encode())
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error}") from error
    click.echo(f"{out}: for swarm-peer --run {out} {flags}")


if __name__ == "__main__":
    main()
