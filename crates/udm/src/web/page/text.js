// Formats numbers for people.

// A count or a rate: 7, 1.2 k, 34 k, 5.6 M.
export function count(number) {
  if (number === null || number === undefined) return "–";
  if (number > 0 && number < 10 && !Number.isInteger(number)) return number.toFixed(1);
  return scaled(number, 1000, ["", " k", " M", " G", " T"]);
}

// A number of things: 1 user, 2 users.
export const things = (number, thing) => `${count(number)} ${thing}${number === 1 ? "" : "s"}`;

// Bytes in powers of 1024: 4 KiB, 1.5 GiB.
export function bytes(number) {
  if (number === null || number === undefined) return "–";
  return scaled(number, 1024, [" B", " KiB", " MiB", " GiB", " TiB", " PiB", " EiB"]);
}

// A part in percent.
export const percent = (part) => `${(part * 100).toFixed(part > 0.995 || part === 0 ? 0 : 1)} %`;

// A time in nanoseconds: 850 ns, 12 µs, 1.3 ms, 2.1 s.
export function time(ns) {
  if (ns === null || ns === undefined) return "–";
  return ns < 100e9 ? scaled(ns, 1000, [" ns", " µs", " ms", " s"]) : span(ns / 1e9);
}

// A duration in seconds: 2 min, 3 h, 5 d.
function span(seconds) {
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`;
}

function scaled(number, base, units) {
  let unit = 0;
  // A number that would round up to the base gets the next unit.
  while (unit + 1 < units.length && number >= base - 0.5) {
    number /= base;
    unit += 1;
  }
  const digits = unit > 0 && number < 9.95 ? 1 : 0;
  return number.toFixed(digits) + units[unit];
}

// Quotes a word for a shell.
export function quoted(word) {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'\\''`)}'`;
}

// An element with a text, which is never parsed as HTML, because names may contain anything.
export function element(kind, name, text) {
  const made = document.createElement(kind);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
}
