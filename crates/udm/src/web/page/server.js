// What the server is asked, through udm web: the paths are those of the control socket.

// How long an answer may take.
const PATIENCE_MS = 10_000;

async function ask(path, options = {}) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(PATIENCE_MS), ...options });
  if (!answer.ok) throw new Error(await why(answer));
  return answer.status === 204 ? null : answer.json();
}

// In one line, whether the server or udm web refused.
async function why(answer) {
  const text = await answer.text();
  try {
    return JSON.parse(text).error;
  } catch {
    return text.trim() || `the server answered ${answer.status}`;
  }
}

const under = (name, rest) => `/v1/devices/${encodeURIComponent(name)}/${rest}`;

const post = (path, body) =>
  ask(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });

export const stats = () => ask("/v1/stats");
export const tables = () => ask("/v1/tables");
export const exported = () => ask("/v1/exports");
export const status = (name) => ask(under(name, "status"));
export const suspend = (name) => post(under(name, "suspend"), { timeout_ms: PATIENCE_MS / 2 });
export const resume = (name) => post(under(name, "resume"), { timeout_ms: PATIENCE_MS / 2 });
export const commandPath = (name, path, action) => post(under(name, "path"), { path, action });

// Calls `each` with every change of state, from now on and until the page is closed. A browser
// asks again by itself where the stream ends, behind the last event that it had.
export function events(each, broken) {
  const source = new EventSource("/v1/events");
  source.onmessage = (message) => each(JSON.parse(message.data));
  source.onerror = () => {
    // Given up: the answer was no stream.
    if (source.readyState === EventSource.CLOSED) setTimeout(() => events(each, broken), 1000);
    broken();
  };
}
