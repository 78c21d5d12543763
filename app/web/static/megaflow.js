"use strict";
// The strip of a run: a cell for each task, drawn on a canvas. A click opens the task; by keyboard, arrow keys choose a cell
// and Enter opens it. Drawn anew after each live update, which leaves the focus and the chosen cell as they were.
(() => {
  const served = location.protocol !== "file:";
  let chosen = 0;
  let held = false; // the strip has the focus
  const names = { s: "solved", u: "unsolved", x: "suspect", l: "lost", r: "running", w: "waiting", c: "cancelled", p: "superseded" };

  function layout(canvas) {
    const count = canvas.dataset.letters.length;
    const width = canvas.clientWidth || canvas.parentElement.clientWidth;
    const cell = Math.max(2, Math.min(14, Math.floor(Math.sqrt((width * 240) / Math.max(1, count)))));
    const columns = Math.max(1, Math.floor(width / cell));
    return { count, cell, columns, rows: Math.ceil(count / columns) };
  }

  function draw(canvas) {
    const { count, cell, columns, rows } = layout(canvas);
    const style = getComputedStyle(document.documentElement);
    const colours = { page: style.getPropertyValue("--page").trim() };
    for (const [letter, name] of Object.entries(names)) colours[letter] = style.getPropertyValue("--" + name).trim();
    canvas.width = columns * cell;
    canvas.height = Math.max(1, rows * cell);
    const pen = canvas.getContext("2d");
    const gap = cell > 4 ? 1 : 0;
    for (let index = 0; index < count; index++) {
      const [letter, x, y] = [canvas.dataset.letters[index], (index % columns) * cell, Math.floor(index / columns) * cell];
      pen.fillStyle = colours[letter.toLowerCase()];
      pen.fillRect(x, y, cell - gap, cell - gap);
      if (letter === letter.toLowerCase() || cell < 6) continue; // a notch: it had more than one attempt
      pen.fillStyle = colours.page;
      pen.fillRect(x, y, Math.floor(cell / 3), Math.floor(cell / 3));
    }
    if (!served || !count) return;
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "application");
    if (!held) return;
    chosen = Math.max(0, Math.min(chosen, count - 1));
    pen.strokeStyle = style.getPropertyValue("--ink").trim();
    pen.lineWidth = 2;
    pen.strokeRect((chosen % columns) * cell, Math.floor(chosen / columns) * cell, cell, cell);
    const told = canvas.parentElement.querySelector("[data-cell]");
    const letter = canvas.dataset.letters[chosen], again = letter === letter.toLowerCase() ? "" : ", after several attempts";
    told.textContent = `Cell ${chosen + 1} of ${count}: ${names[letter.toLowerCase()]}${again}. Enter opens it.`;
    if (document.activeElement === document.body) canvas.focus();
  }

  function drawAll() {
    document.querySelectorAll("canvas.strip").forEach(draw);
  }

  function open(canvas, index) {
    location.assign("/runs/" + canvas.closest("[data-run]").dataset.run + "/at/" + index);
  }

  document.addEventListener("keydown", (event) => {
    const canvas = event.target.closest("canvas.strip");
    if (!canvas || !served || event.altKey || event.ctrlKey || event.metaKey) return;
    const { count, columns } = layout(canvas);
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -count, End: count };
    if (event.key === "Enter") open(canvas, chosen);
    else if (event.key in steps) {
      const next = chosen + steps[event.key];
      if (Math.abs(steps[event.key]) !== columns || (next >= 0 && next < count)) chosen = Math.max(0, Math.min(next, count - 1));
      draw(canvas);
    } else return;
    event.preventDefault();
  });
  document.addEventListener("focusin", (event) => {
    const before = held;
    held = event.target.matches("canvas.strip");
    if (held !== before) drawAll();
  });
  document.addEventListener("pointerdown", () => { held = false; });

  document.addEventListener("click", (event) => {
    const canvas = event.target.closest("canvas.strip");
    if (!canvas || !served) return;
    const { count, cell, columns } = layout(canvas);
    const box = canvas.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left) * canvas.width) / box.width / cell);
    const row = Math.floor(((event.clientY - box.top) * canvas.height) / box.height / cell);
    const index = row * columns + column;
    if (index < count) open(canvas, index);
  });

  new MutationObserver((changes) => {
    if (changes.some((change) => [...change.addedNodes].some((node) => node.querySelector && (node.matches("canvas.strip") || node.querySelector("canvas.strip"))))) drawAll();
  }).observe(document.body, { childList: true, subtree: true });
  const stale = (since) => document.querySelectorAll("[data-stale]").forEach((place) => { place.hidden = !since; });
  for (const name of ["htmx:sse:error", "htmx:sse:close"]) document.addEventListener(name, () => stale(true));
  document.addEventListener("htmx:sse:before:message", () => stale(false));
  addEventListener("resize", drawAll);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  drawAll();
})();
