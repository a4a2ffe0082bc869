// Puts the panels together; each draws itself from the newest snapshot.

import { byId, element, say } from "./dom.js";
import { drawFigures, drawHealth } from "./figures.js";
import { drawCauses, drawEvents, drawJoin, drawMerges, drawScores, drawText, drawWhy } from "./lists.js";
import { drawMap } from "./map.js";
import { drawPeers } from "./peers.js";
import { drawPhases } from "./phases.js";
import { drawPlots } from "./plots.js";
import { listen } from "./state.js";
import { applyTheme } from "./theme.js";

const PANELS = [drawFigures, drawCauses, drawMap, drawPeers, drawPhases, drawPlots, drawEvents, drawWhy, drawMerges, drawScores, drawText, drawJoin];
let state = null;
let came = 0;

function draw() {
  if (state?.peers) for (const panel of PANELS) panel(state);
}

function show(next) {
  state = next;
  came = performance.now();
  drawHealth(next.health);
  document.title = next.peers ? `${next.round}/${next.rounds_total} ${next.name}` : "swarm";
  draw();
  document.documentElement.dataset.round = next.round ?? "";
  tick();
}

function tick() {
  if (!state?.peers) return;
  const ago = (performance.now() - came) / 1000;
  say("read", `read ${ago < 1.5 ? "now" : `${ago.toFixed(0)} s ago`}`);
}

async function glossary() {
  const answer = await fetch("glossary.json");
  const items = (await answer.json()).flatMap((metric) => [
    element("dt", {}, `${metric.title} `, element("span", { class: "dim" }, metric.unit)),
    element("dd", {}, `${metric.counts}; ${metric.is_not}.`),
  ]);
  byId("glossary").replaceChildren(...items);
}

applyTheme(draw);
listen(show, (reason) => drawHealth({ word: "unreachable", reason }));
setInterval(tick, 1000);
let resized = 0;
addEventListener("resize", () => {
  cancelAnimationFrame(resized);
  resized = requestAnimationFrame(draw);
});
document.querySelector("footer details").addEventListener("toggle", glossary, { once: true });
window.swarmState = () => state;
