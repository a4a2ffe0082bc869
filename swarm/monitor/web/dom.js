// Elements; all text goes in as text, never as markup.

export const byId = (id) => document.getElementById(id);

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** Sets the text of an element, if it is another one. */
export function say(id, text) {
  const found = byId(id);
  if (found.textContent !== text) found.textContent = text;
}

/** Fills a table: columns are {title, help, right, cell(row)}; a cell is text or an element. */
export function fill(id, columns, rows, rowAttributes = () => ({})) {
  const head = columns.map((column) => element("th", { scope: "col", class: column.right && "right", title: column.help }, column.title));
  const body = rows.map((row) => element("tr", rowAttributes(row), ...columns.map((column) => cellOf(column, row))));
  byId(id).replaceChildren(element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body));
}

function cellOf(column, row) {
  const value = column.cell(row);
  const kind = [column.right && "right", column.kind].filter(Boolean).join(" ") || undefined;
  return value instanceof HTMLTableCellElement ? value : element("td", { class: kind }, value);
}

export function swatch(kind, text) {
  return element("span", { class: "swatch" }, element("i", { class: kind }), text);
}

const probes = new Map();

/** The colour that a custom property has in the present scheme, for canvases. */
export function colour(name) {
  const scheme = document.documentElement.dataset.scheme;
  const key = `${scheme} ${name}`;
  if (!probes.has(key)) {
    const probe = byId("probe");
    probe.style.color = `var(${name})`;
    probes.set(key, getComputedStyle(probe).color);
  }
  return probes.get(key);
}
