// The map: a column for each expert, a row for each peer. Marks are owners, their colour the age of
// the expert's value; the shade behind is the share of that peer's tokens that the expert got.

import { byId, colour, element, fill, say, swatch } from "./dom.js";
import { ageText, HOT, matrixOf, OLD_ROUNDS, ownersOf, shareText, wordOf } from "./experts.js";

const BARS = 46;
const AXIS = 20;
const GAP = 8;
let matrix = null;
let layout = null;
let chosen = null;
let signature = "";

export function drawMap(state) {
  matrix = matrixOf(state);
  layout = layoutOf(matrix, byId("map").clientWidth);
  paint();
  legend();
  table();
  tell();
}

function layoutOf({ rows, experts }, width) {
  const label = width < 600 ? 30 : 176;
  const cell = Math.min(Math.max((width - label - 2) / Math.max(experts.length, 1), 8), 160);
  const row = rows.length <= 6 ? 28 : rows.length <= 12 ? 22 : rows.length <= 40 ? 16 : rows.length <= 80 ? 12 : 9;
  const top = BARS + GAP;
  return { label, cell, row, top, width: label + cell * experts.length + 1, height: top + row * rows.length + AXIS };
}

function paint() {
  const canvas = byId("map-canvas");
  const scale = devicePixelRatio || 1;
  const { width, height } = layout;
  const wanted = `${width} ${height} ${scale}`;
  if (signature !== wanted) {
    signature = wanted;
    canvas.width = Math.ceil(width * scale);
    canvas.height = Math.ceil(height * scale);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  paintBars(pen);
  paintRows(pen);
  paintAxis(pen);
  if (chosen) paintChosen(pen);
}

function paintBars(pen) {
  const { label, cell } = layout;
  const most = Math.max(HOT * 1.1, ...matrix.experts.map((expert) => expert.times ?? 0));
  const y = (times) => BARS - (BARS - 4) * (times / most);
  for (const expert of matrix.experts) {
    const x = label + expert.column * cell;
    if (expert.share === null) continue;
    const word = wordOf(expert);
    pen.fillStyle = colour(word === "hot" ? "--warn" : word === "dead" ? "--bad" : "--share");
    if (word === "dead") {
      pen.fillRect(x + cell * 0.5 - 1, BARS - 9, 2, 9);
      pen.fillRect(x + 1, BARS - 2, cell - 2, 2);
    } else {
      pen.fillRect(x + 1, y(expert.times), Math.max(cell - 2, 2), BARS - y(expert.times));
    }
  }
  if (!matrix.telling) return;
  pen.strokeStyle = colour("--dim");
  pen.setLineDash([2, 3]);
  pen.beginPath();
  pen.moveTo(label, Math.round(y(1)) + 0.5);
  pen.lineTo(layout.width, Math.round(y(1)) + 0.5);
  pen.stroke();
  pen.setLineDash([]);
  text(pen, layout.label > 100 ? "share of tokens; even ┄" : "", layout.label - 8, y(1) + 4, "right", "--dim");
}

function paintRows(pen) {
  const { label, cell, row, top } = layout;
  matrix.rows.forEach((peer, k) => {
    const y = top + k * row;
    if (k % 2 === 0) {
      pen.fillStyle = colour("--stripe");
      pen.fillRect(0, y, layout.width, row);
    }
    for (const expert of matrix.experts) {
      const x = label + expert.column * cell;
      const share = peer.shares[expert.column];
      if (share) {
        pen.globalAlpha = Math.min(share / (HOT * matrix.even), 1) * 0.5;
        pen.fillStyle = colour("--share");
        pen.fillRect(x + 0.5, y + 0.5, cell - 1, row - 1);
        pen.globalAlpha = 1;
      }
      if (expert.owned.has(peer.id)) paintOwned(pen, peer, expert, x, y);
    }
    if (row >= 11) paintLabel(pen, peer, y + row / 2 + 4);
  });
}

function paintOwned(pen, peer, expert, x, y) {
  const { cell, row } = layout;
  const inset = cell > 16 && row > 16 ? 4 : cell > 10 ? 2.5 : 1;
  const w = Math.max(cell - 2 * inset, 3);
  const h = Math.max(row - 2 * inset, 3);
  pen.fillStyle = colour(!peer.there ? "--bad" : ageColour(expert.age));
  pen.beginPath();
  pen.roundRect(x + inset, y + inset, w, h, Math.min(3, w / 3));
  pen.fill();
}

function ageColour(age) {
  if (age === null) return "--dim";
  if (age > OLD_ROUNDS) return "--warn";
  return age <= 0 ? "--fresh" : age === 1 ? "--fresh-1" : "--fresh-2";
}

function paintLabel(pen, peer, y) {
  const wide = layout.label > 100;
  text(pen, peer.key, wide ? 22 : layout.label - 8, y, "right", peer.there ? "--text" : "--bad", true);
  if (!wide) return;
  let name = peer.name;
  while (name.length > 1 && pen.measureText(name).width > layout.label - 40) name = name.slice(0, -2) + "…";
  text(pen, name, 32, y, "left", peer.there ? "--dim" : "--bad");
}

function paintAxis(pen) {
  const { label, cell, height } = layout;
  const every = [1, 2, 4, 8, 16, 32, 64, 128].find((step) => step * cell >= 26) ?? 256;
  for (const expert of matrix.experts) {
    if (expert.column % every) continue;
    text(pen, String(expert.expert), label + (expert.column + 0.5) * cell, height - 5, "center", "--dim");
  }
}

function paintChosen(pen) {
  const { label, cell, row, top, height, width } = layout;
  const x = label + chosen.column * cell;
  pen.strokeStyle = colour("--text");
  pen.lineWidth = 1;
  pen.strokeRect(Math.round(x) + 0.5, 0.5, Math.round(cell) - 1, height - AXIS);
  if (chosen.row !== null) pen.strokeRect(0.5, top + chosen.row * row + 0.5, width - 1.5, row - 1);
  const near = matrix.experts.find((expert) => expert.expert === matrix.experts[chosen.column]?.nearest);
  if (!near) return;
  pen.setLineDash([3, 2]);
  pen.strokeRect(Math.round(label + near.column * cell) + 0.5, 0.5, Math.round(cell) - 1, height - AXIS);
  pen.setLineDash([]);
}

function text(pen, words, x, y, align, name, bold = false) {
  pen.font = `${bold ? "600 " : ""}11px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace`;
  pen.textAlign = align;
  pen.fillStyle = colour(name);
  pen.fillText(words, x, y);
}

function legend() {
  const parts = [
    swatch("fresh", "owner, changed this round"),
    swatch("fresh-2", "1 to 3 rounds ago"),
    swatch("old", "older"),
    swatch("gone", "owner absent, or dead"),
  ];
  if (matrix.telling) parts.push(swatch("share", "share of a peer’s tokens"), swatch("hot", `hot: over ${HOT}× even`));
  byId("map-legend").replaceChildren(...parts);
}

function table() {
  fill(
    "experts",
    [
      { title: "expert", cell: (e) => element("th", { scope: "row" }, String(e.expert)) },
      { title: "owners", cell: (e) => ownersOf(e) },
      { title: "changed", cell: (e) => ageText(e) },
      { title: "version", right: true, cell: (e) => String(e.version ?? "–") },
      { title: "share", right: true, cell: (e) => shareText(e) },
      { title: "is", cell: (e) => wordOf(e) },
      { title: "alike", right: true, cell: (e) => (e.alike ? `${e.alike.expert} (${(e.alike.permille / 1000).toFixed(2)})` : "–") },
      { title: "nearest", right: true, cell: (e) => String(e.nearest ?? "–") },
    ],
    matrix.experts,
  );
}

/** One sentence: of the chosen expert, else of all. */
function tell() {
  const expert = chosen && matrix.experts[chosen.column];
  if (expert) {
    const peer = chosen.row === null ? null : matrix.rows[chosen.row];
    const parts = [`Expert ${expert.expert}, ${wordOf(expert)}: owned by ${ownersOf(expert)}`, `changed ${ageText(expert)}`];
    if (expert.share !== null) parts.push(`gets ${shareText(expert)} of all tokens, ${expert.times.toFixed(2)}× even`);
    if (peer?.shares.length) parts.push(`${peer.shares[expert.column]} ‰ of those of ${peer.key} ${peer.name}`);
    if (expert.alike) parts.push(`does most like expert ${expert.alike.expert} on the tokens they share, CKA ${(expert.alike.permille / 1000).toFixed(2)}`);
    if (expert.nearest !== null) parts.push(`most like expert ${expert.nearest} at the last merge`);
    say("map-said", `${parts.join("; ")}.`);
    return;
  }
  const counts = new Map();
  for (const each of matrix.experts) counts.set(wordOf(each), (counts.get(wordOf(each)) ?? 0) + 1);
  const odd = [...counts].filter(([word]) => word !== "well").map(([word, n]) => `${n} ${word}`);
  const oldest = matrix.experts.reduce((a, b) => ((b.age ?? -1) > (a?.age ?? -1) ? b : a), null);
  const parts = [`${matrix.experts.length} experts: ${odd.join(", ") || "all well"}`];
  if (oldest && oldest.age > 0) parts.push(`the oldest is expert ${oldest.expert}, changed ${ageText(oldest)}`);
  parts.push("point at the map, or use the arrow keys, to ask about one");
  say("map-said", `${parts.join("; ")}.`);
}

function choose(column, row) {
  const inside = matrix && column >= 0 && column < matrix.experts.length;
  chosen = inside ? { column, row: row >= 0 && row < matrix.rows.length ? row : null } : null;
  paint();
  tell();
}

byId("map").addEventListener("pointermove", (event) => {
  if (!layout) return;
  const box = byId("map-canvas").getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  choose(Math.floor((x - layout.label) / layout.cell), Math.floor((y - layout.top) / layout.row));
});
byId("map").addEventListener("pointerleave", () => matrix && choose(-1, -1));
byId("map").addEventListener("keydown", (event) => {
  const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  if (event.key === "Escape") choose(-1, -1);
  if (!step || !matrix) return;
  event.preventDefault();
  const from = chosen ?? { column: step[0] > 0 ? -1 : 0, row: null };
  const column = Math.min(Math.max(from.column + step[0], 0), matrix.experts.length - 1);
  choose(column, Math.min(Math.max((from.row ?? -1) + step[1], step[1] ? 0 : -1), matrix.rows.length - 1));
  const x = layout.label + column * layout.cell;
  const place = byId("map");
  if (x < place.scrollLeft || x + layout.cell > place.scrollLeft + place.clientWidth) place.scrollLeft = x - place.clientWidth / 2;
});
