"use strict";
// Runs before plotly.js, which takes a second to load: tables and controls do not wait for it.
const PLOTS = JSON.parse(document.getElementById("plots").textContent);
const all = (selector, from = document) => [...from.querySelectorAll(selector)];
const boxes = all("#series input");
const names = boxes.map((box) => box.parentElement.textContent.trim());
const drawn = new Set();
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (place) => (place < 0 ? style("--quiet") : style(`--s${place % COLOURS}`));
const load = () => document.querySelector("#loads input:checked").value;

// What is common to all plots, in the colours of the scheme.
function layoutOf(plot) {
  const axis = { gridcolor: style("--line"), zeroline: false, linecolor: style("--line"), automargin: true };
  return {
    ...plot.layout,
    xaxis: { ...axis, ...plot.layout.xaxis },
    yaxis: { ...axis, ...plot.layout.yaxis },
    font: { color: style("--ink"), size: 12, family: getComputedStyle(document.body).fontFamily },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    hoverlabel: { bgcolor: style("--surface"), bordercolor: style("--line"), font: { color: style("--ink") } },
    margin: { l: 10, r: 10, t: 8, b: 10 }, showlegend: false, hovermode: "closest",
  };
}

function tracesOf(plot) {
  const traces = plot.traces[""] ?? plot.traces[load()] ?? [];
  return traces.filter((trace) => trace.meta < 0 || boxes[trace.meta].checked).map((trace) => {
    const own = colour(trace.meta);
    return trace.type === "bar"
      ? { ...trace, marker: { ...trace.marker, color: own } }
      : { ...trace, line: { ...trace.line, color: own }, marker: { color: own, size: 7 } };
  });
}

function draw(id) {
  const plot = PLOTS[id];
  const traces = tracesOf(plot);
  const layout = layoutOf(plot);
  if (!traces.length) {
    layout.annotations = [{ text: "Nothing was run at this load.", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5 }];
  }
  drawn.add(id);
  Plotly.react(id, traces, layout, { displayModeBar: false, responsive: true });
}

function redraw() {
  const label = document.querySelector("#loads input:checked").nextElementSibling.textContent;
  for (const at of all(".at")) at.textContent = at.dataset.byLoad === "yes" ? ` at load ${label}` : "";
  const shown = boxes.filter((box) => box.checked).map((box) => box.parentElement.lastElementChild);
  const legend = shown.map((swatch) => {
    const one = document.createElement("span");
    one.append(swatch.cloneNode(), swatch.dataset.series);
    return one;
  });
  document.getElementById("legend").replaceChildren(...legend);
  for (const swatch of all(".swatch")) {
    const place = names.indexOf(swatch.dataset.series);
    swatch.style.setProperty("--own", colour(place));
    swatch.classList.toggle("again", place >= COLOURS);
  }
  for (const id of drawn) draw(id);
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

function choose(radio) {
  for (const part of all(`[data-choice="${radio.name}"]`)) part.hidden = part.dataset.figure !== radio.value;
}

document.addEventListener("click", (event) => {
  const button = event.target.closest(".sort");
  if (button) sort(button);
});
document.addEventListener("change", (event) => {
  if (event.target.closest("#loads, #series")) redraw();
  else if (event.target.type === "radio") choose(event.target);
});
for (const radio of all("main input[type=radio]:checked")) choose(radio); // a browser keeps choices over a reload
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
redraw();

// Thirty plots take seconds to draw: each is drawn when it comes near.
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
