// The newest snapshot: first the whole, then its changes; see swarm/monitor/server.py.

const KEYS = { peers: "peer_id", experts: "expert" };

export function changed(state, change) {
  const next = { ...state, ...change.set };
  for (const [field, { rows, order }] of Object.entries(change.rows)) {
    const key = KEYS[field];
    const known = new Map(state[field].map((row) => [row[key], row]));
    for (const row of rows) known.set(row[key], row);
    next[field] = (order ?? state[field].map((row) => row[key])).map((id) => known.get(id));
  }
  for (const [field, { cut, add }] of Object.entries(change.tails)) {
    next[field] = [...state[field].slice(cut), ...add];
  }
  return next;
}

/** Listens until the page is closed; `show` gets every snapshot, `lose` a reason. */
export function listen(show, lose) {
  let state = null;
  const source = new EventSource("events");
  source.addEventListener("snapshot", (event) => show((state = JSON.parse(event.data))));
  source.addEventListener("change", (event) => {
    if (state) show((state = changed(state, JSON.parse(event.data))));
  });
  source.addEventListener("error", () => {
    lose("the monitor does not answer; trying again");
    if (source.readyState === EventSource.CLOSED) setTimeout(() => listen(show, lose), 5000);
  });
}
