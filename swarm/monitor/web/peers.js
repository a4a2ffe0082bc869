// One line for each peer: its own record, and its standing by the newest manifest.

import { byId, element, fill } from "./dom.js";
import { amount, called, keysOf, loss, ranges, shown, speaking } from "./text.js";

export function drawPeers(state) {
  const keys = keysOf(state.peers);
  fill(
    "peers",
    [
      { title: "", cell: (p) => element("th", { scope: "row", class: "key" }, keys.get(p.peer_id)) },
      { title: "peer", kind: "name", cell: (p) => element("span", { title: shown(p.peer_id) }, called(p)) },
      { title: "state", live: true, cell: (p) => shown(p.state).replace("_", " ") },
      { title: "last round", help: "whether its work is in the newest round", cell: counted },
      { title: "steps", live: true, right: true, help: "local steps since its tip", cell: (p) => (state.step === null ? "–" : String(Math.max(p.step - state.step, 0))) },
      { title: "vote", live: true, help: "or how many of 10 rounds have counted it", cell: vote },
      { title: "tip", kind: "mono", cell: (p) => element("span", { class: `tip ${p.agreement}`, title: p.agreement }, shown(p.manifest_digest.slice(0, 8))) },
      { title: "round", right: true, cell: (p) => String(p.round) },
      { title: "experts", kind: "mono", cell: (p) => experts(p.owned_experts) },
      { title: "loss", live: true, right: true, cell: (p) => loss(p.loss) },
      { title: "tokens/s", right: true, cell: (p) => amount(p.tokens_per_s) },
      { title: "up", right: true, help: "blob bytes sent in the last round", cell: (p) => amount(p.last_round?.blob_bytes_sent) },
      { title: "down", right: true, help: "blob bytes received in the last round", cell: (p) => amount(p.last_round?.blob_bytes_received) },
      { title: "lost", right: true, help: "tokens of local steps that entered no manifest", cell: (p) => flagged(p.tokens_lost) },
      { title: "round trip", live: true, right: true, help: "shortest of the last control messages, in milliseconds", cell: (p) => figure(p.link?.rtt_ms, "ms") },
      { title: "Mbit/s", live: true, right: true, help: "measured rates of its line, down and up; some know one of them alone", cell: line },
      { title: "refused", live: true, right: true, help: "inputs of others that it did not believe", cell: (p) => flagged(Object.values(p.refused).reduce((a, b) => a + b, 0)) },
      { title: "skipped", live: true, right: true, help: "local steps that were not finite", cell: (p) => flagged(p.steps_skipped) },
      { title: "reached", live: true, help: "whether others can dial it", cell: (p) => (p.addresses.length ? "directly" : "dials out") },
      { title: "seen", live: true, right: true, help: "seconds since its last record", cell: (p) => (p.published === null ? "–" : `${Math.max(state.at - p.published, 0).toFixed(0)} s`) },
      { title: "engine", live: true, cell: (p) => element("span", { title: [p.engine, ...workers(p)].map(shown).join("; ") }, shown(p.engine).split(",")[0] || "–") },
      { title: "version", live: true, kind: "mono", cell: (p) => shown(p.version) },
    ].filter((column) => (state.live || !column.live) && (column.title !== "engine" || unlike(state.peers))),
    state.peers,
    (p) => ({ "data-peer": p.peer_id, class: p.agreement === "different" ? "bad" : undefined }),
  );
  const absent = state.absent.length;
  const strangers = state.peers.length - speaking(state).length;
  byId("peers-note").textContent = `${state.peers.length} present${strangers ? `, ${strangers} no member` : ""}${absent ? `, ${absent} of ${state.members} members absent` : ""}`;
}

function counted(peer) {
  if (peer.contributed === null) return "–";
  if (peer.contributed) return element("span", { class: "good" }, "counted");
  return element("span", { class: "warn", title: shown(peer.last_round?.why_not ?? "") }, peer.votes === null ? "not a member" : "left out");
}

/** Whether peers compute in different ways, or not all on the device. */
function unlike(peers) {
  return peers.some((peer) => peer.engine && peer.engine !== "resident");
}

/** What its worker processes wait for, in words; nothing of a peer that computes in one process. */
function workers({ workers: found }) {
  if (!found) return [];
  const percent = (share) => `${(100 * share).toFixed(0)} %`;
  const between = Object.values(found.shares).reduce((a, b) => a + b, 0);
  const bubble = found.bubble === null ? [] : [`bubble ${percent(found.bubble)}, with even stages ${percent(found.expected)}`];
  return [`${found.number} workers, ${percent(between)} of a step between them`, ...bubble, found.why].filter(Boolean);
}

function figure(value, unit) {
  return value === null || value === undefined ? "–" : `${value.toFixed(value < 9.95 ? 1 : 0)} ${unit}`;
}

function line(peer) {
  const { down_mbit: down, up_mbit: up } = peer.link ?? {};
  return [down && `${amount(down)}↓`, up && `${amount(up)}↑`].filter(Boolean).join(" ") || "–";
}

function vote(peer) {
  if (peer.votes === null) return "–";
  return peer.votes ? "votes" : `${peer.counted}/10`;
}

function flagged(count) {
  return count ? element("span", { class: "warn" }, amount(count)) : "0";
}

function experts(owned) {
  const text = ranges(owned);
  return element("span", { title: text }, text.length > 18 ? `${text.slice(0, 16)}… (${owned.length})` : text || "none");
}
