// The page of udm web: requests the figures once a second and after each event, and draws them.

import * as server from "./server.js";
import { detail } from "./detail.js";
import { log } from "./events.js";
import { Model } from "./model.js";
import { things } from "./text.js";
import { Tree } from "./tree.js";

const LOOK_MS = 1000;
// Delay that lets events which arrive together cause one update.
const SOON_MS = 60;
// Tables are requested at least this often, even without an event.
const TABLES_MS = 15_000;

const $ = (id) => document.getElementById(id);
const write = document.documentElement.dataset.write === "true";
const model = new Model();

let stale = true;
let laid = 0;
let timer = 0;
let busy = false;
let again = false;

function soon(ms) {
  clearTimeout(timer);
  timer = setTimeout(look, ms);
}

// Updates the figures. There is one update at a time; an event during an update causes another one.
async function look() {
  if (busy) {
    again = true;
    return;
  }
  [busy, again] = [true, false];
  try {
    if (stale || Date.now() - laid > TABLES_MS) {
      stale = false;
      const [tables, list] = await Promise.all([server.tables(), server.exported()]);
      model.lay(tables);
      model.reach(list);
      laid = Date.now();
    }
    model.look(await server.stats());
    live("live", "on");
    draw();
  } catch (error) {
    stale = true;
    live(`not answered: ${error.message}`, "off");
  }
  busy = false;
  soon(again ? SOON_MS : LOOK_MS);
}

function live(text, name) {
  $("live").textContent = text;
  $("live").className = name;
}

const tree = new Tree($("columns"), $("rows"), draw);

function draw() {
  const { stats } = model;
  if (!stats) return;
  $("version").textContent = stats.version;
  const totals = [things(stats.devices.length, "device")];
  if (stats.server) totals.push(things(stats.server.connections + (stats.nvme?.hosts ?? 0), "client"));
  $("totals").textContent = totals.join(", ");
  $("none").hidden = stats.devices.length > 0;
  detail(tree.show(model.tree()), stats, write ? () => soon(0) : null);
}

// Shows the command that prints the element under the pointer or with the focus.
function verb(event) {
  const found = event.target.closest?.("[data-verb]");
  const nothing = "Point at a number to see the command that prints it";
  $("verb").textContent = found ? `$ ${found.dataset.verb}` : nothing;
}

$("mode").textContent = write ? "may change devices" : "read-only";
$("version").dataset.verb = "udm version";
$("totals").dataset.verb = "udm ls";
document.addEventListener("pointerover", verb);
document.addEventListener("focusin", verb);
verb({ target: document.body });
server.events((event) => {
  log($("log"), event);
  stale = true;
  if (busy) again = true;
  else soon(SOON_MS);
});
look();
