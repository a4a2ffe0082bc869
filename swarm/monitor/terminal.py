"""The live view of a swarm in a terminal, from 80 x 24 characters up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from swarm.monitor import metrics
from swarm.monitor.health import causes_of
from swarm.monitor.snapshot import Agreement, Coverage, Merge, PeerRow, Snapshot
from swarm.protocol.records.printable import PEER_ID, printable, ranges
from swarm.protocol.records.records import PeerRecord, PeerState, WorkersFigures
from swarm.protocol.values.manifest import PeerId

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of each dot, by row and column of a cell. Source: Unicode, block U+2800."""
EMPTY = 0x2800

Point = tuple[float, float]


def braille(points: Sequence[Point], width: int, height: int) -> list[str]:
    """A line through (x, y) points, ascending in x. The largest y touches the top.

    Returns:
        `height` strings of `width` characters.
    """
    cells = [[0] * width for _ in range(height)]
    if points and width > 0 and height > 0:
        dots = _scaled(points, 2 * width - 1, 4 * height - 1)
        for start, stop in zip(dots, dots[1:] or dots, strict=False):
            for column, row in _line(start, stop):
                cells[row // 4][column // 2] |= DOTS[row % 4][column % 2]
    return ["".join(chr(EMPTY + bits) for bits in row) for row in cells]


def _scaled(points: Sequence[Point], columns: int, rows: int) -> list[tuple[int, int]]:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    left, top = min(xs), max(ys)
    across, down = (max(xs) - left) or 1.0, (top - min(ys)) or 1.0
    return [
        (round((x - left) / across * columns), round((top - y) / down * rows)) for x, y in points
    ]


def _line(start: tuple[int, int], stop: tuple[int, int]) -> list[tuple[int, int]]:
    """Every dot between two dots, by linear interpolation."""
    (x0, y0), (x1, y1) = start, stop
    count = max(abs(x1 - x0), abs(y1 - y0), 1)
    return [
        (round(x0 + (x1 - x0) * k / count), round(y0 + (y1 - y0) * k / count))
        for k in range(count + 1)
    ]


def workers_line(name: str, workers: WorkersFigures) -> Text:
    """The waits of a peer's workers, and the workers that the others wait for."""
    said = f"{printable(name)}: {workers.number}, {workers.step_s:.3g} s a step"
    said += f", {sum(workers.shares.values()):.0%} {metrics.BETWEEN.title}"
    if workers.bubble is not None and workers.expected is not None:
        said += f", {metrics.BUBBLE.title} {workers.bubble:.0%}"
        said += f" ({workers.expected:.0%} with even stages)"
    if workers.idle:
        said += f", fewer micro-batches: {ranges(workers.idle)}"
    line = Text.assemble(("workers  ", "dim"), said)
    return line.append(f"; {printable(workers.why)}", style="yellow") if workers.why else line


COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red", "bright_cyan", "bright_magenta")
AGREEMENT_STYLES = {
    Agreement.EQUAL: "green",
    Agreement.BEHIND: "yellow",
    Agreement.AHEAD: "yellow",
    Agreement.DIFFERENT: "bold white on red",
}
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
MAX_NAMED = 4
"""Most peers with the same text that are named. More peers are only counted."""
MIN_ROUNDS = 20
"""Least number of rounds in the loss curve, if the run has that many."""
UNKNOWN_OWNER = "?"
"""Shown for an owner that the newest manifest names and that has no record."""
NO_OWNER = "wait"
"""Shown as the owner of an expert that fits no machine."""

Keys = Mapping[PeerId, Text]


def keys_of(rows: Sequence[PeerRow]) -> Keys:
    """A coloured letter (or number) for each peer, which stands for the peer in the view."""
    names = [*LETTERS, *(str(number) for number in range(len(LETTERS), len(rows)))]
    return {
        row.record.peer_id: Text(names[position], style=f"bold {COLOURS[position % len(COLOURS)]}")
        for position, row in enumerate(rows)
    }


def header(snapshot: Snapshot, width: int) -> list[Text]:
    """Two lines: the run, and its progress."""
    rows, strangers = snapshot.peers, len(snapshot.peers) - len(snapshot.speaking)
    first = Text.assemble(
        (printable(snapshot.run_id or f"{snapshot.name} (gathers peers)"), "bold"),
        "  generation ",
        (printable(snapshot.generation[:12]), "bold"),
        f"  {len(rows)} peers{f', {strangers} no member' if strangers else ''}  ",
        (amount(metrics.swarm_tokens_per_s(snapshot)), "bold"),
        f" {metrics.TOKENS_PER_S.title}",
    )
    equal = sum(row.agreement is Agreement.EQUAL for row in rows)
    different = sum(row.agreement is Agreement.DIFFERENT for row in snapshot.speaking)
    done = round(snapshot.round / max(snapshot.rounds_total, 1) * 20)
    second = Text.assemble(
        f"{metrics.ROUND.title} ",
        (f"{snapshot.round}/{snapshot.rounds_total} ", "bold"),
        ("━" * min(done, 20), "green"),
        ("━" * (20 - min(done, 20)), "bright_black"),
        f"  {metrics.DIGEST.title} ",
        (printable(snapshot.manifest_digest[: digest_width(width)]), "green"),
        f"  {equal} of {len(rows)} equal",
        (f", {different} DIFFERENT" if different else "", "bold red"),
    )
    return [cut(first, width), cut(second, width)]


def peers_table(rows: Sequence[PeerRow], keys: Keys, width: int) -> Table:
    """One line for each peer."""
    wide = width >= 120
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, width=width, header_style="dim")
    columns = [("", 2 if len(keys) > len(LETTERS) else 1), ("peer", 24 if wide else 10)]
    columns += [("state", 11), (metrics.ROUND.title, 5)]
    columns += [(metrics.DIGEST.title, digest_width(width))]
    columns += [(metrics.OWNED.title, 14 if wide else 8), (metrics.LOSS.title, 6)]
    columns += [(metrics.TOKENS_PER_S.title, 8), (metrics.SENT.title, 5)]
    columns += [(metrics.RECEIVED.title, 8)]
    columns += [(m.title, 7) for m in (metrics.SKIPPED, metrics.REFUSED) if wide]
    texts = ("", "peer", "state", metrics.DIGEST.title, metrics.OWNED.title)
    for title, column_width in columns:
        table.add_column(
            title,
            width=column_width,
            justify="left" if title in texts else "right",
            no_wrap=True,
            overflow="ellipsis",
        )
    for row in rows:
        table.add_row(*_cells(row, keys, wide, digest_width(width)))
    return table


