// Elements, text and numbers. Text from outside only ever becomes text nodes and plain attributes.

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export const byId = (id) => document.getElementById(id);

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (value === null || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, String(value));
}

// Make `parent` show one child per item, in order, without touching those that stay: what has the
// focus keeps it, and nothing moves under the finger.
export function sync(parent, items, key, make, update) {
  const kept = (parent.shown ??= new Map());
  const wanted = new Map(items.map((item) => [key(item), item]));
  for (const [name, node] of kept) {
    if (wanted.has(name)) continue;
    node.remove();
    kept.delete(name);
  }
  let place = parent.firstElementChild;
  for (const [name, item] of wanted) {
    let node = kept.get(name);
    if (!node) kept.set(name, (node = make(item)));
    if (node === place) place = place.nextElementSibling;
    else parent.insertBefore(node, place);
    update(node, item);
  }
}

export function table(className, columns) {
  const head = columns.map(([label, kind]) =>
    el("th", { scope: "col", role: "columnheader", class: kind }, label));
  const body = el("tbody", { role: "rowgroup" });
  const node = el("table", { class: `${className} cards`, role: "table" },
    el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...head)), body);
  return { node, body };
}

export function cell(label, kind, ...children) {
  return el("td", { role: "cell", "data-label": label, class: kind }, ...children);
}

export function row(attributes, cells) {
  return el("tr", { role: "row", ...attributes }, ...cells);
}

export function measure() {
  return el("span", { class: "measure" },
    el("span", { class: "bar", "aria-hidden": "true" }, el("span", { class: "fill" })),
    el("span", { class: "value" }));
}

export function setMeasure(node, ratio, text, high = false) {
  const bar = node.querySelector(".bar");
  const share = Math.max(0, Math.min(1, Number.isFinite(ratio) ? ratio : 0));
  bar.firstElementChild.style.width = `${(share * 100).toFixed(1)}%`;
  setAttribute(bar, "data-kind", high ? "high" : null);
  setText(node.querySelector(".value"), text);
}

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export const NONE = "–";
export const number = (value) => (Number.isFinite(value) ? whole.format(value) : NONE);
export const score = (value) => {
  if (!Number.isFinite(value)) return "never";
  return Number.isInteger(value) ? whole.format(value) : value.toFixed(2);
};
export const percent = (ratio) => {
  if (!Number.isFinite(ratio)) return NONE;
  // 99.96 % must not read as 100 %.
  const rounded = Math.floor(ratio * 1000) / 10;
  return `${rounded % 1 && rounded > 90 ? rounded.toFixed(1) : Math.round(ratio < 1 ? Math.min(rounded, 99.9) : 100)} %`;
};
export function seconds(value) {
  if (!Number.isFinite(value)) return NONE;
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return value < 100 ? `${value.toFixed(value < 10 ? 2 : 1)} s` : `${whole.format(value)} s`;
}
export const clock = (atS) => new Date(atS * 1000).toLocaleTimeString("en-GB");
export const shortName = (instanceId) => String(instanceId).split("#", 1)[0];
export const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
