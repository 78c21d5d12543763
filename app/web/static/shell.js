"use strict";
// Runs a live shell: bytes both ways over a WebSocket. The first message has the page's secret; a text from the server has the reason of the end.
(() => {
  const place = document.getElementById("shell");
  const button = document.getElementById("open");
  const state = document.getElementById("state");
  button.disabled = false;
  button.addEventListener("click", () => {
    button.disabled = true;
    place.replaceChildren();
    const screen = new Terminal({ cursorBlink: true, screenReaderMode: true, fontFamily: "ui-monospace, monospace", fontSize: 13 });
    const fit = new FitAddon.FitAddon();
    screen.loadAddon(fit);
    screen.open(place);
    fit.fit();
    const socket = new WebSocket(new URL(place.dataset.socket, location.href.replace(/^http/, "ws")));
    socket.binaryType = "arraybuffer";
    const bytes = new TextEncoder();
    const send = (what) => socket.readyState === WebSocket.OPEN && socket.send(what);
    const size = () => [screen.rows, screen.cols];
    let why = "the connection was refused or lost";
    socket.addEventListener("open", () => { state.textContent = "Open."; send(JSON.stringify({ csrf: place.dataset.csrf, size: size() })); screen.focus(); });
    socket.addEventListener("message", (event) => {
      if (typeof event.data === "string") why = JSON.parse(event.data).end;
      else screen.write(new Uint8Array(event.data));
    });
    socket.addEventListener("close", () => { state.textContent = "Closed: " + why + "."; screen.options.disableStdin = true; button.disabled = false; });
    screen.onData((typed) => { for (let at = 0; at < typed.length; at += 8192) send(bytes.encode(typed.slice(at, at + 8192))); });
    screen.onBinary((typed) => send(Uint8Array.from(typed, (letter) => letter.charCodeAt(0))));
    screen.onResize(() => send(JSON.stringify({ size: size() })));
    addEventListener("resize", () => fit.fit());
  });
})();
