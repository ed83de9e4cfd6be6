// The address behind # says which page is shown; this module shows it and keeps it fresh.

import { ApiError, call, onKey, say } from "./api.js";
import { el, get } from "./dom.js";
import { choose, findModels, loaded, reportLoad, showModels } from "./models.js";
import { showConversations } from "./conversations.js";
import { showLive, showWhy } from "./live.js";
import { showSettings } from "./settings.js";
import { showTree } from "./tree.js";

const POLL_MS = 4000;
const NO_CHAT_PAGE = "This build has no chat page. In a working copy, “make ui” builds it with npm.";
let shown = 0;
let shownModel = null;
let refresh = null;
let failed = false;

// The daemon's figures; null for a tenant who may not see what all do together.
async function stats() {
  try {
    const found = await call("/stats");
    const version = `version ${found.version}`;
    get("model").textContent = loaded() ? version : `${found.model} · ${version}`;
    return found;
  } catch (error) {
    if (error instanceof ApiError && error.status === 403) return null;
    throw error;
  }
}

function addressOf(hash) {
  const [path, search = ""] = hash.replace(/^#/, "").split("?");
  const [, name = "", id = ""] = path.split("/");
  return { name, id: decodeURIComponent(id), parameters: new URLSearchParams(search) };
}

function pageOf({ name, id, parameters }) {
  const given = Object.fromEntries(parameters);
  switch (name) {
    case "chat": return (main) => showConversations(main, { ...given, id });
    case "new": return (main) => showConversations(main, null, true);
    case "tree": return (main) => showTree(main, given);
    case "live": return (main) => showLive(main, given, stats);
    case "why": return (main) => showWhy(main, { ...given, id });
    case "settings": return (main) => showSettings(main);
    default: return (main) => showConversations(main, null);
  }
}

function markPage() {
  const first = (href) => href.split("/").slice(0, 2).join("/").split("?")[0];
  const here = first(location.hash || "#/").replace("#/chat", "#/").replace("#/new", "#/");
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

async function show() {
  const turn = ++shown;
  refresh = null;
  markPage();
  say(location.hash === "#/no-chat-page" ? NO_CHAT_PAGE : "");
  try {
    const address = addressOf(location.hash);
    if (address.parameters.has("model")) choose(address.parameters.get("model"));
    shownModel = await findModels();
    if (turn !== shown) return;
    if (shownModel === undefined) {
      failed = false;
      showModels(get("main"));
      return;
    }
    if (!get("model").textContent) await stats();
    if (turn !== shown) return;
    const page = el("div");  // what an earlier page still waits for is filled in where nobody sees it
    get("main").replaceChildren(page);
    const again = await pageOf(address)(page);
    if (turn === shown) refresh = again ?? null;
    failed = false;
  } catch (error) {
    if (error.status === 401) return;
    failed = !(error.status >= 400 && error.status < 500);
    say(error.message);
  }
}

// Shows the page anew if its model was unloaded, one was loaded, or the daemon did not answer before.
async function freshen() {
  const turn = shown;
  try {
    const model = await findModels();
    if (turn !== shown) return;
    if (model !== shownModel || (failed && !refresh)) {
      await show();
    } else if (model === undefined) {
      reportLoad();
    } else if (refresh) {
      await refresh();
      if (failed) say("");
      failed = false;
    }
  } catch (error) {
    failed = true;
    say(error.message);
  }
}

async function poll() {
  if (!document.hidden && get("login").hidden) await freshen();
  setTimeout(poll, POLL_MS);
}

get("models").addEventListener("change", (event) => {
  choose(event.target.value);
  const { name } = addressOf(location.hash);  // what else is there names what the other model has
  history.replaceState(null, "", name === "chat" ? "#/" : `#/${name}`);
  show();
});
document.addEventListener("keydown", (event) => {
  const typing = event.target.matches?.("input, textarea, select");
  if (event.key === "/" && !typing && get("search")) {
    event.preventDefault();
    get("search").focus();
  } else if (event.key === "n" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey && get("login").hidden) {
    event.preventDefault();
    location.hash = "#/new";
  } else if (event.key === "Escape" && /^#[/](chat|new)/.test(location.hash)) {
    location.hash = "#/";
  }
});
addEventListener("hashchange", show);
onKey(show);
show();
setTimeout(poll, POLL_MS);
