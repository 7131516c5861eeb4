"use strict";
// What pages of tables and plots share. Such a page has its own `draw(id)` and `redraw()`, and ends
// with `begin()`. Runs before plotly.js, which takes a second to load: tables and controls do not
// wait for it.
const PLOTS = JSON.parse(document.getElementById("plots").textContent);
const all = (selector, from = document) => [...from.querySelectorAll(selector)];
const boxes = all("#series input");
const drawn = new Set();
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// What is common to all plots, in the colours of the scheme.
function layoutOf(plot, own = {}) {
  const axis = { gridcolor: style("--line"), zeroline: false, linecolor: style("--line"), automargin: true };
  return {
    ...plot.layout,
    xaxis: { ...axis, ...plot.layout.xaxis },
    yaxis: { ...axis, ...plot.layout.yaxis },
    font: { color: style("--ink"), size: 12, family: getComputedStyle(document.body).fontFamily },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    hoverlabel: { bgcolor: style("--surface"), bordercolor: style("--line"), font: { color: style("--ink") } },
    margin: { l: 10, r: 10, t: 8, b: 10 }, showlegend: false, hovermode: "closest",
    ...own,
  };
}

// A table's rows by one column; the first press shows what is least.
function sort(button) {
  const head = button.closest("th");
  const place = [...head.parentElement.children].indexOf(head);
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const one of head.parentElement.children) one.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const body = head.closest("table").tBodies[0];
  const key = (row) => row.children[place].dataset.value ?? row.children[place].textContent.trim();
  const compare = (a, b) => {
    const [x, y] = [Number(key(a)), Number(key(b))];
    if (place === 0) return key(a).localeCompare(key(b)) * (down ? -1 : 1);
    if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
    return (x - y) * (down ? -1 : 1);
  };
  body.append(...[...body.rows].sort(compare));
}

document.addEventListener("click", (event) => {
  const button = event.target.closest(".sort");
  if (button) sort(button);
});

// Many plots take seconds to draw: each is drawn when it comes near.
function begin() {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  redraw();
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      seen.unobserve(entry.target);
      draw(entry.target.id);
    }
  }, { rootMargin: "600px" });
  addEventListener("DOMContentLoaded", () => {
    for (const id of Object.keys(PLOTS)) seen.observe(document.getElementById(id));
    addEventListener("beforeprint", () => Object.keys(PLOTS).forEach(draw));
  });
}
