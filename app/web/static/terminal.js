"use strict";
// The player of a terminal, which the server has checked the recording for; the text stays for who wants it.
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
