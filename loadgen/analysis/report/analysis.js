const colour = (place) => style(`--s${place % COLOURS}`);

function draw(id) {
  const plot = PLOTS[id];
  const lines = plot.lines.filter((line) => !plot.byTrace || boxes[line.meta].checked).map((line) => (
    { ...line, line: { ...line.line, color: colour(line.meta) }, showlegend: !line.name.endsWith(", fit") }
  ));
  drawn.add(id);
  Plotly.react(id, lines, layoutOf(plot, { showlegend: !plot.byTrace, legend: { orientation: "h", y: -0.25 } }), { displayModeBar: false, responsive: true });
}

function redraw() {
  for (const swatch of all(".swatch")) swatch.style.setProperty("--own", colour(Number(swatch.dataset.place)));
  for (const id of drawn) draw(id);
}

document.addEventListener("change", (event) => { if (event.target.closest("#series")) redraw(); });
begin();
