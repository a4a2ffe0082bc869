// The head of the page: the health of the run in one word, and ten figures.

import { byId, element, say } from "./dom.js";
import { amount, loss, percent, seconds, shown } from "./text.js";

export function drawHealth(health) {
  byId("health").dataset.word = health.word;
  say("health-word", health.word);
  say("health-reason", shown(health.reason));
}

export function drawFigures(state) {
  say("name", shown(state.name));
  say("run-id", shown(state.run_id ?? "gathers peers"));
  const { pace, losses, coverage } = state;
  const newest = losses.at(-1);
  const before = losses.at(-2);
  const fall = newest && before ? `${newest[1] <= before[1] ? "−" : "+"}${Math.abs(newest[1] - before[1]).toFixed(3)} in a round` : "";
  const bits = newest && state.bits_per_byte_of_nat ? `${loss(newest[1] * state.bits_per_byte_of_nat)} bits/byte` : "nats per token";
  const members = state.members === null ? "" : `of ${state.members} members`;
  const figures = [
    ["round", `${state.round}/${state.rounds_total}`, bar(state.round / Math.max(state.rounds_total, 1)), "round"],
    ["left", seconds(pace.eta_s), pace.round_s === null ? "not known yet" : `a round takes ${seconds(pace.round_s)}`, "eta"],
    ["held-out loss", newest ? loss(newest[1]) : "–", fall ? `${fall}, ${bits}` : bits, "val-loss"],
    ["tokens in the model", amount(state.tokens), state.step === null ? "" : `step ${state.step}`, "tokens"],
    ["tokens/s", amount(pace.tokens_per_s), "sum over the peers", "tokens-per-s"],
    ["utilisation", percent(pace.utilisation), pace.committed_per_s === null ? "not known yet" : `${amount(pace.committed_per_s)}/s committed`, "utilisation"],
    ["peers", String(state.peers.filter((peer) => peer.votes !== null || state.members === null).length), members, "peers-count"],
    ["text read", coverage ? percent(coverage.laps + coverage.share, 1) : "–", coverage ? "of a lap" : state.live && state.members !== null ? "each its own" : "not known", "coverage"],
    ["tip", shown(state.manifest_digest.slice(0, 8)), `generation ${shown(state.generation.slice(0, 8))}`, "tip"],
  ];
  byId("figures").replaceChildren(
    ...figures.map(([title, value, note, id]) =>
      element("div", {}, element("dt", {}, title), element("dd", { id: `figure-${id}` }, value), element("dd", { class: "note" }, note)),
    ),
  );
}

function bar(share) {
  const inner = element("i");
  inner.style.width = `${100 * Math.min(Math.max(share, 0), 1)}%`;
  return element("span", { class: "bar" }, inner);
}
