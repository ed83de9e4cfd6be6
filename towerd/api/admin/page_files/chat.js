// One conversation: its text by branch, what it takes in each tier, and what can be done with it.

import { call, download, query, say } from "./api.js";
import { bytes, count, el, facts, layerChart, layers, moment } from "./dom.js";
import { all, loadAndChoose } from "./models.js";
import { Talk, showEnd } from "./talk.js";

const chatHref = (chat) => `#/chat/${encodeURIComponent(chat.id)}${query({
  scope: chat.scope, tokenizer: chat.tokenizer, turn: chat.turn, model: chat.model })}`;

function pathOf(chat, more = {}) {
  const which = { scope: chat.scope, tokenizer: chat.tokenizer };
  return `/sessions/${encodeURIComponent(chat.id)}${query({ ...which, ...more })}`;
}

function actionPath(chat, action) {
  const which = { scope: chat.scope, tokenizer: chat.tokenizer };
  return `/sessions/${encodeURIComponent(chat.id)}/${action}${query(which)}`;
}

function tierFacts(session, cost) {
  if (!cost) return [["model", `${session.model || "another one"}: it continues when that is served`]];
  const n = session.n_tokens;
  const left = n - cost.resumable_tokens;
  const resumes = session.cold_bytes ? `no: frozen, its ${count(n)} tokens are evaluated again`
    : left <= 1 ? "yes" : `the first ${count(cost.resumable_tokens)} of ${count(n)} tokens; the other ${count(left)} are evaluated`;
  return [
    ["resumes without prefill", resumes],
    ["in RAM", bytes(cost.hot_bytes)],
    ["on disk", bytes(cost.warm_bytes + cost.state_bytes)],
    ["coded", session.cold_bytes ? bytes(session.cold_bytes) : "–"],
    ["model", session.model || "–"],
    ["shared with others", cost.shared_tokens > 1 ? `the first ${count(cost.shared_tokens)} tokens` : "nothing"],
  ];
}

// Each turn below the one that it continues; the current branch is marked.
function branches(chat, turns) {
  const ends = turns.filter((turn) => !turns.some((other) => other.parent === turn.id));
  if (ends.length < 2) return null;
  const address = (turn) => chatHref({ ...chat, turn: turn.id });
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
  const other = session.tokenizer && all()?.includes(session.model) ? [
    button(`Continue with ${session.model}`, async () => {
      await loadAndChoose(session.model);
      location.hash = chatHref({ id: session.id, scope: session.scope, model: session.model });
    }, "main")] : [];
  return el("div", { class: "actions" }, ...other,
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

// What would be free without it, of all its branches.
function freedFact({ tokens, hot_bytes, warm_bytes, state_bytes, cold_bytes }) {
  const disk = warm_bytes + state_bytes + cold_bytes;
  return `${count(tokens)} tokens: ${bytes(hot_bytes)} of RAM, ${bytes(disk)} on disk`;
}

// Why its last prompt was not found whole, if it was said since the daemon's start.
async function lastPrompt({ id, scope }) {
  const { finished: [last] } = await call(`/requests${query({ session: id, scope, limit: 1 })}`);
  if (!last) return null;
  const { live, hot, warm, prefill } = last.reuse;
  return [`${count(live + hot + warm)} tokens were there, `,
    el("a", { href: `#/why/${encodeURIComponent(last.id)}` }, `${count(prefill)} evaluated`),
    last.why ? `: ${last.why}` : ""];
}

let isAboutOpen = false;

function about({ session, cost, layers: rows, freed }, last) {
  const known = facts([
    ["last used", moment(session.updated)],
    ["turns", count(session.n_turns)],
    ["tokens", count(session.n_tokens)],
    ...tierFacts(session, cost),
    ...(freed ? [["deleting frees", freedFact(freed)]] : []),
    ...(last ? [["last prompt", last]] : []),
    ["id", session.id],
    ["tenant", session.scope],
  ]);
  const state = !cost ? "of another model" : session.cold_bytes ? "frozen"
    : session.n_tokens - cost.resumable_tokens <= 1 ? "resumes at once" : `${count(session.n_tokens - cost.resumable_tokens)} to evaluate`;
  const details = el("details", { class: "about", open: isAboutOpen, toggle: () => { isAboutOpen = details.open; } },
    el("summary", {}, [session.model, `${count(session.n_tokens)} tokens`, state].filter(Boolean).join(" · ")), known,
    session.footprint ? layers(session.footprint) : null, layerChart(rows));
  return details;
}

// opened: called with the session that is shown. changed: called after an action or a reply. Returns what is called
// with the session as it is listed from time to time. fromEnd: whether its last messages are shown first.
export async function showChat(pane, chat, opened, changed, fromEnd) {
  const head = el("div");
  let updated = 0;
  const fillHead = async () => {
    const found = await call(pathOf(talk.chat, { cost: 1, footprint: 1, layers: 1 }));
    const { session, turns } = found;
    const last = session.tokenizer ? null : await lastPrompt(session);
    updated = session.updated;
    opened(session);
    const again = async () => {
      await changed();
      if (pane.isConnected && location.hash.startsWith("#/chat/")) await Promise.all([fillHead(), talk.fill()]);
    };
    head.replaceChildren(...[
      el("h2", {}, session.title || session.id),
      actions(talk.chat, found, again),
      about(found, last),
      branches(talk.chat, turns),
    ].filter(Boolean));
  };
  const talk = new Talk(chat, async () => {
    if (pane.isConnected && chat.turn) {
      chat.turn = undefined;
      history.replaceState(null, "", chatHref(chat));
    }
    await Promise.all([fillHead(), changed()]);
  });
  const told = (error) => talk.messages.replaceChildren(el("p", {}, error.message));
  talk.messages.append(el("p", { class: "quiet" }, "Reading…"));
  pane.replaceChildren(head, talk.element);
  await Promise.all([fillHead(), talk.fill().catch(told)]);
  if (fromEnd && pane.isConnected) showEnd(talk.messages.lastElementChild);
  return async (session) => {
    if (session.updated === updated || talk.isRunning || talk.isEdited) return;
    await Promise.all([fillHead(), talk.fill()]);
  };
}
