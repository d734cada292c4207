// The model of the page: the tree of devices, and rates from two consecutive statistics.

// Number of samples that are kept: two minutes.
const LOOKS_MAX = 120;

// Maximum depth of the tree. Tables that change between requests may seem to form a cycle.
const DEPTH_MAX = 20;

// The sum of the counters of some operations.
function add(all, ops) {
  const sum = { requests: 0, bytes: 0, errors: 0, latency: new Map() };
  for (const one of all.flatMap((served) => ops.map((op) => served[op] ?? []).flat())) {
    sum.requests += one.requests;
    sum.bytes += one.bytes;
    sum.errors += one.errors ?? 0;
    for (const [below, n] of one.latency ?? []) sum.latency.set(below, (sum.latency.get(below) ?? 0) + n);
  }
  return sum;
}

// The difference of two sums.
function since(now, then) {
  const steps = [...now.latency].map(([below, n]) => [below, n - (then.latency.get(below) ?? 0)]);
  return {
    requests: now.requests - then.requests,
    bytes: now.bytes - then.bytes,
    errors: now.errors - then.errors,
    steps: steps.filter(([, n]) => n > 0).sort(([a], [b]) => a - b),
  };
}

// The latency that `part` of the requests do not exceed; null without requests.
export function percentile(steps, part) {
  const all = steps.reduce((sum, [, n]) => sum + n, 0);
  let left = Math.ceil(all * part);
  for (const [below, n] of steps) {
    left -= n;
    if (left <= 0) return below;
  }
  return null;
}

const READS = ["read"];
const CHANGES = ["write", "discard", "write-zeroes"];
const ALL = ["read", "write", "flush", "discard", "write-zeroes"];

// The sums of one or several devices or paths, from which differences are computed.
const totals = (served) => ({ reads: add(served, READS), changes: add(served, CHANGES), all: add(served, ALL) });

// Requests that failed on a path.
export const errorsOf = (path) => Object.values(path.errors).reduce((sum, n) => sum + n, 0);

// The rates between two samples.
function rates(now, then, seconds) {
  const [reads, changes, all] = ["reads", "changes", "all"].map((kind) => since(now[kind], then[kind]));
  // Decreasing counters belong to a restarted server, or to another table or path.
  if (all.requests < 0 || seconds <= 0) return null;
  return {
    reads: reads.requests / seconds,
    changes: changes.requests / seconds,
    requests: all.requests / seconds,
    bytes: all.bytes / seconds,
    errors: all.errors / seconds,
    p50: percentile(all.steps, 0.5),
    p99: percentile(all.steps, 0.99),
  };
}

export class Model {
  stats = null;
  #tables = new Map();
  #uris = new Map();
  // The last sums and the recent rates, by device or path.
  #known = new Map();

  // Adds the statistics `stats`; devices and paths that no longer exist are dropped. A device
  // without NBD clients gets the sums of its paths, because other devices may use it.
  look(stats) {
    const before = this.stats;
    const same = before && before.started_ms === stats.started_ms;
    const seconds = same ? (stats.up_ns - before.up_ns) / 1e9 : 0;
    // Two statistics of nearly the same time give no rate.
    if (same && seconds < 0.02) return;
    const known = new Map();
    const keep = (key, sum) => {
      const old = same ? this.#known.get(key) : undefined;
      const rate = old ? rates(sum, old.sum, seconds) : null;
      const looks = rate ? old.looks : [];
      looks.push({ at: stats.up_ns / 1e9, ...rate });
      if (looks.length > LOOKS_MAX) looks.shift();
      known.set(key, { sum, looks });
    };
    for (const one of stats.devices) {
      const asked = Object.keys(one.served).length > 0;
      keep(one.device.number, totals(asked ? [one.served] : one.paths.map((path) => path.served)));
      one.paths.forEach((path, nth) => {
        const sum = totals([path.served]);
        sum.all.errors = errorsOf(path);
        for (const step of path.watch?.latency ?? []) sum.all.latency.set(step.below_ns, step.reads);
        keep(pathKey(one, nth), sum);
      });
    }
    this.#known = known;
    this.stats = stats;
  }

  // Sets the tables, which give the edges of the tree.
  lay(tables) {
    this.#tables = new Map(tables.tables.map((table) => [table.number, table]));
  }

  // Sets the exports, which give the NBD URIs of devices.
  reach(list) {
    this.#uris = new Map(list.exports.map((one) => [one.name, one.uris]));
  }

  // The roots of the tree: devices that no other device uses.
  tree() {
    if (!this.stats) return [];
    const devices = new Map(this.stats.devices.map((one) => [one.device.number, one]));
    const used = new Set([...this.#tables.values()].flatMap((t) => t.devices.map((below) => below.number)));
    const roots = this.stats.devices.filter((one) => !used.has(one.device.number));
    return roots.map((one) => this.#device(one, devices, "", 0));
  }

  #device(one, devices, above, depth) {
    const key = `${above}/${one.device.number}`;
    const table = this.#tables.get(one.device.number);
    const known = this.#known.get(one.device.number);
    // The order of the table; the kernel's order is the reverse.
    const below = depth < DEPTH_MAX ? (table?.devices ?? []).toReversed() : [];
    const uris = new Map(below.map((each) => [each.number, each.uri]));
    const lower = (number) => devices.get(number);
    const inside = (number, at) => (lower(number) ? [this.#device(lower(number), devices, at, depth + 1)] : []);
    const paths = one.paths.map((path, nth) => {
      const at = `${key}/path ${nth}`;
      return {
        key: at, kind: "path", one, path,
        name: uris.get(path.number) ?? path.name,
        state: path.ejected ? "ejected" : path.state,
        looks: this.#known.get(pathKey(one, nth))?.looks ?? [],
        below: depth < DEPTH_MAX ? inside(path.number, at) : [],
      };
    });
    const mine = new Set(one.paths.map((path) => path.number));
    const others = below.filter((each) => !mine.has(each.number)).flatMap((each) => {
      const found = inside(each.number, key);
      if (found.length > 0) return found;
      return [{ key: `${key}/${each.number}`, kind: "disk", one, name: each.uri, state: "", looks: [], below: [] }];
    });
    return {
      key, kind: "device", one, table,
      name: one.device.name,
      state: stateOf(one),
      uris: this.#uris.get(one.device.name) ?? [],
      looks: known?.looks ?? [],
      errors: known?.sum.all.errors ?? 0,
      below: [...paths, ...others],
    };
  }
}

// The index distinguishes two paths of a device that lead to the same disk.
const pathKey = (one, nth) => `${one.device.number} path ${nth}`;

// The state in one word.
function stateOf(one) {
  if (one.device.state === "suspended") return "suspended";
  if (!one.device.live_table) return "no table";
  if (one.paths.length > 0) {
    const failed = one.paths.filter((path) => path.state !== "active").length;
    if (failed === one.paths.length) return "no path";
    if (failed > 0) return "degraded";
  }
  const snapshot = one.snapshot?.state;
  return ["invalid", "overflow", "merge failed", "merging"].includes(snapshot) ? snapshot : "active";
}
