// One conversation: its text by branch, what it takes in each tier, and what can be done with it.

import { call, download, query, say } from "./api.js";
import { bytes, count, el, facts, layers, moment } from "./dom.js";

const NAMES = { user: "You", assistant: "Model", system: "Instructions", tool: "Tool" };

function pathOf(chat, more = {}) {
  const which = { scope: chat.scope, tokenizer: chat.tokenizer };
  return `/sessions/${encodeURIComponent(chat.id)}${query({ ...which, ...more })}`;
}

function actionPath(chat, action) {
  const which = { scope: chat.scope, tokenizer: chat.tokenizer };
  return `/sessions/${encodeURIComponent(chat.id)}/${action}${query(which)}`;
}

function tierFacts(session, cost) {
  if (!cost) return [["model", "of another model: it continues when that is served"]];
  const n = session.n_tokens;
  const left = n - cost.resumable_tokens;
  const resumes = session.cold_bytes ? `no: frozen, its ${count(n)} tokens are evaluated again`
    : left <= 1 ? "yes" : `the first ${count(cost.resumable_tokens)} of ${count(n)} tokens; the other ${count(left)} are evaluated`;
  return [
    ["resumes without prefill", resumes],
    ["in RAM", bytes(cost.hot_bytes)],
    ["on disk", bytes(cost.warm_bytes + cost.state_bytes)],
    ["coded", session.cold_bytes ? bytes(session.cold_bytes) : "–"],
    ["shared with others", cost.shared_tokens ? `the first ${count(cost.shared_tokens)} tokens` : "nothing"],
  ];
}

// Each turn below the one that it continues; the current branch is marked.
function branches(chat, turns) {
  const ends = turns.filter((turn) => !turns.some((other) => other.parent === turn.id));
  if (ends.length < 2) return null;
  const address = (turn) => `#/chat/${encodeURIComponent(chat.id)}${query({
    scope: chat.scope, tokenizer: chat.tokenizer, turn: turn.id })}`;
  const shown = chat.turn ? Number(chat.turn) : null;
  return el("section", {}, el("h3", {}, `${ends.length} branches`), el("ol", { class: "branches" },
    ends.map((turn) => el("li", {}, el("a", {
      href: address(turn),
      "aria-current": (shown ? turn.id === shown : turn.current) ? "true" : null,
    }, `${moment(turn.created)} · ${count(turn.n_prompt + turn.n_reply)} tokens`),
    turn.current ? " · current" : ""))));
}

function actions(chat, found, again) {
  const { session, cost, turns } = found;
  const run = (work) => async () => {
    try {
      say("");
      await work();
      await again();
    } catch (error) {
      say(error.message);
    }
  };
  const leaf = turns.filter((turn) => turn.current).at(-1)?.reply_node;
  const button = (text, work, kind = "") => el("button", { class: kind, click: run(work) }, text);
  const own = session.tokenizer ? [] : [
    cost?.pinned
      ? button("Unpin", () => call(`/pins/${leaf}`, "DELETE"))
      : button("Pin", () => call("/pins", "POST", { segment: leaf })),
    session.cold_bytes ? null : button("Freeze", () => call(actionPath(chat, "freeze"), "POST", {})),
    button("Warm up", () => call(actionPath(chat, "thaw"), "POST", {})),
  ];
  return el("div", { class: "actions" },
    button("Rename", async () => {
      const title = prompt("Title (empty: its first question)", session.title);
      if (title !== null) await call(pathOf(chat), "PATCH", { title });
    }),
    ...own,
    button("Export", () => download(actionPath(chat, "export"), `${session.id}.tower`)),
    button("Delete", async () => {
      if (!confirm(`Delete “${session.title || session.id}” for ever?`)) return;
      await call(pathOf(chat), "DELETE");
      location.hash = "#/";
    }, "danger"));
}

const message = ({ role, text }) =>
  el("article", { class: `message ${role in NAMES ? role : ""}` },
    role in NAMES ? el("h4", {}, NAMES[role]) : null, el("pre", { class: "text" }, text));

// opened: called with the session that is shown. changed: called after an action.
export async function showChat(pane, chat, opened, changed) {
  const found = await call(pathOf(chat, { cost: 1, footprint: 1 }));
  const { session, cost, turns } = found;
  opened(session);
  const again = async () => {
    await changed();
    if (location.hash.startsWith("#/chat/")) await showChat(pane, chat, opened, changed);
  };
  const text = el("div", {}, el("p", { class: "quiet" }, session.cold_bytes ? "Decoding…" : "Reading…"));
  pane.replaceChildren(...[
    el("h2", {}, session.title || session.id),
    actions(chat, found, again),
    facts([
      ["last used", moment(session.updated)],
      ["turns", count(session.n_turns)],
      ["tokens", count(session.n_tokens)],
      ...tierFacts(session, cost),
      ["id", session.id],
      ["tenant", session.scope],
    ]),
    session.footprint ? layers(session.footprint) : null,
    branches(chat, turns),
    el("h3", {}, "Text"),
    text,
  ].filter(Boolean));
  try {
    const { messages } = await call(pathOf(chat, { messages: 1, turn: chat.turn }));
    text.replaceChildren(...messages.map(message));
  } catch (error) {
    text.replaceChildren(el("p", {}, error.message));
  }
}
