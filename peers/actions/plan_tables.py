"""The tables and figures of swarm-plan for a link and for several workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from swarm.config import NetworkSection, RunConfig
from swarm.config.amounts import LinkRates, link_rates
from swarm.emulation.links import LINKS
from swarm.model.link_plan import (
    ASSUMED,
    LinkPlan,
    Setting,
    carried_mbit,
    cycle_steps,
    plan_link,
    setting_of,
    settings_for,
)
from swarm.peer.machine.engine_plan import RunPlan
from swarm.progress import duration
from swarm.train.engine.engine_options import EngineKind, EngineOptions
from swarm.train.engine.sizes import Need, pipeline_cut
from swarm.train.planning.ladder import Rung
from swarm.train.planning.memory import need_of, stage_needs

MONTH_S = 30 * 86_400.0


@dataclass(frozen=True)
class Planned:
    """One setting on the link."""

    setting: Setting
    plan: LinkPlan


@dataclass(frozen=True)
class LinkTable:
    """A run and the known settings, planned on one link.

    Attributes:
        link: the link of a peer, with rates no higher than the caps.
        rates: up and down in Mbit/s, as far as packet loss allows.
        compute_s: seconds of the local steps of a cycle.
        wanted: wanted share of time spent computing.
        own: the run with the settings of its file.
        others: the known settings that reach the wanted share, in order of price.
        best: the known setting with the largest share, shown if none reaches the wanted share.
        quota_gb: monthly quota, if one is set.
    """

    link: LinkRates
    rates: tuple[float, float]
    compute_s: float
    wanted: float
    own: Planned
    others: tuple[Planned, ...]
    best: Planned
    quota_gb: float | None

    @property
    def month_gb(self) -> float:
        """GB in 30 days, both ways, of the run with the settings of its file."""
        cycle_s = self.own.plan.round_s * self.own.setting.rounds
        return 2 * self.own.plan.cycle_bytes / 1e9 * MONTH_S / cycle_s


def link_named(text: str) -> LinkRates:
    """A link by its rates, or by the name of an emulated link.

    Raises:
        ConfigError: the text is neither.
    """
    named = LINKS.get(text)
    if named is None:
        return link_rates(text)
    return LinkRates(named.up_mbit, named.down_mbit, named.rtt_ms, named.mean_loss_pct)


def table_for(
    run: RunConfig,
    link: LinkRates,
    network: NetworkSection,
    *,
    step_s: float,
    wanted: float,
    beside: bool = True,
) -> LinkTable:
    """Plans the run, and all known settings, on a link.

    Args:
        run: the run with the settings of its file.
        link: link of a peer.
        network: the peer's caps and quota.
        step_s: seconds of a local step.
        wanted: wanted share of time spent computing.
        beside: `Assumptions.is_beside` of the planned engine.
    """
    capped = LinkRates(
        min(link.up_mbit, network.max_upload_mbit or link.up_mbit),
        min(link.down_mbit, network.max_download_mbit or link.down_mbit),
        link.rtt_ms,
        link.loss_pct,
    )
    num_peers, rates = run.run.peers, carried_mbit(capped, run.run.peers)
    round_s = run.round.seconds or run.round.local_steps * step_s
    compute_s = setting_of(run).rounds * round_s
    assumed = replace(ASSUMED, is_beside=beside)

    def planned(setting: Setting) -> Planned:
        plan = plan_link(
            run, setting, rates, compute_s=compute_s, num_peers=num_peers, assumed=assumed
        )
        return Planned(setting, plan)

    tried = [planned(setting) for setting in settings_for(run)]
    reaching = [each for each in tried if each.plan.utilisation >= wanted]
    return LinkTable(
        capped,
        rates,
        compute_s,
        wanted,
        planned(setting_of(run)),
        tuple(sorted(reaching, key=_order)),
        max(tried, key=lambda each: each.plan.utilisation),
        network.data_quota_gb,
    )


def _order(planned: Planned) -> tuple[bool, float, float]:
    price = planned.setting.price
    return price is None, price.loss_pct if price else 0.0, planned.plan.cycle_bytes


def as_figures(table: LinkTable) -> dict[str, Any]:
    """The figures on which scripts may rely."""
    return {
        **asdict(table.link),
        "carried_up_mbit": round(table.rates[0], 3),
        "carried_down_mbit": round(table.rates[1], 3),
        "wanted_utilisation": table.wanted,
        "run": _figures(table.own),
        "settings": [_figures(each) for each in table.others],
    }


def _figures(planned: Planned) -> dict[str, Any]:
    setting = asdict(planned.setting)
    plan = {key: round(value, 4) for key, value in asdict(planned.plan).items()}
    return {**setting, **plan}


def link_table(run: RunConfig, table: LinkTable) -> Table:
    """The run with the settings of its file, for people."""
    own, link = table.own.plan, table.link
    told = Table(title="link", title_justify="left", box=box.SIMPLE, show_header=False)
    told.add_column()
    told.add_column(justify="right")
    told.add_column(style="dim")
    rates = f"{link.down_mbit:g} down, {link.up_mbit:g} up"
    rows = [("rates", rates, f"Mbit/s; {link.rtt_ms:g} ms round trip")]
    if table.rates != (link.up_mbit, link.down_mbit):
        why = f"{link.loss_pct:g} % loss with cubic or reno; with bbr hardly less"
        rows.append(("  carried", f"{table.rates[1]:.3g} down, {table.rates[0]:.3g} up", why))
    steps_s = table.compute_s / table.own.setting.rounds
    moved = f"{own.cycle_bytes / 1e9:.3g} GB"
    rows += [
        ("moved each way", moved, f"in {cycle_steps(run)} local steps; {_time(own.transfer_s)}"),
        ("a round", _time(own.round_s), f"its local steps take {_time(steps_s)}"),
        ("computing", f"{own.utilisation:.1%}", "of the time, by the run file as it is"),
        ("a month", f"{table.month_gb:,.0f} GB", "30 days, both ways together"),
    ]  # fmt: skip
    if table.quota_gb:
        days = 30 * table.quota_gb / table.month_gb
        rows.append(("  quota", f"{table.quota_gb:,.0f} GB", f"are used up in {days:.3g} days"))
    for row in rows:
        told.add_row(*row)
    return told


def settings_table(table: LinkTable) -> Table:
    """The settings that reach the wanted share, for people."""
    title = f"settings that compute {table.wanted:.1%} of the time or more"
    told = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in ("shared", "experts", "P", "every", "R", "overlap"):
        told.add_column(name, no_wrap=True)
    for name in ("GB", "a round", "computes", "late", "loss"):
        told.add_column(name, justify="right", no_wrap=True)
    for each in table.others:
        told.add_row(*_row(each))
    return told


def _row(each: Planned) -> Sequence[str]:
    setting, plan, price = each.setting, each.plan, each.setting.price
    return (
        setting.shared,
        setting.experts,
        str(setting.rounds),
        f"{setting.shared_every}, {setting.experts_every}",
        str(setting.owners),
        "yes" if setting.overlap else "no",
        f"{plan.cycle_bytes / 1e9:.3g}",
        _time(plan.round_s),
        f"{plan.utilisation:.1%}",
        f"{plan.delay_share:.0%}",
        f"{price.loss_pct:+.1f} %" if price else "?",
    )


ASSUMPTIONS = (
    f"Assumed: transfers reach {ASSUMED.link_share:.0%} of the link, a round takes "
    f"{ASSUMED.control_s:g} s more, a peer receives as many bytes as it sends, "
    f"{ASSUMED.cores} cores make and adopt what is exchanged, and the private state goes to "
    f"the disk at {ASSUMED.disk_bytes_per_s / 1e9:g} GB/s once a cycle (uncoded: in each round). "
    "Where rounds overlap, offers and private states are made during the next step; steps of "
    "GPUs that share state in cuts wait for them, and those of a streaming engine that clips by "
    "unit."
)
COLUMNS = (
    "P: rounds of a cycle. Every: rounds between two exchanges of a shared tensor, of an expert. "
    "R: owners of an expert. "
    "Late: the share of a cycle after which steps see what was agreed on."
)
PRICES = (
    "Loss: held out, against exact SPES with the same cycle, in toy runs (247 thousand parameters, "
    "4 peers, 2 to 8 paired seeds with a noise of 0.6 to 1.2 points each; 4 or 5 rounds a cycle, "
    "late by 4 % of it at most; 15 % late, shared b2 and experts b1 cost 0.1 % instead of gaining "
    "3.9). Nobody has measured it for a large model; ? was not tried."
)


def notes_of(table: LinkTable) -> tuple[str, ...]:
    """Notes that explain the tables."""
    if not table.others:
        best = table.best
        settings = (
            f"{best.setting.shared} for shared tensors and {best.setting.experts} for experts"
        )
        none = f"No setting that is known reaches {table.wanted:.1%}; the best is {settings}, "
        return ASSUMPTIONS, f"{none}{best.plan.utilisation:.1%}."
    return ASSUMPTIONS, COLUMNS, PRICES


def print_link(console: Console, run: RunConfig, table: LinkTable) -> None:
    """Prints both tables and the notes, for people."""
    console.print(link_table(run, table))
    if table.others:
        console.print(settings_table(table))
    for note in notes_of(table):
        console.print(note, style="dim")


def _time(seconds: float) -> str:
    return duration(seconds) if seconds >= 10 else f"{seconds:.1f} s"


PARTS = ("products", "waiting", "tokens", "outputs", "stream", "sums", "updates")
"""The parts of a step's time, by the names of the fields of `StepTime`."""


def workers_table(run: RunConfig, planned: RunPlan) -> Table:
    """The memory that each worker needs at the peak of a step, for people."""
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
    """The parts that a worker of each pipeline stage holds, in words and bytes."""
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
    """Every way to cut the model over the workers, for people, the chosen way first."""
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
    """Figures of the workers for scripts. Bytes are those of one worker."""
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
        "ways": [_rung_figures(run, rung) for rung in (plan, *plan.others)],
    }


def _rung_figures(run: RunConfig, rung: Rung) -> dict[str, Any]:
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
