"use strict";

// Every value from the daemon goes through textContent: nothing is ever parsed as HTML.

const POLL_MS = 2000;
const get = (id) => document.getElementById(id);

async function fetchJson(path) {
  const headers = {};
  const key = sessionStorage.getItem("towerd-key");
  if (key) headers.Authorization = `Bearer ${key}`;
  const reply = await fetch(path, { headers });
  if (reply.status === 401) {
    get("login").hidden = false;
    throw new Error("an API key is needed");
  }
  const body = await reply.json();
  if (!reply.ok) throw new Error(body.error ? body.error.message : reply.statusText);
  return body;
}

function fill(table, rows) {
  const body = get(table).tBodies[0];
  body.replaceChildren(...rows.map((cells) => {
    const row = document.createElement("tr");
    for (const cell of cells) {
      const td = row.insertCell();
      if (cell instanceof Node) {
        td.className = "bar";
        td.append(cell);
      } else {
        td.textContent = String(cell);
      }
    }
    return row;
  }));
}

function bar(value, max) {
  const progress = document.createElement("progress");
  progress.max = max > 0 ? max : 1;
  progress.value = Math.min(value, progress.max);
  return progress;
}

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) {
    n /= 1024;
    unit += 1;
  }
  return `${n.toFixed(unit ? 1 : 0)} ${units[unit]}`;
}

function showStats(stats) {
  const { engine, tiers, reuse, space } = stats;
  const known = space.tokens_resumable + space.tokens_to_prefill;
  get("model").textContent =
    `${stats.model} · ${engine.running} running, ${engine.waiting} waiting · version ${stats.version}`;
  fill("tiers", [
    ["live", `${engine.live_cells_used} tokens`, `${engine.live_cells} tokens`,
      bar(engine.live_cells_used, engine.live_cells)],
    ["hot", bytes(tiers.hot_bytes), bytes(tiers.hot_bytes_max),
      bar(tiers.hot_bytes, tiers.hot_bytes_max)],
    ["warm", bytes(tiers.warm_bytes), bytes(tiers.warm_bytes_max),
      bar(tiers.warm_bytes, tiers.warm_bytes_max)],
    ["resumable", `${space.tokens_resumable} tokens`, `${known} tokens`,
      bar(space.tokens_resumable, known)],
  ]);
  const total = Object.values(reuse).reduce((a, b) => a + b, 0);
  fill("reuse", Object.entries(reuse).map(([source, n]) =>
    [source, n, total ? `${(100 * n / total).toFixed(1)} %` : "", bar(n, total)]));
  fill("live", stats.slots.map((slot) =>
    [slot.id, slot.is_processing ? "working" : "idle", slot.n_tokens, slot.n_decoded]));
}

function showSessions(sessions) {
  fill("sessions", sessions.map((session) => [
    session.id, session.title, session.n_tokens, session.n_turns,
    new Date(session.updated * 1000).toLocaleString(),
  ]));
}

async function poll() {
  await show("/towerd/v1/stats", showStats);
  await show("/towerd/v1/sessions?limit=100", (found) => showSessions(found.sessions));
  setTimeout(poll, POLL_MS);
}

async function show(path, work) {
  try {
    work(await fetchJson(path));
    get("login").hidden = true;
  } catch (error) {
    get("model").textContent = error.message;
  }
}

get("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("towerd-key", get("key").value);
});

poll();
