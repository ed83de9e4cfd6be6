// The address behind # says which page is shown; this module shows it and keeps it fresh.

import { ApiError, call, onKey, say } from "./api.js";
import { get } from "./dom.js";
import { showConversations } from "./conversations.js";
import { showLive } from "./live.js";
import { showSettings } from "./settings.js";
import { showTree } from "./tree.js";

const POLL_MS = 4000;
const NO_CHAT_PAGE = "This build has no chat page. In a working copy, “make ui” builds it with npm.";
let shown = 0;
let refresh = null;

// The daemon's figures; null for a tenant who may not see what all do together.
async function stats() {
  try {
    const found = await call("/stats");
    get("model").textContent = `${found.model} · version ${found.version}`;
    return found;
  } catch (error) {
    if (error instanceof ApiError && error.status === 403) return null;
    throw error;
  }
}

function pageOf(hash) {
  const [path, search = ""] = hash.replace(/^#/, "").split("?");
  const parameters = Object.fromEntries(new URLSearchParams(search));
  const [, name = "", id] = path.split("/");
  switch (name) {
    case "chat": return (main) => showConversations(main, { ...parameters, id: decodeURIComponent(id ?? "") });
    case "tree": return (main) => showTree(main, parameters);
    case "live": return (main) => showLive(main, parameters, stats);
    case "settings": return (main) => showSettings(main);
    default: return (main) => showConversations(main, null);
  }
}

function markPage() {
  const first = (href) => href.split("/").slice(0, 2).join("/").split("?")[0];
  const here = first(location.hash || "#/").replace("#/chat", "#/");
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
    if (!get("model").textContent) await stats();
    if (turn !== shown) return;
    const again = await pageOf(location.hash)(get("main"));
    if (turn === shown) refresh = again ?? null;
  } catch (error) {
    if (error.status !== 401) say(error.message);
  }
}

let failed = false;

async function poll() {
  if (refresh && !document.hidden) {
    try {
      await refresh();
      if (failed) say("");
      failed = false;
    } catch (error) {
      failed = true;
      say(error.message);
    }
  }
  setTimeout(poll, POLL_MS);
}

document.addEventListener("keydown", (event) => {
  const typing = event.target instanceof HTMLInputElement;
  if (event.key === "/" && !typing && get("search")) {
    event.preventDefault();
    get("search").focus();
  } else if (event.key === "Escape" && location.hash.startsWith("#/chat/")) {
    location.hash = "#/";
  }
});
addEventListener("hashchange", show);
onKey(show);
show();
poll();
