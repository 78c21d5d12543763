"use strict";
// Starts the player for a recording that the server has checked; the recording's text stays on the page.
(() => {
  const place = document.getElementById("player");
  if (!place || !window.AsciinemaPlayer || location.protocol === "file:") return;
  const at = Number(place.dataset.at) || 0;
  const player = AsciinemaPlayer.create(place.dataset.recording, place, {
    fit: "width",
    preload: true,
    poster: "npt:" + at,
    startAt: at,
    terminalFontFamily: "ui-monospace, monospace",
  });
  player.addEventListener("ready", () => document.getElementById("text").removeAttribute("open"));
})();
