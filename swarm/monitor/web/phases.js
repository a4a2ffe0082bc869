// The last round of each peer, phase by phase; the peer that was busy longest comes first.

import { byId, element, fill, say, swatch } from "./dom.js";
import { called, keysOf, seconds, shown, speaking } from "./text.js";

const PHASES = ["joining", "training", "offering", "averaging", "merging", "adopting", "validating", "catching_up"];
const WAITING = "averaging";
const MAX_BARS = 14;

export function drawPhases(state) {
  const keys = keysOf(state.peers);
  const rows = speaking(state)
    .filter((peer) => peer.last_round)
    .map((peer) => ({ peer, round: peer.last_round, busy: busy(peer.last_round) }))
    .sort((a, b) => b.busy - a.busy);
  const names = [...new Set(rows.flatMap((row) => Object.keys(row.round.phases)))].sort((a, b) => place(a) - place(b));
  byId("phases-legend").replaceChildren(...names.map((name) => swatch(`phase ${kind(name)}`, shown(name).replace("_", " "))));
  const longest = Math.max(...rows.map((row) => total(row.round)), 1e-9);
  byId("phases").replaceChildren(...rows.slice(0, MAX_BARS).map((row) => bar(row, names, longest, keys)));
  say("phases-said", sentence(rows, state));
  fill(
    "phases-table",
    [
      { title: "peer", cell: (row) => element("th", { scope: "row" }, `${keys.get(row.peer.peer_id)} ${called(row.peer)}`) },
      { title: "round", right: true, cell: (row) => String(row.round.round) },
      { title: "counted", cell: (row) => (row.round.counted ? "yes" : `no: ${shown(row.round.why_not) || "no reason given"}`) },
      ...names.map((name) => ({ title: shown(name).replace("_", " "), right: true, cell: (row) => seconds(row.round.phases[name] ?? 0) })),
      { title: "all", right: true, cell: (row) => seconds(row.round.seconds) },
    ],
    rows,
  );
}

function busy(round) {
  return Object.entries(round.phases).reduce((sum, [name, s]) => sum + (name === WAITING ? 0 : s), 0);
}

function total(round) {
  return Object.values(round.phases).reduce((sum, s) => sum + s, 0);
}

function place(name) {
  const found = PHASES.indexOf(name);
  return found < 0 ? PHASES.length : found;
}

function kind(name) {
  return PHASES.includes(name) ? name : "other";
}

function bar({ peer, round }, names, longest, keys) {
  const parts = names.filter((name) => round.phases[name]).map((name) => {
    const part = element("i", { class: `phase ${kind(name)}`, title: `${shown(name)} ${seconds(round.phases[name])}` });
    part.style.width = `${(100 * round.phases[name]) / longest}%`;
    return part;
  });
  return element(
    "div",
    { class: round.counted ? "lane" : "lane out" },
    element("b", {}, keys.get(peer.peer_id)),
    element("span", { class: "who" }, called(peer)),
    element("span", { class: "track" }, ...parts),
    element("span", { class: "time" }, round.counted ? seconds(round.seconds) : "left out"),
  );
}

function sentence(rows, state) {
  if (!rows.length) return "No peer has finished a round yet.";
  const slowest = rows[0];
  const others = rows.slice(1).map((row) => row.busy).sort((a, b) => a - b);
  const usual = others.length ? others[others.length >> 1] : null;
  const most = Object.entries(slowest.round.phases).filter(([name]) => name !== WAITING).sort((a, b) => b[1] - a[1])[0];
  const parts = [`${called(slowest.peer)} was busy longest: ${seconds(slowest.busy)}, most of it ${shown(most?.[0] ?? "nothing")}`];
  if (usual !== null) parts.push(`the others’ median is ${seconds(usual)}`);
  if (rows.length > MAX_BARS) parts.push(`${rows.length - MAX_BARS} more are in the table`);
  const out = state.left_out.length;
  if (out) parts.push(`round ${state.round} went without ${out} of ${state.members} members`);
  for (const row of rows.filter((each) => each.round.why_not).slice(0, 3)) parts.push(`${called(row.peer)}: ${shown(row.round.why_not)}`);
  return `${parts.join("; ")}.`;
}
