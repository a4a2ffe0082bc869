// Curves by round, each with a table of the same figures.

import { byId, colour, element, fill, swatch } from "./dom.js";
import { amount, loss, seconds } from "./text.js";

const plots = new Map();
const HEIGHT = 220;
const MAX_ROWS = 200;

export function drawPlots(state) {
  const trained = state.rounds.filter((point) => point.train_loss !== null).map((point) => [point.round, point.train_loss]);
  plot("loss", loss, [
    { label: "held-out", name: "--accent", points: state.losses, width: 2 },
    { label: "training, mean over the peers", name: "--dim", points: trained, width: 1.25 },
  ]);
  const held = new Map(state.losses);
  const train = new Map(trained);
  const rounds = [...new Set([...held.keys(), ...train.keys()])].sort((a, b) => b - a).slice(0, MAX_ROWS);
  fill(
    "losses",
    [
      { title: "round", cell: (round) => element("th", { scope: "row" }, String(round)) },
      { title: "held-out", right: true, cell: (round) => loss(held.get(round)) },
      { title: "training", right: true, cell: (round) => loss(train.get(round)) },
    ],
    rounds,
  );
  plot("pace", amount, [
    { label: "the peers’ sum, tokens/s", name: "--blue", points: state.rounds.map((p) => [p.round, p.tokens_per_s]), width: 1.25 },
    { label: "entering the model, tokens/s", name: "--accent", points: state.rounds.filter((p) => p.committed_per_s !== null).map((p) => [p.round, p.committed_per_s]), width: 2 },
  ]);
  fill(
    "rounds",
    [
      { title: "round", cell: (p) => element("th", { scope: "row" }, String(p.round)) },
      { title: "took", right: true, cell: (p) => seconds(p.seconds) },
      { title: "tokens/s, sum", right: true, cell: (p) => amount(p.tokens_per_s) },
      { title: "into the model", right: true, cell: (p) => amount(p.committed_per_s) },
      { title: "contributors", right: true, cell: (p) => String(p.contributors ?? "–") },
      { title: "present", right: true, cell: (p) => String(p.present) },
    ],
    [...state.rounds].reverse().slice(0, MAX_ROWS),
  );
}

function plot(id, value, curves) {
  const place = byId(id);
  const newest = (points) => (points.length ? ` ${value(points.at(-1)[1])}` : " –");
  byId(`${id}-legend`).replaceChildren(...curves.map((c) => swatch(`line ${c.name.slice(2)}`, c.label + newest(c.points))));
  const xs = [...new Set(curves.flatMap((c) => c.points.map(([x]) => x)))].sort((a, b) => a - b);
  if (!xs.length) {
    plots.get(id)?.made.destroy();
    plots.delete(id);
    place.replaceChildren(element("p", { class: "none" }, "Nothing yet: it begins with the next round."));
    return;
  }
  const data = [xs, ...curves.map((c) => aligned(xs, new Map(c.points)))];
  const key = `${document.documentElement.dataset.scheme} ${place.clientWidth}`;
  const known = plots.get(id);
  if (known?.key === key) {
    known.made.setData(data);
    return;
  }
  known?.made.destroy();
  place.replaceChildren();
  plots.set(id, { key, made: new uPlot(options(place.clientWidth, curves, value, xs.length), data, place) });
}

function aligned(xs, points) {
  return xs.map((x) => points.get(x) ?? null);
}

function options(width, curves, value) {
  const axis = { stroke: colour("--dim"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px ui-monospace, monospace", size: 26 };
  return {
    width: Math.max(width, 120),
    height: HEIGHT,
    legend: { show: false },
    cursor: { drag: { x: false, y: false }, points: { size: 6 } },
    scales: { x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) } },
    axes: [
      { ...axis, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000] },
      { ...axis, size: 52, values: (_, ticks) => ticks.map((tick) => (value === amount ? amount(tick) : String(Number(tick.toFixed(3))))) },
    ],
    series: [
      {},
      ...curves.map((curve) => ({ label: curve.label, stroke: colour(curve.name), width: curve.width, spanGaps: true, points: { size: 4, fill: colour(curve.name) } })),
    ],
  };
}
