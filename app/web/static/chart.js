"use strict";
// Draws charts over the seconds of an attempt with uPlot, from the data next to each, in the page's colours.
(() => {
  const charts = [], colours = ["running", "suspect", "solved", "unsolved"], met = { killed: "lost", throttled: "cancelled" };
  const colour = (name) => () => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

  function drawLimits(plot, { limit, marks }) {
    const { left, top, width, height } = plot.bbox;
    const line = (name, dash, path) => {
      plot.ctx.lineWidth = 2 * devicePixelRatio;
      plot.ctx.strokeStyle = colour(name)();
      plot.ctx.setLineDash(dash);
      plot.ctx.stroke(new Path2D(path));
    };
    plot.ctx.save();
    if (limit !== null) line("note", [12, 8], `M${left} ${plot.valToPos(limit, "y", true)}h${width}`);
    for (const [second, kind] of marks) line(met[kind], [], `M${plot.valToPos(second, "x", true)} ${top}v${height}`);
    plot.ctx.restore();
  }

  function draw(figure) {
    const found = JSON.parse(figure.querySelector("script").textContent), place = figure.querySelector("[role=img]");
    const axis = { stroke: colour("note"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false } };
    const value = (_, one) => (one == null ? "–" : one + " " + found.unit);
    const series = found.lines.map(({ name }, at) => ({ label: name, stroke: colour(colours[at % 4]), width: 2, value }));
    const options = {
      width: place.clientWidth, height: 150, padding: [8, 14, 0, 0],
      scales: { x: { time: false, range: [0, found.seconds] }, y: { range: [0, found.top] } },
      axes: [{ ...axis, size: 28 }, { ...axis, size: 48 }], // .timeline's padding matches these sizes
      cursor: { drag: { x: false }, sync: { key: "second" } },
      series: [{ label: "second" }, ...series],
      hooks: { draw: [(plot) => drawLimits(plot, found)] },
    };
    const columns = found.lines.map(({ points }) => [0, 1].map((column) => points.map((point) => point[column])));
    charts.push(new uPlot(options, uPlot.join(columns), place));
  }

  function drawAll() {
    while (charts.length) charts.pop().destroy();
    document.querySelectorAll("figure.chart").forEach(draw);
  }

  addEventListener("resize", drawAll);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  drawAll();
})();
