// The list of conversations, with the search, beside the one that is open.

import { call, query } from "./api.js";
import { ago, bytes, count, el, get } from "./dom.js";
import { showChat } from "./chat.js";
import { newChat } from "./talk.js";

const LIMIT = 200;
const LIMIT_MAX = 1000;
const TYPING_MS = 150;
let typed = "";
let shown = LIMIT;
let open = null;

const addressOf = (session) =>
  `#/chat/${encodeURIComponent(session.id)}${query({ scope: session.scope, tokenizer: session.tokenizer })}`;

const nameOf = ({ scope, id, tokenizer }) => JSON.stringify([scope, id, tokenizer]);

// Whether a turn in it has to wait, and what else tells it from others.
function stateOf({ tokenizer, model, cold_bytes, n_tokens, cost, footprint }) {
  if (tokenizer) return [model || "of another model"];
  const state = footprint ? [bytes(footprint.kept_bytes)] : [];
  if (cold_bytes) state.splice(0, 1, `frozen, ${bytes(cold_bytes)}`);
  if (!cost) return state;
  const left = n_tokens - cost.resumable_tokens;
  state.push(left <= 1 ? "resumes at once" : `${count(left)} to evaluate`);
  if (cost.branches > 1) state.push(`${cost.branches} branches`);
  if (cost.pinned) state.push("pinned");
  return state;
}

// hasModels: whether the list has conversations of several.
function entry(session, more, hasModels = false) {
  const model = hasModels && !session.tokenizer && session.model ? [session.model] : [];
  const facts = [ago(session.updated), ...model, `${count(session.n_tokens)} tokens`, ...stateOf(session)];
  return el("li", {}, el("a", { href: addressOf(session), "data-name": nameOf(session) },
    session.title || session.id, more, el("small", {}, facts.join(" · "))));
}

const areSeveral = (sessions) => new Set(sessions.map((each) => each.model)).size > 1;

const snippet = (runs) =>
  el("small", {}, runs.map((run, i) => (i % 2 ? el("mark", {}, run) : run)));

function markOpen(list) {
  for (const link of list.querySelectorAll("a")) {
    if (link.dataset.name === open) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
}

function more(list) {
  if (shown >= LIMIT_MAX) return el("li", { class: "quiet" }, "The search finds older ones.");
  const grow = () => {
    shown = Math.min(shown + LIMIT, LIMIT_MAX);
    fill(list).catch((error) => list.replaceChildren(error.message));
  };
  return el("li", {}, el("button", { type: "button", click: grow }, "Show more"));
}

// Fills the list; `found`, if it is given, is called with the sessions in it.
async function fill(list, found = () => {}) {
  const words = typed.trim();
  let entries;
  if (words) {
    const { results } = await call(`/search${query({ q: words, limit: 50, cost: 1 })}`);
    entries = results.map((hit) => entry(hit.session, snippet(hit.snippet), areSeveral(results.map((each) => each.session))));
  } else {
    const { sessions } = await call(`/sessions?footprint=1&cost=1&limit=${shown}`);
    entries = sessions.map((session) => entry(session, undefined, areSeveral(sessions)));
    found(sessions);
    if (sessions.length === shown) entries.push(more(list));
  }
  if (words !== typed.trim()) return;
  if (!entries.length) entries = [el("li", { class: "quiet" }, words ? "Nothing was found." : "No conversations yet.")];
  list.replaceChildren(...entries);
  markOpen(list);
}

function walk(event, list) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step) return;
  const links = [get("search"), ...list.querySelectorAll("a")];
  const next = links[links.indexOf(document.activeElement) + step];
  if (next) {
    event.preventDefault();
    next.focus();
  }
}

export async function showConversations(main, chat, isNew = false) {
  const list = el("ol", { "aria-label": "Conversations" });
  let timer = 0;
  const search = el("input", {
    id: "search", type: "search", placeholder: "Search everything ever said", value: typed,
    "aria-label": "Search everything ever said", autocomplete: "off",
    input: () => {
      typed = search.value;
      clearTimeout(timer);
      timer = setTimeout(() => fill(list).catch((error) => list.replaceChildren(error.message)), TYPING_MS);
    },
  });
  const fresh = el("a", { class: "fresh", href: "#/new" }, "New chat");
  const aside = el("section", { class: "list", keydown: (event) => walk(event, list) }, fresh, search, list);
  const pane = el("section", { class: "chat" });
  main.replaceChildren(el("div", { class: chat || isNew ? "panes one" : "panes" }, aside, pane));
  const opened = (session) => {
    if (!pane.isConnected) return;
    open = nameOf(session);
    markOpen(list);
  };
  open = null;
  if (isNew) newChat(pane);
  else if (!chat) pane.append(el("p", { class: "quiet" }, "Choose a conversation, or begin one (“n”). “/” goes to the search."));
  const [, look] = await Promise.all([fill(list), chat ? showChat(pane, chat, opened, () => fill(list), !typed.trim()) : null]);
  const seen = (sessions) => {
    const listed = sessions.find((session) => nameOf(session) === open);
    if (listed) look?.(listed).catch(() => {});  // the next look says what failed
  };
  return () => (list.contains(document.activeElement) ? null : fill(list, seen));
}
