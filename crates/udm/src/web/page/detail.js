// The detail pane: the figures of the selected row.

import * as server from "./server.js";
import { plot } from "./plot.js";
import { bytes, count, element, percent, quoted, things, time } from "./text.js";

const $ = (id) => document.getElementById(id);

const RATES = [
  ["reads/s", "reads", (look) => look.reads],
  ["writes/s", "changes", (look) => look.changes],
];
const TIMES = [
  ["p50", "p50", (look) => look.p50],
  ["p99", "p99", (look) => look.p99],
];

// Draws the row `node` of the tree of `stats`. `changed` is called after a button has changed a
// device; without `changed` there are no buttons.
export function detail(node, stats, changed) {
  $("detail").hidden = node === null;
  if (node === null) return;
  const name = node.one.device.name;
  $("chosen").textContent = node.name;
  $("facts").replaceChildren(...facts(node).flatMap((fact) => [element("span", "", fact), " "]));
  $("facts").dataset.verb = node.kind === "path" ? `udm status ${quoted(name)} --json` : `udm info ${quoted(name)}`;
  plot($("rate"), $("rate-words"), node.looks, RATES, count);
  plot($("time"), $("time-words"), node.looks, TIMES, time);
  for (const id of ["rate", "rate-words", "time", "time-words"]) $(id).dataset.verb = "udm top";
  fill(node);
  $("table").textContent = node.table ? node.table.text : "";
  $("table").dataset.verb = `udm table ${quoted(name)}`;
  // Buttons are not replaced on each draw: a button that is replaced while it is pressed does
  // nothing.
  if (changed && $("actions").dataset.key !== node.key) {
    $("actions").dataset.key = node.key;
    $("actions").replaceChildren(...actions(node, stats, changed));
  }
  status(node);
}

function facts(node) {
  const { device, snapshot } = node.one;
  if (node.kind === "disk") return [`below ${device.name}`];
  if (node.kind === "path") {
    const { path } = node;
    const said = [`path ${path.number} of ${device.name}`, `${path.state} for ${time(path.state_ns)}`];
    said.push(`checker: ${path.checker}`, `failed ${things(path.failures, "time")}, ${time(path.failed_ns)} in all`);
    if (path.held) said.push(`held: ${path.held}`);
    if (path.priority !== null) said.push(`priority ${path.priority}`);
    for (const [error, n] of Object.entries(path.errors)) said.push(`${things(n, "time")} ${error}`);
    said.push(`retried here: ${count(path.retries)}`);
    if (path.watch) said.push(`hedges: ${count(path.watch.hedges)}, won ${count(path.watch.hedges_won)}`);
    return said;
  }
  const said = [device.number, bytes(device.size_bytes), node.state, things(device.open_count, "user")];
  if (device.uuid) said.push(`uuid ${device.uuid}`);
  if (device.read_only) said.push("read-only");
  if (device.inactive_table) said.push("a table is loaded");
  if (snapshot?.origin) said.push(`snapshot of ${snapshot.origin}`);
  return [...said, ...node.uris];
}

function fill(node) {
  const snapshot = node.kind === "device" ? node.one.snapshot : null;
  $("fill").hidden = !snapshot;
  if (!snapshot) return;
  const part = snapshot.total_bytes > 0 ? snapshot.used_bytes / snapshot.total_bytes : 0;
  $("fill-used").style.width = `${Math.min(100, part * 100)}%`;
  $("fill-used").className = part > 0.9 ? "full" : "";
  const used = `${bytes(snapshot.used_bytes)} of ${bytes(snapshot.total_bytes)}, ${percent(part)}`;
  $("fill-words").textContent = `store: ${used}, ${snapshot.state}`;
  $("fill").dataset.verb = `udm status ${quoted(node.one.device.name)}`;
}

// The status is requested when the selection changes, and with each update.
async function status(node) {
  const name = node.one.device.name;
  $("status").dataset.verb = `udm status ${quoted(name)}`;
  let text;
  try {
    const now = await server.status(name);
    text = [now.text.trimEnd(), ...now.stalls.map((stall) => `${stall.uri}: ${stall.why}`)].join("\n");
  } catch (error) {
    text = error.message;
  }
  // The selection may have changed meanwhile.
  if ($("chosen").textContent === node.name) $("status").textContent = text;
}

function actions(node, stats, changed) {
  const name = node.one.device.name;
  const word = quoted(name);
  const button = (label, verb, run) => {
    const made = element("button", "", label);
    made.dataset.verb = verb;
    made.onclick = async () => {
      if (!window.confirm(verb)) return;
      try {
        await run();
      } catch (error) {
        window.alert(error.message);
      }
      changed();
    };
    return made;
  };
  if (node.kind === "path") {
    const { number } = node.path;
    // As with the verb, the command applies to all devices that have the path.
    const having = stats.devices.filter((one) => one.paths.some((path) => path.number === number));
    return ["fail", "reinstate"].map((action) =>
      button(action, `udm multipath ${action} path ${number}`, async () => {
        for (const { device } of having) await server.commandPath(device.name, number, action);
      }),
    );
  }
  if (node.kind !== "device") return [];
  return [
    button("suspend", `udm suspend ${word}`, () => server.suspend(name)),
    button("resume", `udm resume ${word}`, () => server.resume(name)),
  ];
}