def _cells(row: PeerRow, keys: Keys, wide: bool, digits: int) -> list[Text]:
    record, style = row.record, AGREEMENT_STYLES[row.agreement]
    loss = "" if record.loss is None else f"{record.loss:.3f}"
    cells = [
        keys[record.peer_id],
        Text(_name(record.name or record.peer_id, 24 if wide else 10)),
        Text(_state(row)),
        Text(str(record.round)),
        Text(record.manifest_digest[:digits], style=style),
        Text(ranges(record.owned_experts)),
        Text(loss),
        Text(amount(record.tokens_per_s)),
        Text(amount(record.blob_bytes_sent)),
        Text(amount(record.blob_bytes_received)),
    ]
    if wide:
        cells += [Text(str(record.steps_skipped)), Text(str(sum(record.refused.values())))]
    return cells


def _state(row: PeerRow) -> str:
    """The peer's state, or how many of ten rounds have counted a trainee."""
    state = row.record.state
    is_usual = state in (PeerState.TRAINING, PeerState.AVERAGING)
    return (
        f"trainee {row.counted}"
        if row.votes is False and is_usual
        else state.value.replace("_", " ")
    )


def _name(name: str, width: int) -> str:
    """The name, cut in the middle: names begin alike, and end with a part of the peer id."""
    name = printable(name)
    return name if len(name) <= width else f"{name[: width - 6]}…{name[-5:]}"


