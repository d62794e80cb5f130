// Plays the traces of traces.js. A player has frames; a frame has a picture, numbers and a sentence that can be read aloud.
(function () {
  const SVG = "http://www.w3.org/2000/svg";
  const RANKS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7"];
  const OPERANDS = { Q: "#0072b2", K: "#d55e00", V: "#e69f00", S: "#56b4e9", P: "#56b4e9", O: "#009e73" };
  const ORDERS = { standard: "standard", fa1: "FlashAttention-1", fa2: "FlashAttention-2" };
  const STILL = window.matchMedia("(prefers-reduced-motion: reduce)").matches;

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

  // A frame for each access. What lies on the chip: an array's rows from their load until other rows of it are touched.
  function framesOfWalk(walk) {
    const moved = { load: 0, store: 0 }, chip = {}, done = new Set();
    const tiles = walk.N / walk.tile;
    return walk.events.map(([what, name, first, end, count], n) => {
      moved[what] += count;
      chip[name] = [first, end];
      const all = walk.order === "standard";
      if (name === "V" && what === "load") {  // Q, K and V of a tile are there, or will be before the next access ends.
        const rows = all || walk.order === "fa1" ? null : chip.Q, keys = all ? [0, walk.N] : chip.K;
        if (rows) markTiles(done, rows, keys, walk.tile);
      }
      if (walk.order === "fa1" && name === "m" && what === "load") markTiles(done, chip.Q, chip.K, walk.tile);
      if (all && name === "S" && what === "store") markTiles(done, [0, walk.N], [0, walk.N], walk.tile);
      const verb = what === "load" ? "loads" : "stores", rows = `rows ${first} to ${end - 1} of ${name}`;
      const sentence = `${verb} ${rows}, ${count.toLocaleString("en")} numbers`;
      const total = `${moved.load.toLocaleString("en")} loaded, ${moved.store.toLocaleString("en")} stored`;
      return { walk, tiles, chip: { ...chip }, done: new Set(done), now: name, sentence, total, n };
    });
  }

  function markTiles(done, rows, keys, tile) {
    for (let i = rows[0]; i < rows[1]; i += tile)
      for (let j = keys[0]; j < keys[1]; j += tile) done.add(`${i / tile},${j / tile}`);
  }

  function drawWalk(svg, frame) {
    const { walk, tiles, chip, done, now } = frame, size = 120, side = size / tiles, left = 60, top = 58;
    for (let i = 0; i < tiles; i += 1)
      for (let j = 0; j < tiles; j += 1)
        rect(svg, left + j * side, top + i * side, side, side, OPERANDS.S, done.has(`${i},${j}`) ? 0.9 : 0);
    label(svg, left + size / 2, top + size / 2 + 3, "S");
    const names = [...new Set(walk.events.map((event) => event[1]))];
    const across = { K: 34, V: 12 };
    for (const [name, y] of Object.entries(across)) strip(svg, name, left, y, size, true, frame);
    let x = 36;
    strip(svg, "Q", x, top, size, false, frame);
    x = left + size + 12;
    for (const name of names.filter((one) => !"QKVSP".includes(one))) {
      strip(svg, name, x, top, size, false, frame);
      x += 26;
    }
    names.filter((one) => "SP".includes(one)).forEach((name, n) => {
      const y = 12 + 92 * n;
      rect(svg, x + 6, y, 64, 64, OPERANDS[name], chip[name] ? (now === name ? 0.9 : 0.3) : 0);
      label(svg, x + 38, y + 78, `${name} in memory`);
    });
  }

  function strip(svg, name, x, y, size, flat, { walk, chip, now }) {
    const rows = chip[name], unit = size / walk.N, colour = OPERANDS[name] || "#888888", wide = 16;
    rect(svg, x, y, flat ? size : wide, flat ? wide : size, "none");
    if (rows) {
      const [from, length] = [rows[0] * unit, (rows[1] - rows[0]) * unit];
      const opacity = name === now ? 0.95 : 0.4;
      if (flat) rect(svg, x + from, y, length, wide, colour, opacity);
      else rect(svg, x, y + from, wide, length, colour, opacity);
    }
    if (flat) label(svg, x - 10, y + 12, name);
    else label(svg, x + wide / 2, y + size + 14, name);
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
      const y = top + 44 * rank, x = left + size + 24;
      rect(svg, x, y, 14, 14, RANKS[rank]);
      shape(svg, "text", { x: x + 20, y: y + 11, "font-size": 10, fill: "currentColor" }, `rank ${rank}, keys of ${src}`);
      rect(svg, x, y + 18, 90, 9, "none");
      if (pairs[rank]) rect(svg, x, y + 18, (90 * pairs[rank]) / most, 9, RANKS[rank], 0.8);
    });
  }

  // --- a player -------------------------------------------------------------------------------------------------

  const KINDS = {
    walk: { traces: "walks", name: (one) => ORDERS[one.order], frames: framesOfWalk, draw: drawWalk, box: "0 0 330 205", ms: 350 },
    ring: { traces: "rings", name: (one) => one.layout, frames: framesOfRing, draw: drawRing, box: "0 0 350 210", ms: 1500 },
  };

  function player(root) {
    const kind = KINDS[root.dataset.kind], traces = window.TRACES[kind.traces];
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
  }

  document.querySelectorAll(".player").forEach(player);
})();
