// The facts of each expert, from the manifest, the peers' records and the newest merge.

import { called, keysOf, speaking } from "./text.js";

export const HOT = 2;
/** An expert is hot when it gets so many times its even share of tokens. */
export const OLD_ROUNDS = 3;
/** An expert is old when its value has not changed for more rounds than these. */

/** Rows of peers (absent owners last) and columns of experts. */
export function matrixOf(state) {
  const keys = keysOf(state.peers);
  const rows = state.peers.map((peer) => ({ id: peer.peer_id, key: keys.get(peer.peer_id), name: called(peer), shares: peer.routing?.shares ?? [], there: true }));
  const there = new Set(rows.map((row) => row.id));
  for (const id of new Set(state.experts.flatMap((expert) => expert.owners))) {
    if (!there.has(id)) rows.push({ id, key: "?", name: `…${id.slice(-6)}, absent`, shares: [], there: false });
  }
  const names = new Map(rows.map((row) => [row.id, row]));
  const heard = new Set(speaking(state).map((peer) => peer.peer_id));
  const telling = rows.filter((row) => heard.has(row.id) && row.shares.length === state.experts.length);
  const even = 1000 / Math.max(state.experts.length, 1);
  const experts = state.experts.map((expert, column) => {
    const share = telling.length ? telling.reduce((sum, row) => sum + row.shares[column], 0) / telling.length : null;
    return { ...expert, column, share, times: share === null ? null : share / even, owned: new Set(expert.owners), names: expert.owners.map((id) => names.get(id)) };
  });
  for (const peer of speaking(state)) {
    for (const [first, second, alike] of peer.routing?.pairs ?? []) {
      for (const [one, other] of [[first, second], [second, first]]) {
        const found = experts.find((expert) => expert.expert === one);
        if (found && alike > (found.alike?.permille ?? -Infinity)) found.alike = { expert: other, permille: alike };
      }
    }
  }
  return { rows, experts, even, telling: telling.length };
}

/** One word for an expert: dead, orphan, hot, old or well. */
export function wordOf(expert) {
  if (!expert.names.length) return "waits for an owner";
  if (!expert.names.some((row) => row?.there)) return "no owner present";
  if (expert.share === 0) return "dead";
  if (expert.times !== null && expert.times > HOT) return "hot";
  if (expert.age !== null && expert.age > OLD_ROUNDS) return "old";
  return "well";
}

export function ownersOf(expert) {
  return expert.names.map((row) => `${row.key} ${row.name}`).join(", ") || "nobody: it fits no machine";
}

export function shareText(expert) {
  return expert.share === null ? "–" : `${expert.share.toFixed(expert.share < 10 ? 1 : 0)} ‰`;
}

export function ageText(expert) {
  if (expert.age === null) return "–";
  return expert.age === 0 ? "this round" : `${expert.age} round${expert.age === 1 ? "" : "s"} ago`;
}
