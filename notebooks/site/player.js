// Plays the traces of traces.js. A player has frames; a frame has a picture, numbers and a sentence that can be read aloud.
(function () {
  const SVG = "http://www.w3.org/2000/svg";
  const RANKS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7"];
  const OPERANDS = { Q: "#0072b2", K: "#d55e00", V: "#e69f00", S: "#56b4e9", P: "#56b4e9", O: "#009e73" };
  const ORDERS = { standard: "standard", fa1: "FlashAttention-1", fa2: "FlashAttention-2" };
  const STILL = typeof module === "undefined" && window.matchMedia("(prefers-reduced-motion: reduce)").matches;

  function element(name, parent, text) {
    const made = document.createElement(name);
    if (text) made.textContent = text;
    parent.append(made);
    return made;
  }

  function shape(parent, name, attributes, text) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text) made.textContent = text;
    parent.append(made);
    return made;
  }

  function rect(parent, x, y, width, height, fill, opacity = 1) {
    shape(parent, "rect", { x, y, width, height, fill, "fill-opacity": opacity, stroke: "currentColor", "stroke-width": 0.4 });
  }

  function label(parent, x, y, text) {
    shape(parent, "text", { x, y, "font-size": 10, fill: "currentColor", "text-anchor": "middle" }, text);
  }

  // --- three orders ---------------------------------------------------------------------------------------------

  // What leaves the chip after an array is stored: the tile that is finished, and what was loaded for it.
  const LEAVES = {
    standard: { S: ["Q", "K", "S"], lse: ["lse"], P: ["S", "P"], O: ["P", "V", "O"] },
    fa1: { O: [], l: [], m: ["Q", "O", "l", "m"] },
    fa2: { O: ["O", "V", "K"], lse: ["Q", "m", "l", "lse"] },
  };

  // A frame for each access: what lies on the chip at that moment, what has been written to memory, what is computed.
  function framesOfWalk(walk) {
    const moved = { load: 0, store: 0 }, chip = {}, written = {}, done = new Set();
    const all = walk.order === "standard", last = walk.order === "fa1" ? "m" : "V";
    let leaving = [];
    return walk.events.map(([what, name, first, end, count], n) => {
      for (const gone of leaving) delete chip[gone];
      leaving = what === "store" ? LEAVES[walk.order][name] : [];
      if (name === "K" && what === "load") delete chip.V;  // the old tile's V
      moved[what] += count;
      chip[name] = [first, end];
      if (walk.order === "fa2" && name === "Q") for (const born of ["O", "m", "l"]) chip[born] = [first, end];
      if (what === "store") (written[name] = written[name] || []).push([first, end]);
      if (what === "load" && name === last && !all) markTiles(done, chip.Q, chip.K, walk.tile);
      if (all && name === "S" && what === "store") markTiles(done, [0, walk.N], [0, walk.N], walk.tile);
      const verb = what === "load" ? "loads" : "stores", rows = `rows ${first} to ${end - 1} of ${name}`;
      const sentence = `${verb} ${rows}, ${count.toLocaleString("en")} numbers`;
      const total = `${moved.load.toLocaleString("en")} loaded, ${moved.store.toLocaleString("en")} stored`;
      const past = Object.fromEntries(Object.entries(written).map(([key, value]) => [key, value.slice()]));
      return { walk, chip: { ...chip }, written: past, done: new Set(done), now: name, sentence, total, n };
    });
  }

  function markTiles(done, rows, keys, tile) {
    for (let i = rows[0]; i < rows[1]; i += tile)
      for (let j = keys[0]; j < keys[1]; j += tile) done.add(`${i / tile},${j / tile}`);
  }

  function drawWalk(svg, frame) {
    const { walk, done } = frame, tiles = walk.N / walk.tile, size = 120, side = size / tiles, left = 60, top = 58;
    for (let i = 0; i < tiles; i += 1)
      for (let j = 0; j < tiles; j += 1)
        rect(svg, left + j * side, top + i * side, side, side, OPERANDS.S, done.has(`${i},${j}`) ? 0.9 : 0);
    label(svg, left + size / 2, top + size / 2 + 3, "S");
    strip(svg, "K", left, 34, size, true, frame);
    strip(svg, "V", left, 12, size, true, frame);
    strip(svg, "Q", 36, top, size, false, frame);
    const names = { standard: ["O", "lse"], fa1: ["O", "l", "m"], fa2: ["O", "l", "m", "lse"] }[walk.order];
    names.forEach((name, n) => strip(svg, name, left + size + 12 + 26 * n, top, size, false, frame));
    if (walk.order !== "standard") return;
    ["S", "P"].forEach((name, n) => square(svg, name, left + size + 76, 12 + 92 * n, frame));
  }

  // Pale rows lie in memory, bright ones on the chip, and those with a frame move now.
  function shade(name, { chip, written, now }) {
    const whole = "QKV".includes(name);
    return { inMemory: whole ? "all" : written[name] || [], onChip: chip[name], framed: name === now };
  }

  function strip(svg, name, x, y, size, flat, frame) {
    const unit = size / frame.walk.N, colour = OPERANDS[name] || "#888888", wide = 16;
    const part = ([first, end], opacity, framed) => {
      const from = first * unit, length = (end - first) * unit;
      const box = flat ? [x + from, y, length, wide] : [x, y + from, wide, length];
      rect(svg, ...box, colour, opacity);
      if (framed) shape(svg, "rect", { ...boxOf(box), fill: "none", stroke: "currentColor", "stroke-width": 2 });
    };
    const { inMemory, onChip, framed } = shade(name, frame);
    rect(svg, x, y, flat ? size : wide, flat ? wide : size, "none");
    for (const rows of inMemory === "all" ? [[0, frame.walk.N]] : inMemory) part(rows, 0.12);
    if (onChip) part(onChip, 0.85, framed);
    if (flat) label(svg, x - 10, y + 12, name);
    else label(svg, x + wide / 2, y + size + 14, name);
  }

  function square(svg, name, x, y, frame) {
    const { inMemory, onChip, framed } = shade(name, frame), box = [x, y, 64, 64];
    rect(svg, ...box, OPERANDS[name], onChip ? 0.85 : inMemory.length ? 0.2 : 0);
    if (framed) shape(svg, "rect", { ...boxOf(box), fill: "none", stroke: "currentColor", "stroke-width": 2 });
    label(svg, x + 32, y + 78, `all of ${name}`);
  }

  function boxOf([x, y, width, height]) {
    return { x, y, width, height };
  }

  // --- the ring -------------------------------------------------------------------------------------------------

  function framesOfRing(ring) {
    const cells = [], totals = new Array(ring.ranks).fill(0);
    return ring.steps.map((step, n) => {
      const pairs = step.map(({ src, q, k }, rank) => {
        let count = 0;
        for (const i of ring.positions[rank].slice(...q))
          for (const j of ring.positions[src].slice(...k)) if (j <= i) { cells.push([i, j, rank, n]); count += 1; }
        totals[rank] += count;
        return count;
      });
      const held = step.map(({ src }, rank) => `rank ${rank} has the keys of ${src} and computes ${pairs[rank]} pairs`);
      const sentence = `Step ${n + 1}: ${held.join("; ")}`;
      const idle = `busiest rank: ${Math.max(...pairs)} pairs in this step; so far ${totals.join(", ")}`;
      return { ring, n, step, pairs, cells: cells.slice(), sentence, total: idle };
    });
  }

  function drawRing(svg, { ring, n, step, pairs, cells }) {
    const size = 176, unit = size / ring.S, left = 40, top = 26;
    ring.positions.forEach((positions, rank) => positions.forEach((i) => {
      rect(svg, left - 12, top + i * unit, 8, unit, RANKS[rank]);
      rect(svg, left + i * unit, top - 12, unit, 8, RANKS[rank]);
    }));
    label(svg, left + size / 2, 10, "keys, by owner");
    label(svg, 13, top + size / 2, "q");
    for (let i = 0; i < ring.S; i += 1) rect(svg, left, top + i * unit, (i + 1) * unit, unit, "none");
    for (const [i, j, rank, when] of cells)
      rect(svg, left + j * unit, top + i * unit, unit, unit, RANKS[rank], when === n ? 1 : 0.35);
    const most = Math.max(...pairs);
    step.forEach(({ src }, rank) => {
      const y = top + 44 * rank, x = left + size + 24, next = (rank + 1) % ring.ranks;
      const words = (dx, text) => shape(svg, "text", { x: x + dx, y: y + 11, "font-size": 10, fill: "currentColor" }, text);
      rect(svg, x, y, 14, 14, RANKS[rank]);
      words(18, `rank ${rank} holds`);
      rect(svg, x + 80, y, 14, 14, RANKS[src]);
      words(98, `K, V of ${src}${n < ring.ranks - 1 ? `, then to ${next}` : ""}`);
      rect(svg, x, y + 18, 90, 9, "none");
      if (pairs[rank]) rect(svg, x, y + 18, (90 * pairs[rank]) / most, 9, RANKS[rank], 0.8);
    });
  }

  // --- a player -------------------------------------------------------------------------------------------------

  const KINDS = {
    walk: { traces: "walks", name: (one) => ORDERS[one.order], frames: framesOfWalk, draw: drawWalk, box: "0 0 330 205", ms: 350 },
    ring: { traces: "rings", name: (one) => one.layout, frames: framesOfRing, draw: drawRing, box: "0 0 430 210", ms: 1500 },
  };

  function player(root) {
    const kind = KINDS[root.dataset.kind], traces = window.TRACES[kind.traces];
    root.replaceChildren();  // the still picture, which is there for pages without script
    let frames, at = 0, timer = null;
    const choice = element("p", root), buttons = traces.map((trace) => {
      const button = element("button", choice, kind.name(trace));
      button.onclick = () => { stop(); start(trace, button); };
      return button;
    });
    const svg = shape(root, "svg", { viewBox: kind.box, role: "img", "aria-label": "the trace's picture; the words are below it" });
    const controls = element("p", root), play = element("button", controls, "Play");
    const back = element("button", controls, "Back"), next = element("button", controls, "Next");
    const slider = element("input", controls);
    slider.type = "range";
    slider.setAttribute("aria-label", "step of the trace");
    const sentence = element("p", root), total = element("p", root);
    sentence.setAttribute("aria-live", "polite");
    total.className = "total";

    function show(n) {
      at = Math.max(0, Math.min(frames.length - 1, n));
      slider.value = at;
      svg.replaceChildren();
      kind.draw(svg, frames[at]);
      sentence.textContent = `${at + 1} of ${frames.length}. ${frames[at].sentence}.`;
      total.textContent = frames[at].total;
      if (at === frames.length - 1) stop();
    }

    function stop() {
      clearInterval(timer);
      timer = null;
      play.textContent = "Play";
    }

    function start(trace, pressed) {
      frames = kind.frames(trace);
      slider.max = frames.length - 1;
      buttons.forEach((button) => button.setAttribute("aria-pressed", button === pressed));
      show(0);
    }

    play.onclick = () => {
      if (timer) { stop(); return; }
      if (at === frames.length - 1) show(0);
      play.textContent = "Pause";
      timer = setInterval(() => show(at + 1), STILL ? 3 * kind.ms : kind.ms);
    };
    back.onclick = () => { stop(); show(at - 1); };
    next.onclick = () => { stop(); show(at + 1); };
    slider.oninput = () => { stop(); show(Number(slider.value)); };
    start(traces.at(-1), buttons.at(-1));
    return { root, step: (by) => { stop(); show(at + by); } };
  }

  // How much of an element can be seen, in pixels.
  function seen(root) {
    const { top, bottom } = root.getBoundingClientRect();
    return Math.min(bottom, window.innerHeight) - Math.max(top, 0);
  }

  // The arrow keys step the player that is chosen, or else the one that is seen best, wherever the page is.
  function withArrowKeys(players) {
    window.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const typing = event.target.matches("textarea, select, input:not([type=range])");
      if (!by || typing || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      event.stopPropagation();  // The page before or after this one is not meant.
      const chosen = players.find((one) => one.root.contains(event.target));
      (chosen || players.reduce((best, one) => (seen(one.root) > seen(best.root) ? one : best))).step(by);
    }, true);
  }

  if (typeof module !== "undefined") module.exports = KINDS;  // for stills.js
  else withArrowKeys([...document.querySelectorAll(".player")].map(player));
})();
