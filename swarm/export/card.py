"""The model card of an export: a README.md for Hugging Face's hub."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Iterator, Sequence

from swarm.experts import expert_unit
from swarm.export.facts import ExportFacts
from swarm.protocol.records.printable import printable, ranges

CURVE_FILE = "loss.svg"
WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 32, 44
"""Margins around the drawing. All sizes here are in pixels."""
TICKS = 4
HEAD = (
    f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
    f'height="{HEIGHT}" role="img" font-family="sans-serif" font-size="12"'
)


def curve(losses: Sequence[tuple[int, float]], title: str) -> str:
    """An SVG of losses by round.

    Args:
        losses: (round, nats per token), ascending and at least one.
        title: the text above the drawing, without characters that need escaping.
    """
    rounds, values = [each[0] for each in losses], [each[1] for each in losses]
    x_low, x_high = rounds[0], max(rounds[-1], rounds[0] + 1)
    y_low, y_high = min(values), max(values)
    if y_high - y_low < 1e-6:
        y_low, y_high = y_low - 0.5, y_high + 0.5

    def x(round_: float) -> float:
        return LEFT + (round_ - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def y(loss: float) -> float:
        return HEIGHT - BOTTOM - (loss - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    points = " ".join(f"{x(round_):.1f},{y(loss):.1f}" for round_, loss in losses)
    marks = [
        f'<circle cx="{x(round_):.1f}" cy="{y(loss):.1f}" r="2.5" fill="#1f6feb">'
        f"<title>round {round_}: {loss:.4f}</title></circle>"
        for round_, loss in losses
    ]
    lines, words = [], []
    for tick in range(TICKS + 1):
        loss = y_low + (y_high - y_low) * tick / TICKS
        lines.append(f'<path d="M{LEFT} {y(loss):.1f}H{WIDTH - RIGHT}" stroke="#d0d7de"/>')
        words.append(_word(LEFT - 8, y(loss) + 4, f"{loss:.3f}", "end"))
    for round_ in sorted({round(x_low + (x_high - x_low) * k / TICKS) for k in range(TICKS + 1)}):
        words.append(_word(x(round_), HEIGHT - BOTTOM + 18, str(round_), "middle"))
    words.append(_word(LEFT, TOP - 12, title, "start"))
    words.append(_word((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "round", "middle"))
    return "\n".join(
        [
            f"<svg {HEAD}>",
            f"<title>{title}</title>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
            *lines,
            f'<polyline points="{points}" fill="none" stroke="#1f6feb" stroke-width="1.5"/>',
            *marks,
            *words,
            "</svg>\n",
        ]
    )


def _word(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#24292f">{text}</text>'


CARD_FILE = "README.md"
INTRODUCTION = (
    "A mixture-of-experts language model that peers have trained together without a server. "
    "Load it with Transformers:"
)
MAX_NAMED = 64
"""Most contributors that the card lists. The card names the number of further contributors."""


def card(facts: ExportFacts) -> str:
    """The text of README.md.

    Peers choose their own names, so names are made harmless in Markdown and HTML.
    """
    run, manifest = facts.model.run, facts.model.manifest
    lines = [
        *_front_matter(facts),
        "",
        f"# {run.run.name}, round {manifest.round}",
        "",
        INTRODUCTION,
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained("PATH_OF_THIS_FOLDER")',
        'tokenizer = AutoTokenizer.from_pretrained("PATH_OF_THIS_FOLDER")',
        "```",
        "",
        "## Where it comes from",
        "",
        *_table(("", ""), _origin(facts)),
        "",
        *_losses(facts),
        "## Contributors",
        "",
        *_contributors(facts),
        "",
        "## Configuration",
        "",
        *_table(("setting", "value"), _settings(facts)),
    ]
    return "\n".join(lines) + "\n"


def _front_matter(facts: ExportFacts) -> list[str]:
    """The metadata for the hub. Strings in JSON's form are valid YAML."""
    license_line = [f"license: {json.dumps(facts.form.license)}"] if facts.form.license else []
    return [
        "---",
        *license_line,
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags:",
        "- mixture-of-experts",
        "- decentralized-training",
        "---",
    ]


def _origin(facts: ExportFacts) -> Iterator[tuple[str, str]]:
    run, manifest = facts.model.run, facts.model.manifest
    yield "run", f"`{facts.run_id}`"
    yield "round", f"{manifest.round} of {run.run.rounds}"
    yield "manifest", f"`{manifest.digest}`"
    yield "height", str(manifest.height)
    yield "steps", f"{manifest.step:,}"
    yield "tokens seen", f"{manifest.tokens:,}"
    if waiting := [expert for expert, owners in manifest.owners.items() if not owners]:
        versions = {manifest.entries[expert_unit(expert)].version for expert in waiting}
        since = f"frozen since round {min(versions)}"
        yield "experts without an owner", f"{ranges(sorted(waiting))}, {since} at the earliest"
    kind = facts.form.dtype
    yield "weights", "as peers exchange them" if kind == "agreed" else kind
    if facts.val_loss is not None:
        who = "measured by the exporter" if facts.is_measured else "by a peer's word"
        yield "held-out loss", f"{_loss(facts, facts.val_loss)}, {who}"
    yield "license", _plain(facts.form.license) if facts.form.license else "not stated"


def _loss(facts: ExportFacts, nats: float) -> str:
    text = f"{nats:.4f} nats per token"
    if facts.told.bits_per_byte_of_nat is not None:
        text += f", {nats * facts.told.bits_per_byte_of_nat:.4f} bits per byte"
    return text


def _losses(facts: ExportFacts) -> list[str]:
    if not facts.losses:
        return []
    (first, before), (last, after) = facts.losses[0], facts.losses[-1]
    said = f"Held-out loss, as peers have published it: round {first}: {_loss(facts, before)}; "
    own = " (measured by the exporter)" if facts.is_measured else ""
    said += f"round {last}: {_loss(facts, after)}{own}."
    return ["## Loss", "", said, "", f"![Held-out loss by round]({CURVE_FILE})", ""]


def _contributors(facts: ExportFacts) -> list[str]:
    manifest = facts.model.manifest
    if not manifest.contributors:
        return ["This is the model from which the run began."]
    work = sorted(manifest.work.items(), key=lambda item: (-item[1], item[0]))
    rows = [
        (f"`{_plain(peer)}`", _plain(facts.names.get(peer, "")), f"{tokens:,}")
        for peer, tokens in work[:MAX_NAMED]
    ]
    more = len(work) - len(rows)
    said = f"{len(work)} of {len(manifest.members)} members have worked for this round."
    cut = ["", f"and {more} more"] if more > 0 else []
    return [said, "", *_table(("peer", "name", "tokens in this round"), rows), *cut]


def _settings(facts: ExportFacts) -> Iterator[tuple[str, str]]:
    for section, values in facts.model.run.model_dump(mode="json", exclude_none=True).items():
        named = values.items() if isinstance(values, dict) else [("", values)]
        for key, value in named:
            yield f"`{section}.{key}`".replace(".`", "`"), f"`{json.dumps(value)}`"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    yield from (f"| {' | '.join(row)} |" for row in rows)


def _plain(text: str) -> str:
    """Foreign text with all markup of Markdown and HTML made harmless."""
    return re.sub(r"([\\`*_{}\[\]()#+!|~<>:-])", r"\\\1", html.escape(printable(text), quote=False))
