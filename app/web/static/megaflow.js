"use strict";
// Draws the strip of a run on a canvas: a cell for each attempt, without gaps between the attempts of a task. A capital letter is an
// attempt that was not the task's last. A click opens the attempt; arrow keys choose a cell and Enter opens it. Each live update draws the strip again and keeps the focus and the chosen cell.
(() => {
  const served = location.protocol !== "file:";
  let chosen = [0, 1]; // index of a task, and number of its attempt
  let held = false; // the strip has the focus
  const names = { s: "solved", u: "unsolved", x: "suspect", l: "lost", r: "running", w: "waiting", c: "cancelled", p: "superseded" };

  function layout(canvas) {
    const count = canvas.dataset.letters.length;
    const width = canvas.clientWidth || canvas.parentElement.clientWidth;
    const cell = Math.max(2, Math.min(14, Math.floor(Math.sqrt((width * 240) / Math.max(1, count)))));
    const columns = Math.max(1, Math.floor(width / cell));
    return { count, cell, columns, rows: Math.ceil(count / columns) };
  }

  function places(canvas) { // task index and attempt number of each cell
    let task = 0, attempt = 0;
    return Array.from(canvas.dataset.letters, (letter) => {
      const place = [task, ++attempt];
      if (letter === letter.toLowerCase()) [task, attempt] = [task + 1, 0];
      return place;
    });
  }
  const chosenOf = (found) => Math.max(0, found.findIndex(([task, attempt]) => task === chosen[0] && attempt === chosen[1]));

  function draw(canvas) {
    const { count, cell, columns, rows } = layout(canvas);
    const style = getComputedStyle(document.documentElement);
    const colours = {};
    for (const [letter, name] of Object.entries(names)) colours[letter] = style.getPropertyValue("--" + name).trim();
    canvas.width = columns * cell;
    canvas.height = Math.max(1, rows * cell);
    const pen = canvas.getContext("2d");
    const gap = cell > 4 ? 1 : 0;
    for (let index = 0; index < count; index++) {
      const [letter, x, y] = [canvas.dataset.letters[index], (index % columns) * cell, Math.floor(index / columns) * cell];
      pen.fillStyle = colours[letter.toLowerCase()];
      pen.fillRect(x, y, letter in names ? cell - gap : cell, cell - gap);
    }
    if (!served || !count) return;
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "application");
    if (!held) return;
    const found = places(canvas), at = chosenOf(found), [task, attempt] = found[at];
    pen.strokeStyle = style.getPropertyValue("--ink").trim();
    pen.lineWidth = 2;
    pen.strokeRect((at % columns) * cell, Math.floor(at / columns) * cell, cell, cell);
    const told = canvas.parentElement.querySelector("[data-cell]");
    const name = names[canvas.dataset.letters[at].toLowerCase()], word = name === "lost" ? "not scored" : name;
    told.textContent = `Cell ${at + 1} of ${count}: task ${task + 1}, attempt ${attempt}, ${word}. Enter opens it.`;
    if (document.activeElement === document.body) canvas.focus();
  }

  function drawAll() {
    document.querySelectorAll("canvas.strip").forEach(draw);
  }

  function open(canvas, place) {
    location.assign(`/runs/${canvas.closest("[data-run]").dataset.run}/at/${place.join("/")}`);
  }

  document.addEventListener("keydown", (event) => {
    const canvas = event.target.closest("canvas.strip");
    if (!canvas || !served || event.altKey || event.ctrlKey || event.metaKey) return;
    const { count, columns } = layout(canvas);
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -count, End: count };
    const found = places(canvas);
    if (event.key === "Enter") open(canvas, found[chosenOf(found)]);
    else if (event.key in steps) {
      const next = chosenOf(found) + steps[event.key];
      if (Math.abs(steps[event.key]) !== columns || next in found) chosen = found[Math.max(0, Math.min(next, count - 1))];
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
    if (index < count) open(canvas, places(canvas)[index]);
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
