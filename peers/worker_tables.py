"""What swarm-plan says of several workers: what each holds, and the other ways to cut the model."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from swarm.config import RunConfig
from swarm.peer.planning import RunPlan
from swarm.train.comparing import Rung
from swarm.train.memory import need_of, stage_needs
from swarm.train.options import EngineKind, EngineOptions
from swarm.train.sizes import Need, pipeline_cut

PARTS = ("products", "waiting", "tokens", "outputs", "stream", "sums", "updates")
"""Of a step, as `StepTime` has them."""


def workers_table(run: RunConfig, planned: RunPlan) -> Table:
    """What each worker needs at the peak of a step, for people."""
    plan, fabric = planned.engine, planned.machine.fabric
    table = Table(title=f"{fabric.size} workers: {fabric}", title_justify="left", box=box.SIMPLE)
    for name in ("workers", "each holds", "device", "activations", "host", "disk"):
        is_text = name == "each holds"
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text)
    held = held_by(run, planned)
    for words, need in held:
        table.add_row(
            str(fabric.size // len(held)),
            words,
            *map(_gigabytes, (need.crowded, need.activations, plan.peaks.highest, need.disk)),
        )
    return table


def held_by(run: RunConfig, planned: RunPlan) -> list[tuple[str, Need]]:
    """What a worker of each stage holds, in words and bytes; one line where there are no stages."""
    options, owned = planned.engine.options, planned.owned_experts
    workers, experts = planned.machine.fabric.size, run.model.num_experts
    share = f"1/{options.ep} of {experts} experts" if options.ep > 1 else f"{experts} experts"
    if options.tp > 1:
        share += " and of the heads"
    cut = f", 1/{options.shards} of masters and moments" if options.shards > 1 else ""
    if options.kind is EngineKind.STREAMING:
        words = "streams all layers from the one host copy"
        return [(words, need_of(run, owned, options, workers))]
    if options.pp == 1:
        return [(f"all layers, {share}{cut}", need_of(run, owned, options, workers))]
    stages = pipeline_cut(run, options).stages
    needs = stage_needs(run, owned, options, workers)
    runs = [[(chunk.layers[0], chunk.layers[-1]) for chunk in stage.chunks] for stage in stages]
    layers = [" and ".join(f"{first}-{last}" for first, last in each) for each in runs]
    return [(f"layers {own}, {share}{cut}", need) for own, need in zip(layers, needs, strict=True)]


def ways_table(run: RunConfig, planned: RunPlan) -> Table:
    """Every way to cut the model over the workers, for people; the chosen one first."""
    title = "ways to cut the model over the workers, in seconds of a step"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    columns = ("ep", "pp", "tp", "moments", "fits", "device", "compute", "wait", "send", "step")
    for name in (*columns, "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for rung in (planned.engine, *planned.engine.others):
        options, time = rung.options, rung.time
        sending = time.tokens + time.outputs + time.stream + time.sums
        seconds = (time.products + time.updates, time.waiting, sending, time.total)
        table.add_row(
            str(options.ep),
            str(options.pp),
            str(options.tp),
            options.moments + _marks(options),
            "yes" if rung.fits else "no",
            _gigabytes(rung.need.crowded),
            *(f"{each:.3g}" for each in seconds),
            f"{run.train.batch_tokens / time.total:,.0f}",
        )
    table.caption = (
        "ep: experts dealt out over so many; pp: layers cut over so many; tp: heads, tokens too.\n"
        "device: with room for 25 % more rows on the experts of a worker than an even share.\n"
        "*: layers are computed again for backward; +: masters and moments cut over those alike;\n"
        "s: all stream from one host copy.\n"
    )
    table.caption_justify = "left"
    return table


def workers_figures(run: RunConfig, planned: RunPlan) -> dict[str, Any]:
    """The same for scripts; bytes are of one worker each."""
    plan, fabric = planned.engine, planned.machine.fabric
    held = held_by(run, planned)
    return {
        "number": fabric.size,
        "machines": fabric.nodes,
        "bus": fabric.bus.name,
        "between_gbit": 8 * fabric.between_gb_s,
        "ranks": [
            {
                "workers": fabric.size // len(held),
                "holds": words,
                "device_bytes": round(need.crowded),
                "host_bytes": round(plan.peaks.highest),
                "disk_bytes": round(need.disk),
            }
            for words, need in held
        ],
        "ways": [_figures(run, rung) for rung in (plan, *plan.others)],
    }


def _figures(run: RunConfig, rung: Rung) -> dict[str, Any]:
    options, seconds = rung.options, {f"{name}_s": vars(rung.time)[name] for name in PARTS}
    return {
        "engine": options.kind.value,
        "expert_parallel": options.ep,
        "pipeline": options.pp,
        "tensor_parallel": options.tp,
        "shards": options.shards,
        "moments": options.moments,
        "recompute": options.recompute,
        "fits": rung.fits,
        "device_peak_bytes": round(rung.need.crowded),
        **{name: round(value, 4) for name, value in seconds.items()},
        "step_s": round(rung.time.total, 4),
        "tokens_per_s": round(run.train.batch_tokens / rung.time.total, 1),
    }


def _marks(options: EngineOptions) -> str:
    marks = "s" if options.kind is EngineKind.STREAMING else ""
    marks += ("*" if options.recompute != "none" else "") + ("+" if options.shards > 1 else "")
    return f" {marks}" if marks else ""


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"