def experts_map(snapshot: Snapshot, keys: Keys, width: int, max_lines: int) -> list[Text]:
    """Owners of each expert, and the round of its last change. Ranges if the map is too large."""
    cells = [
        (
            Text(str(row.expert), style="dim"),
            Text("").join(keys.get(o, Text(UNKNOWN_OWNER)) for o in row.owners)
            or Text(NO_OWNER, style="yellow"),
            Text("?" if row.version is None else str(row.version), style="dim"),
        )
        for row in snapshot.experts
    ]
    if not cells:
        return [Text("no experts are known yet", style="dim")]
    cell_width = max(text.cell_len for cell in cells for text in cell) + 1
    titles = ("experts", "owner", "version")
    per_line = max((width - 9) // cell_width, 1)
    lines = []
    for start in range(0, len(cells), per_line):
        for title, column in zip(
            titles, zip(*cells[start : start + per_line], strict=True), strict=True
        ):
            line = Text(f"{title:<9}", style="dim")
            for text in column:
                line.append_text(text).append(" " * (cell_width - text.cell_len))
            lines.append(line)
    if len(lines) <= max_lines:
        return lines
    return [cut(_owner_ranges(snapshot, keys), width)]


def _owner_ranges(snapshot: Snapshot, keys: Keys) -> Text:
    owned: dict[PeerId, list[int]] = {}
    for row in snapshot.experts:
        for owner in row.owners:
            owned.setdefault(owner, []).append(row.expert)
    line = Text("experts  ", style="dim")
    for owner in sorted(owned):
        line.append_text(keys.get(owner, Text(UNKNOWN_OWNER)))
        line.append(f" {ranges(owned[owner])}  ")
    if waiting := [row.expert for row in snapshot.experts if not row.owners]:
        line.append(f"{NO_OWNER} {ranges(waiting)}", style="yellow")
    return line


def loss_plot(losses: Sequence[tuple[int, float]], width: int, height: int) -> list[Text]:
    """The held-out loss by round, with its newest value in the title.

    Only the newer half of a long run is shown. Beside the high losses of the first rounds, later
    losses would be a flat line.
    """
    if not losses:
        title = Text(f"{metrics.VAL_LOSS.title}: none yet", style="dim")
        return [title, *(Text("") for _ in range(height - 1))]
    losses = losses[-max(MIN_ROUNDS, len(losses) // 2) :]
    (oldest_round, _), (newest_round, newest) = losses[0], losses[-1]
    rounds = f", rounds {oldest_round}-{newest_round}"
    whole = f" {metrics.VAL_LOSS.unit}{rounds}"
    title = Text.assemble(
        (f"{metrics.VAL_LOSS.title}  ", "dim"),
        (f"{newest:.3f}", "bold"),
        (whole if len(whole) + 22 <= width else rounds, "dim"),
    )
    curve = braille([(float(x), y) for x, y in losses], width - 7, height - 1)
    values = [loss for _, loss in losses]
    labels = [f"{max(values):6.2f} ", *[" " * 7] * (height - 3), f"{min(values):6.2f} "]
    lines = [
        Text.assemble((label, "dim"), (dots, "green"))
        for label, dots in zip(labels, curve, strict=False)
    ]
    return [cut(title, width), *lines]


def fact_lines(snapshot: Snapshot, width: int) -> list[Text]:
    """Traffic, merges and refusals, the most informative first."""
    a_round = metrics.bytes_per_round(snapshot)
    sent, received = ("–", "–") if a_round is None else (f"{amount(each)}B" for each in a_round)
    rows = [row.record for row in snapshot.speaking]
    control = sum(row.control_bytes_sent for row in rows)
    lines = [
        Text.assemble(("a round  ", "dim"), f"{sent} out, {received} in, mean"),
        Text.assemble(("control  ", "dim"), f"{amount(control)}B sent by all peers"),
    ]
    if snapshot.losses and snapshot.bits_per_byte_of_nat:
        bits = snapshot.losses[-1][1] * snapshot.bits_per_byte_of_nat
        lines.append(Text.assemble(("held out  ", "dim"), f"{bits:.3f} bits per byte"))
    lines += _score_lines(snapshot)
    if snapshot.coverage:
        lines.append(_coverage_line(snapshot.coverage))
    moments = sum(row.moments_bytes_sent for row in rows)
    zeros = sum(row.zero_moments for row in rows)
    if moments or zeros:
        told = Text.assemble(
            (f"{metrics.MOMENTS.title}  ", "dim"), f"{amount(moments)}B sent by all peers"
        )
        told.append(f", {zeros} experts began with {metrics.ZERO_MOMENTS.title}" if zeros else "")
        lines.append(told)
    lines += [*_routing_lines(snapshot), *_machine_lines(rows)]
    skipped = sum(row.steps_skipped for row in rows)
    spikes = sum(row.grad_spikes for row in rows)
    if skipped or spikes:
        said = f"{skipped} steps {metrics.SKIPPED.title}"
        said += f", {spikes} {metrics.SPIKES.title}" if spikes else ""
        lines.append(Text(said, style="yellow"))
    refused = sum((Counter(row.refused) for row in rows), Counter[str]())
    if refused:
        said = ", ".join(f"{reason} {count}" for reason, count in sorted(refused.items()))
        lines.append(Text(f"{metrics.REFUSED.title}: {printable(said)}", style="yellow"))
    for merge in reversed(snapshot.merges):
        lines += _merge_lines(merge)
    return [cut(line, width) for line in lines]


def _machine_lines(rows: Sequence[PeerRecord]) -> list[Text]:
    """Links to others, lost work, and engines."""
    rtts = [row.link.rtt_ms for row in rows if row.link and row.link.rtt_ms is not None]
    lines = []
    if rtts:
        line = Text.assemble(
            (f"{metrics.RTT.title}  ", "dim"), f"{min(rtts):.0f} to {max(rtts):.0f} ms"
        )
        downs = [row.link.down_mbit for row in rows if row.link and row.link.down_mbit]
        if downs:
            line.append(f", slowest {metrics.RATE.title} {min(downs):.0f} {metrics.RATE.unit} down")
        lines.append(line)
    if lost := sum(row.tokens_lost for row in rows):
        said = f"{metrics.TOKENS_LOST.title}: {amount(lost)} by all peers"
        lines.append(Text(said, style="yellow"))
    engines = Counter(row.engine for row in rows if row.engine)
    if engines:
        said = ", ".join(f"{printable(engine)} ({count})" for engine, count in engines.items())
        lines.append(Text.assemble((f"{metrics.ENGINE.title}  ", "dim"), said))
    lines += [workers_line(row.name, row.workers) for row in rows if row.workers][:MAX_NAMED]
    pairs = [pair for row in rows if row.routing for pair in row.routing.pairs]
    if pairs:
        first, second, alike = max(pairs, key=lambda pair: pair[2])
        told = f"{first} and {second}, {alike / 1000:.2f}"
        lines.append(Text.assemble(("most alike  ", "dim"), told))
    return lines


def _score_lines(snapshot: Snapshot) -> list[Text]:
    """The first score of each task and metric, and its publisher."""
    first = {(score.task, score.metric): score for score in reversed(snapshot.scores)}
    return [
        Text.assemble(
            (f"{metrics.SCORE.title}  ", "dim"),
            f"{printable(score.task)} {printable(score.metric)} {score.value:.4g}, round "
            f"{score.round}, by {printable(snapshot.called(score.publisher))}",
            (", no member" if score.member is False else "", "yellow"),
        )
        for score in reversed(first.values())
    ]


def _coverage_line(coverage: Coverage) -> Text:
    """Counted, dealt and open shares of a lap. The rest is not dealt yet."""
    line = Text.assemble(
        (f"{metrics.COVERAGE.title}  ", "dim"),
        f"{100 * coverage.share:.1f}% of lap {coverage.laps + 1}",
        f", {100 * coverage.dealt / coverage.windows:.1f}% being read",
    )
    if coverage.open:
        line.append(f", {100 * coverage.open / coverage.windows:.1f}% open")
    return line


def _routing_lines(snapshot: Snapshot) -> list[Text]:
    found = [row.record.routing for row in snapshot.speaking if row.record.routing]
    if not found:
        return []
    line = Text.assemble(
        (f"{metrics.MAX_LOAD.title}  ", "dim"),
        f"{max(each.max_load for each in found):.2f}x",
    )
    if idle := max(each.idle_experts for each in found):
        line.append(f", {idle} {metrics.IDLE.title}", style="yellow")
    if dropped := sum(each.dropped for each in found) / len(found):
        line.append(f", {100 * dropped:.1f}% {metrics.DROPPED.title}")
    alike = [each.similarity for each in found if each.similarity is not None]
    if alike:
        line.append(f", {metrics.SIMILARITY.title} {sum(alike) / len(alike):.2f}")
    return [line]


def _merge_lines(merge: Merge) -> list[Text]:
    title = Text.assemble(
        (f"merge {merge.merged:<2} ", "dim"),
        f"step {merge.step}, alpha {merge.alpha:.3g}",
    )
    donors = [
        f"{expert}<{','.join(map(str, layers[0]))}"
        for expert, layers in merge.donors.items()
        if layers
    ]
    if not donors:
        return [title]
    return [title, Text(f"   layer 0: {' '.join(donors)}", style="dim")]


def reason_lines(snapshot: Snapshot, keys: Keys, width: int, max_lines: int) -> list[Text]:
    """Faults, then the last decisions of the newest manifest and of each peer, equal texts once."""
    wrong = [Text(printable(cause.text), style="yellow") for cause in causes_of(snapshot)]
    said: dict[str, list[Text]] = {reason: [] for reason in snapshot.reasons}
    rows = sorted(snapshot.peers, key=lambda row: row.agreement is not Agreement.EQUAL)
    for row in sorted(rows, key=lambda row: row.votes is None):
        if row.record.reason:
            said.setdefault(row.record.reason, []).append(keys[row.record.peer_id])
    lines = [
        Text.assemble(("why ", "dim"), _who(who), *_with_keys(reason, keys))
        for reason, who in said.items()
    ]
    return _wrapped([*wrong, *lines][:max_lines], width, max_lines)


def _wrapped(lines: Sequence[Text], width: int, max_lines: int) -> list[Text]:
    """Lines cut to a width. While lines are left, a long line continues on the next."""
    shown, room = [], max_lines - len(lines)
    for line in lines:
        while room and line.cell_len > width:
            end = line.plain.rfind(" ", width // 2, width)
            end = end if end > 0 else width
            shown.append(line[:end])
            line = Text("    ").append_text(line[end:])
            room -= 1
        shown.append(cut(line, width))
    return shown


def _with_keys(reason: str, keys: Keys) -> list[Text]:
    """The sentence with each peer's key in place of the peer's long id."""
    parts = PEER_ID.split(printable(reason))
    return [keys.get(part, Text(_short(part))) for part in parts]


def _short(part: str) -> str:
    return f"…{part[-6:]}" if PEER_ID.fullmatch(part) else part


def _who(who: Sequence[Text]) -> Text:
    if len(who) > MAX_NAMED:
        return Text(f"{len(who)} peers: ")
    return Text(" ").join([*who, Text("")])


def digest_width(width: int) -> int:
    """Number of digits of a digest that are shown."""
    return 16 if width >= 120 else 8


def amount(value: float) -> str:
    """A number in at most five characters: `812`, `16.2k`, `3.1M`."""
    for unit in ("", "k", "M", "G", "T"):
        if value < 999.5:
            return f"{value:.0f}{unit}" if not unit or value >= 99.95 else f"{value:.1f}{unit}"
        value /= 1000
    return f"{value:.0f}P"


def cut(line: Text, width: int) -> Text:
    """The line, cut to the screen."""
    line.truncate(width, overflow="ellipsis")
    line.no_wrap = True
    return line


MIN_PLOT_LINES = 5
MAX_PLOT_LINES = 18
TALL = 32


def render(snapshot: Snapshot, *, width: int, height: int) -> RenderableType:
    """The whole screen: at most `height` lines of `width` characters.

    Lines that do not fit are left out from the bottom of each part. Peers beyond the last line are
    counted, experts become ranges, and older merges and reasons are dropped.
    """
    keys = keys_of(snapshot.peers)
    tall = height >= TALL
    experts = experts_map(snapshot, keys, width, max_lines=6 if tall else 3)
    reasons = reason_lines(snapshot, keys, width, max_lines=6 if tall else 3)
    # Two lines of header, one line of column titles, three empty lines.
    left = height - 6 - len(experts) - len(reasons)
    rows = snapshot.peers[: max(left - MIN_PLOT_LINES, 1)]
    hidden = len(snapshot.peers) - len(rows)
    if hidden:
        rows, hidden = rows[:-1], hidden + 1
    more = [Text(f"   and {hidden} more peers", style="dim")] if hidden else []
    plot_lines = min(left - len(rows) - len(more), MAX_PLOT_LINES)
    return Group(
        *header(snapshot, width),
        Text(""),
        peers_table(rows, keys, width),
        *more,
        Text(""),
        *experts,
        Text(""),
        _side_by_side(snapshot, width, max(plot_lines, MIN_PLOT_LINES)),
        *reasons,
    )


def waiting(text: str) -> RenderableType:
    """The screen before there is anything to show."""
    return Text(text, style="dim")


def _side_by_side(snapshot: Snapshot, width: int, height: int) -> Table:
    """The loss curve on the left, facts on the right."""
    plot_width = min(width * 55 // 100, 90)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=plot_width, no_wrap=True)
    table.add_column(width=width - plot_width - 2, no_wrap=True)
    plot = loss_plot(snapshot.losses, plot_width, height)
    facts = fact_lines(snapshot, width - plot_width - 2)[:height]
    facts += [Text("")] * (height - len(facts))
    for left, right in zip(plot, facts, strict=False):
        table.add_row(left, right)
    return table
