// Events, reasons, merges, the text, and how to join.

import { byId, element, fill, say, swatch } from "./dom.js";
import { called, keysOf, percent, ranges, shown, speaking, withKeys } from "./text.js";

const MAX_EVENTS = 100;
const MAX_MERGES = 20;
const MAX_NAMED = 4;
const MAX_SCORES = 50;

export function drawEvents(state) {
  const keys = keysOf(state.peers);
  const items = state.events.slice(-MAX_EVENTS).reverse().map((event) =>
    element("li", { class: `topic-${event.topic}` }, element("time", {}, clock(event.at)), element("b", {}, event.topic), element("span", {}, withKeys(event.text, keys))),
  );
  byId("events").replaceChildren(...(items.length ? items : [element("li", { class: "none" }, "Nothing has changed since this monitor began.")]));
}

function clock(at) {
  return new Date(1000 * at).toTimeString().slice(0, 8);
}

export function drawCauses(state) {
  const keys = keysOf(state.peers);
  byId("wrong").hidden = !state.causes.length;
  byId("causes").replaceChildren(
    ...state.causes.map((cause) => element("li", { "data-fault": cause.fault }, element("b", { class: cause.fault === "slow" ? "warn" : "bad" }, cause.fault), element("span", {}, withKeys(cause.text, keys)))),
  );
}

export function drawWhy(state) {
  const keys = keysOf(state.peers);
  const said = new Map(state.reasons.map((reason) => [reason, []]));
  for (const peer of state.peers) {
    if (peer.reason) said.set(peer.reason, [...(said.get(peer.reason) ?? []), keys.get(peer.peer_id)]);
  }
  const items = [...said].map(([reason, who]) =>
    element("li", {}, element("b", {}, who.length > MAX_NAMED ? `${who.length} peers` : who.join(" ") || "all"), element("span", {}, withKeys(reason, keys))),
  );
  byId("why").replaceChildren(...(items.length ? items : [element("li", { class: "none" }, "No peer has said anything yet.")]));
}

export function drawMerges(state) {
  const merges = [...state.merges].reverse().slice(0, MAX_MERGES);
  fill(
    "merges",
    [
      { title: "merge", cell: (m) => element("th", { scope: "row" }, String(m.merged)) },
      { title: "round", right: true, cell: (m) => String(m.round) },
      { title: "step", right: true, cell: (m) => String(m.step) },
      { title: "alpha", right: true, cell: (m) => m.alpha.toPrecision(3) },
      { title: "experts", kind: "mono", cell: (m) => ranges(m.experts) },
    ],
    merges,
  );
  if (!merges.length) byId("merges").replaceChildren(element("caption", { class: "none" }, state.live ? "No merge has been announced yet." : "A replay does not know them."));
}

export function drawScores(state) {
  const keys = keysOf(state.peers);
  fill(
    "scores",
    [
      { title: "task", cell: (s) => element("th", { scope: "row" }, shown(s.task)) },
      { title: "metric", cell: (s) => shown(s.metric) },
      { title: "value", right: true, cell: (s) => s.value.toPrecision(5) },
      { title: "samples", right: true, cell: (s) => String(s.samples) },
      { title: "round", right: true, cell: (s) => String(s.round) },
      { title: "by", cell: (s) => (keys.get(s.publisher) ?? `…${shown(s.publisher.slice(-6))}`) + (s.member === false ? ", no member" : "") },
    ],
    state.scores.slice(0, MAX_SCORES),
  );
  if (!state.scores.length) byId("scores").replaceChildren(element("caption", { class: "none" }, "Nobody has published a score."));
}

export function drawText(state) {
  const found = state.coverage;
  byId("text").replaceChildren();
  byId("text-legend").replaceChildren();
  if (!found) {
    say("text-said", state.live && state.members !== null ? "Every peer has a text of its own." : "Not known.");
    return;
  }
  const parts = [["read", found.share], ["reading", found.dealt / found.windows], ["open", found.open / found.windows]];
  byId("text-legend").replaceChildren(...parts.map(([kind, share]) => swatch(`text-${kind}`, `${kind} ${percent(share, 1)}`)));
  byId("text").replaceChildren(
    ...parts.map(([kind, share]) => {
      const part = element("i", { class: `text-${kind}` });
      part.style.width = `${100 * Math.min(share, 1)}%`;
      return part;
    }),
  );
  say("text-said", `${percent(found.share, 1)} of lap ${found.laps + 1}, of ${found.windows} windows; ${found.dealt} are being read, ${found.open} are open.`);
}

export function drawJoin(state) {
  const dialled = speaking(state).filter((peer) => peer.addresses.length);
  const address = dialled.map((peer) => peer.addresses.find((each) => !each.includes("/127.0.0.1/")) ?? peer.addresses[0])[0];
  const line = address ? `swarm-peer --initial-peers ${shown(address)}` : state.live ? "no peer can be dialled" : "this run is over";
  say("join", line);
  const button = byId("copy");
  button.disabled = !address;
  button.onclick = async () => {
    try {
      await navigator.clipboard.writeText(line);
      button.textContent = "Copied";
    } catch {
      // Without the permission the line is selected, to be copied by the keyboard.
      getSelection().selectAllChildren(byId("join"));
      button.textContent = "Marked";
    }
    setTimeout(() => (button.textContent = "Copy"), 2000);
  };
  button.setAttribute("aria-label", `Copy the line that joins through ${dialled.length ? called(dialled[0]) : "nobody"}`);
}
