// Dark, light, or the system's choice.

import { byId } from "./dom.js";

const ORDER = ["auto", "dark", "light"];
const KEY = "swarm-theme";

export function applyTheme(redraw) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const button = byId("theme");
  let chosen = remembered();

  function set() {
    const scheme = chosen === "auto" ? (system.matches ? "dark" : "light") : chosen;
    document.documentElement.dataset.scheme = scheme;
    button.textContent = `Theme: ${chosen}`;
    redraw();
  }

  button.addEventListener("click", () => {
    chosen = ORDER[(ORDER.indexOf(chosen) + 1) % ORDER.length];
    try {
      localStorage.setItem(KEY, chosen);
    } catch {
      // A browser without storage keeps the choice until the page is closed.
    }
    set();
  });
  system.addEventListener("change", set);
  set();
}

function remembered() {
  try {
    const kept = localStorage.getItem(KEY);
    return ORDER.includes(kept) ? kept : "auto";
  } catch {
    return "auto";
  }
}
