// The tree of devices, from export to disk, as rows of a table.

import { errorsOf } from "./model.js";
import { spark } from "./plot.js";
import { bytes, count, element, percent, quoted, time } from "./text.js";

// If there are more devices than this, they are folded at first.
const OPEN_MAX = 40;

// Longer names show only their end, because the beginning of an address says little.
const NAME_MAX = 36;

const last = (node) => node.looks.at(-1) ?? {};
const unlessDisk = (text) => (node) => (node.kind === "disk" ? "" : text(node));
const mine = (node) => quoted(node.one.device.name);
const info = (node) => `udm info ${mine(node)}`;
const status = (node) => `udm status ${mine(node)}`;
const rate = (node) => (node.kind === "path" ? `${status(node)} --json` : "udm top");

// The columns: heading, text of a row, and the command that prints it.
const COLUMNS = [
  ["Device", null, (node) => (node.kind === "device" ? info(node) : `udm deps -o devname ${mine(node)}`)],
  ["State", stateText, (node) => (node.kind === "path" ? "udm multipath show paths" : info(node))],
  ["Target", targetText, (node) => (node.kind === "path" ? status(node) : `udm table ${mine(node)}`)],
  ["2 min", null, rate],
  ["Requests/s", unlessDisk((node) => count(last(node).requests)), rate],
  ["Bytes/s", unlessDisk((node) => bytes(last(node).bytes)), rate],
  ["p50", unlessDisk((node) => time(last(node).p50)), rate],
  ["p99", unlessDisk((node) => time(last(node).p99)), rate],
  ["In flight", unlessDisk((node) => count((node.path ?? node.one).in_flight)), rate],
  ["Errors", unlessDisk((node) => count(node.path ? errorsOf(node.path) : node.errors)), rate],
];
const GRAPH = COLUMNS.findIndex(([heading]) => heading === "2 min");

function stateText(node) {
  if (node.path?.held) return `${node.state}, held`;
  const store = node.kind === "device" ? node.one.snapshot : null;
  return store?.total_bytes > 0 ? `${node.state}, ${percent(store.used_bytes / store.total_bytes)}` : node.state;
}

function targetText(node) {
  if (node.kind === "path") return `group ${node.path.group}`;
  return node.kind === "device" ? node.one.target_types.join(", ") : "";
}

export class Tree {
  #body;
  #choose;
  #rows = new Map();
  #folded = new Map();
  #draw = () => {};
  #chosen = null;

  constructor(head, body, choose) {
    this.#body = body;
    this.#choose = choose;
    const line = element("tr");
    COLUMNS.forEach(([heading]) => line.append(element("th", "", heading)));
    head.append(line);
  }

  // Shows the tree and marks the selected row; returns the selected node.
  show(roots) {
    this.#draw = () => this.show(roots);
    const crowded = roots.length > OPEN_MAX;
    const rows = new Map();
    let chosen = null;
    const walk = (node, depth) => {
      const row = this.#rows.get(node.key) ?? this.#row(node.key);
      rows.set(node.key, row);
      const folded = node.below.length > 0 && (this.#folded.get(node.key) ?? (crowded && depth === 0));
      row.fill(node, depth, folded);
      if (this.#chosen === null && node.kind === "device") this.#chosen = node.key;
      if (node.key === this.#chosen) chosen = node;
      if (!folded) node.below.forEach((below) => walk(below, depth + 1));
    };
    roots.forEach((root) => walk(root, 0));
    // The selected node no longer exists.
    if (chosen === null && this.#chosen !== null && roots.length > 0) {
      this.#chosen = null;
      return this.show(roots);
    }
    for (const [key, row] of rows) row.line.classList.toggle("chosen", key === this.#chosen);
    // The DOM rows are replaced only if the tree has changed.
    const lines = [...rows.values()].map((row) => row.line);
    if (lines.length !== this.#body.children.length || lines.some((line, n) => line !== this.#body.children[n])) {
      this.#body.replaceChildren(...lines);
    }
    this.#rows = rows;
    return chosen;
  }

  #row(key) {
    const line = element("tr");
    const cells = COLUMNS.map(() => line.insertCell());
    const name = cells[0];
    const fold = element("button", "fold");
    const label = element("button", "name");
    name.append(fold, label);
    const graph = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    cells[GRAPH].append(graph);
    const row = {
      line,
      fill: (node, depth, folded) => {
        line.className = `${node.kind} ${node.state.replaceAll(" ", "-")}`;
        line.dataset.name = node.name;
        name.style.setProperty("--depth", depth);
        fold.textContent = node.below.length === 0 ? "" : folded ? "▸" : "▾";
        fold.disabled = node.below.length === 0;
        fold.setAttribute("aria-label", folded ? "unfold" : "fold");
        fold.onclick = () => {
          this.#folded.set(key, !folded);
          this.#draw();
        };
        label.textContent = node.name.length > NAME_MAX ? `…${node.name.slice(1 - NAME_MAX)}` : node.name;
        label.title = node.name;
        label.onclick = () => {
          this.#chosen = key;
          this.#choose(this.#draw);
        };
        COLUMNS.forEach(([, text, verb], n) => {
          if (text) cells[n].textContent = text(node);
          cells[n].dataset.verb = verb(node);
        });
        spark(graph, node.looks);
      },
    };
    return row;
  }
}
