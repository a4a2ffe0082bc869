// Text of other peers, and figures, in a form that is safe to show.

const UNPRINTABLE = /[\p{C}\p{Z}]/gu;

/** The text with what Unicode does not count as printable shown as escapes, as in the terminal. */
export function shown(text) {
  return String(text).replace(UNPRINTABLE, (c) => (c === " " ? c : escaped(c.codePointAt(0))));
}

function escaped(code) {
  const hex = code.toString(16);
  if (code === 9) return "\\t";
  if (code === 10) return "\\n";
  if (code === 13) return "\\r";
  if (code < 256) return `\\x${hex.padStart(2, "0")}`;
  return code < 65536 ? `\\u${hex.padStart(4, "0")}` : `\\U${hex.padStart(8, "0")}`;
}

/** A number in at most five characters: 812, 16.2k, 3.1M. */
export function amount(value) {
  if (value === null || value === undefined) return "–";
  for (const unit of ["", "k", "M", "G", "T"]) {
    if (value < 999.5) return `${value.toFixed(!unit || value >= 99.95 ? 0 : 1)}${unit}`;
    value /= 1000;
  }
  return `${value.toFixed(0)}P`;
}

export function loss(value) {
  return value === null || value === undefined ? "–" : value.toFixed(3);
}

export function percent(share, digits = 0) {
  return share === null || share === undefined ? "–" : `${(100 * share).toFixed(digits)} %`;
}

/** Seconds as people say them: 4.2 s, 3 min 20 s, 15 min, 5 h 02 min. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 9.95) return `${value.toFixed(1)} s`;
  if (value < 99.5) return `${value.toFixed(0)} s`;
  const minutes = Math.round(value / 60);
  if (value > 600 && minutes < 60) return `${minutes} min`;
  if (minutes < 60) return `${Math.floor(value / 60)} min ${String(Math.floor(value % 60)).padStart(2, "0")} s`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
  return `${(minutes / 1440).toFixed(1)} days`;
}

/** Ascending numbers in short: 0-3,7. */
export function ranges(numbers) {
  const spans = [];
  for (const number of numbers) {
    const last = spans.at(-1);
    if (last && last[1] === number - 1) last[1] = number;
    else spans.push([number, number]);
  }
  return spans.map(([a, b]) => (a === b ? `${a}` : `${a}-${b}`)).join(",");
}

const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/** Peer id -> the letter (or number) by which the page refers to a peer, as the terminal does. */
export function keysOf(peers) {
  return new Map(peers.map((peer, k) => [peer.peer_id, LETTERS[k] ?? String(k)]));
}

/** Peers that speak for the run, as in `Snapshot.speaking`. */
export function speaking(state) {
  return state.peers.filter((peer) => peer.votes !== null || state.members === null || !state.live);
}

const PEER_ID = /\b12D3KooW[1-9A-HJ-NP-Za-km-z]{44}\b/g;

/** A sentence with the key of each peer in the place of its long id. */
export function withKeys(sentence, keys) {
  return shown(sentence).replace(PEER_ID, (id) => keys.get(id) ?? `…${id.slice(-6)}`);
}

export function called(peer) {
  return peer.name ? shown(peer.name) : `…${peer.peer_id.slice(-6)}`;
}
