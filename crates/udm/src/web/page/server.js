// Requests to the server through udm web; the paths are those of the control socket.

// Time limit of a response.
const PATIENCE_MS = 10_000;
// Pause before a stream that ended is opened again.
const AGAIN_MS = 1000;
const LISTEN_HEADER = "last-event-id";

const token = takeToken();

// The token is after the # of the address that udm web printed. It is stored for this tab and port,
// and removed from the address.
function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem("token", given);
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem("token") ?? "";
}

async function request(path, { headers, ...options }) {
  const answer = await fetch(path, { headers: { authorization: `Bearer ${token}`, ...headers }, ...options });
  if (!answer.ok) throw new Error(await why(answer));
  return answer;
}

async function ask(path, options = {}) {
  const answer = await request(path, { signal: AbortSignal.timeout(PATIENCE_MS), ...options });
  return answer.status === 204 ? null : answer.json();
}

// The error in one line, from the server or from udm web.
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

// Calls `each` with every event until the page is closed. If the stream ends, it is opened again
// after the last event. (An EventSource cannot send the token.)
export async function events(each) {
  for (let last = ""; ; await new Promise((done) => setTimeout(done, AGAIN_MS))) {
    try {
      const headers = last ? { [LISTEN_HEADER]: last } : {};
      const answer = await request("/v1/events", { headers });
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (let part = await reader.read(); !part.done; part = await reader.read()) {
        const blocks = (rest + part.value).split("\n\n");
        rest = blocks.pop();
        for (const block of blocks) last = told(block, each) ?? last;
      }
    } catch {
      // The error is ignored: the regular update reports it.
    }
  }
}

// Parses one server-sent event: stores its number, and passes its data to `each`.
function told(block, each) {
  const field = (name) =>
    block.split("\n").find((line) => line.startsWith(`${name}:`))?.slice(name.length + 1).trimStart();
  const data = field("data");
  if (data) each(JSON.parse(data));
  return field("id");
}
