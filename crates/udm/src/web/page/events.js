// The event log.

import { element } from "./text.js";

// Maximum number of lines.
const LINES_MAX = 200;

// Kinds of events that report a problem, and those that report its end.
const BAD = ["failed", "refused", "ejected", "no-path", "overflow", "invalid", "lost"];
const GOOD = ["reinstated", "admitted", "merge-done", "resumed"];

const tone = (kind) =>
  BAD.some((word) => kind.includes(word)) ? "bad" : GOOD.some((word) => kind.includes(word)) ? "good" : "";

// Puts an event on top of the log.
export function log(list, event) {
  const line = element("li", tone(event.kind));
  const at = new Date(event.time_ms);
  const ms = String(event.time_ms % 1000).padStart(3, "0");
  const clock = element("time", "", `${at.toLocaleTimeString([], { hour12: false })}.${ms}`);
  clock.dateTime = at.toISOString();
  line.append(clock, element("b", "", event.device), element("span", "", event.line));
  line.dataset.verb = "udm events";
  list.prepend(line);
  while (list.children.length > LINES_MAX) list.lastChild.remove();
}
