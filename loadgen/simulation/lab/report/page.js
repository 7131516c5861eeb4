const names = boxes.map((box) => box.parentElement.textContent.trim());
const colour = (place) => (place < 0 ? style("--quiet") : style(`--s${place % COLOURS}`));
const load = () => document.querySelector("#loads input:checked").value;

function tracesOf(plot) {
  const traces = plot.traces[""] ?? plot.traces[load()] ?? [];
  return traces.filter((trace) => !plot.bySeries || trace.meta < 0 || boxes[trace.meta].checked).map((trace) => {
    const own = colour(trace.meta);
    return trace.type === "bar"
      ? { ...trace, marker: { ...trace.marker, color: own } }
      : { ...trace, line: { ...trace.line, color: own }, marker: { color: own, size: 7 } };
  });
}

function draw(id) {
  const plot = PLOTS[id];
  const traces = tracesOf(plot);
  const layout = layoutOf(plot, plot.bySeries ? {} : { showlegend: true, legend: { orientation: "h", y: -0.25 } });
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

function choose(radio) {
  for (const part of all(`[data-choice="${radio.name}"]`)) part.hidden = part.dataset.figure !== radio.value;
}

document.addEventListener("change", (event) => {
  if (event.target.closest("#loads, #series")) redraw();
  else if (event.target.type === "radio") choose(event.target);
});
for (const radio of all("main input[type=radio]:checked")) choose(radio); // a browser keeps choices over a reload
begin();
