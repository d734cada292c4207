// Line plots over two minutes.

const NS = "http://www.w3.org/2000/svg";
const SECONDS = 120;

function svg(kind, attributes, text) {
  const made = document.createElementNS(NS, kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// The SVG path through the points; it has gaps at samples without a value.
function way(looks, of, x, y) {
  let path = "";
  let on = false;
  for (const look of looks) {
    const value = of(look);
    const known = value !== null && value !== undefined;
    if (known) path += `${on ? "L" : "M"}${x(look.at).toFixed(1)} ${y(value).toFixed(1)}`;
    on = known;
  }
  return path;
}

// The next number of the form 1, 2 or 5 times a power of ten, as the end of an axis.
function round(max) {
  if (!(max > 0)) return 1;
  const ten = 10 ** Math.floor(Math.log10(max));
  return ten * [1, 2, 5, 10].find((step) => max <= ten * step * 1.0001);
}

// Draws the small plot of requests per second.
export function spark(graph, looks) {
  const [width, height] = [120, 20];
  graph.setAttribute("viewBox", `0 0 ${width} ${height}`);
  graph.setAttribute("class", "spark");
  const end = looks.at(-1)?.at ?? 0;
  const max = Math.max(1, ...looks.map((look) => look.requests ?? 0));
  const x = (at) => width - ((end - at) / SECONDS) * width;
  const y = (value) => height - 1 - (value / max) * (height - 3);
  graph.replaceChildren(svg("path", { d: way(looks, (look) => look.requests, x, y) }));
}

// Draws a plot with an axis. Each of `lines` has a name, a class, and a function that returns the
// value of a sample; `words` formats a value.
export function plot(graph, legend, looks, lines, words) {
  const width = graph.clientWidth || 400;
  const height = 130;
  const [left, bottom] = [64, 18];
  graph.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const end = looks.at(-1)?.at ?? 0;
  const seen = looks.flatMap((look) => lines.map(([, , of]) => of(look) ?? 0));
  const high = Math.max(0, ...seen);
  const max = round(high);
  const x = (at) => width - ((end - at) / SECONDS) * (width - left);
  const y = (value) => height - bottom - (value / max) * (height - bottom - 8);
  const parts = [];
  for (const part of [0, 0.5, 1]) {
    const at = y(max * part);
    parts.push(svg("line", { class: "grid", x1: left, x2: width, y1: at, y2: at }));
    // If all values are zero, the axis has no labels.
    const text = part === 0 ? "0" : high > 0 ? words(max * part) : "";
    parts.push(svg("text", { x: left - 6, y: at + 4, class: "axis end" }, text));
  }
  for (const ago of [120, 60, 0]) {
    const anchor = ago === 120 ? "start" : ago === 0 ? "end" : "middle";
    const text = ago === 0 ? "now" : `${ago} s ago`;
    parts.push(svg("text", { x: x(end - ago), y: height - 4, class: `axis ${anchor}` }, text));
  }
  for (const [, name, of] of lines) parts.push(svg("path", { class: `line ${name}`, d: way(looks, of, x, y) }));
  graph.replaceChildren(...parts);
  const said = lines.map(([label, name, of]) => {
    const item = document.createElement("span");
    item.className = `legend ${name}`;
    const value = looks.length > 0 ? of(looks.at(-1)) : null;
    item.textContent = `${label} ${value === null || value === undefined ? "–" : words(value)}`;
    return item;
  });
  legend.replaceChildren(...said);
}
