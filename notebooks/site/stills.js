// Writes still_walk.svg and still_ring.svg, which the player's page shows where no script runs: node stills.js
//
// The player draws them itself, into elements that only know how to write themselves down.
const fs = require("fs");
const path = require("path");

class Element {
  constructor(name) { Object.assign(this, { name, attributes: {}, inside: [] }); }
  setAttribute(key, value) { this.attributes[key] = typeof value === "number" ? +value.toFixed(2) : value; }
  append(child) { this.inside.push(child); }
  set textContent(text) { this.inside = [text]; }
  toString() {
    const attributes = Object.entries(this.attributes).map(([key, value]) => ` ${key}="${value}"`).join("");
    return `<${this.name}${attributes}>${this.inside.join("")}</${this.name}>\n`;
  }
}

global.window = {};
global.document = { createElementNS: (_, name) => new Element(name) };
require("./traces.js");
const KINDS = require("./player.js");

// The picture of one frame. which: the trace's place in its list. Exported for the test, too.
function still(name, which, step) {
  const kind = KINDS[name], svg = new Element("svg");
  const [, , width, height] = kind.box.split(" ");
  const head = { xmlns: "http://www.w3.org/2000/svg", viewBox: kind.box, width: 2 * width, height: 2 * height };
  Object.entries(head).forEach(([key, value]) => svg.setAttribute(key, value));
  svg.setAttribute("font-family", "sans-serif");
  kind.draw(svg, kind.frames(window.TRACES[kind.traces].at(which))[step]);
  return svg.toString();
}

const STILLS = { "still_walk.svg": still("walk", -1, 11), "still_ring.svg": still("ring", -1, 1) };
if (require.main === module)
  for (const [name, text] of Object.entries(STILLS)) fs.writeFileSync(path.join(__dirname, name), text);
module.exports = { KINDS, STILLS };
