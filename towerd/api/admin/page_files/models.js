// The models of a daemon that has several: which are loaded, and which one's store and settings are shown.
// Looking loads none; a button does, where nothing can be shown without.

import { ask, callServer, say } from "./api.js";
import { el, get } from "./dom.js";

const LOADED_MS = 500;
const CHOSEN = "towerd-model";
let several = null;
let awaited = null;
let wanted = sessionStorage.getItem(CHOSEN);

const names = () => several.filter((each) => each.status.value === "loaded").map((each) => each.id);

export const hasSeveral = () => Boolean(several?.length);

// The names of the loaded models; null: the daemon has a single one.
export const loaded = () => (hasSeveral() ? names() : null);

// The names of all models, loaded or not; null: the daemon has a single one.
export const all = () => (hasSeveral() ? several.map((each) => each.id) : null);

export const chosen = () => {
  const known = loaded();
  return known === null ? null : known.includes(wanted) ? wanted : known[0] ?? null;
};

export function choose(name) {
  wanted = name;
  sessionStorage.setItem(CHOSEN, name);
}

// Asks which models are loaded. Returns the chosen one, undefined if none of several is loaded.
export async function findModels() {
  if (several === null || several.length) {
    const { data } = await callServer("/models");
    several = data.length ? data.filter((each) => each.status) : null;  // there may be some later
  }
  if (several?.find((each) => each.id === awaited)?.status.value === "loaded") {
    awaited = null;
  }
  const name = chosen();
  ask(name);
  fillChoice(name);
  return hasSeveral() && name === null ? undefined : name;
}

function fillChoice(name) {
  get("choice").hidden = name === null;
  if (name === null) return;
  const list = get("models");
  const known = names();
  if (known.join("\n") !== [...list.options].map((each) => each.value).join("\n")) {
    list.replaceChildren(...known.map((each) => el("option", { value: each }, each)));
  }
  list.value = name;
}

// Says that the load which a button began has failed.
export function reportLoad() {
  if (!several.find((each) => each.id === awaited)?.status.failed) return;
  say(`${awaited} cannot be loaded: the daemon's log says why.`);
  awaited = null;
}

// What is shown while no model is loaded.
export function showModels(main) {
  const load = async (model) => {
    try {
      await callServer("/models/load", "POST", { model });
      awaited = model;
      say(`${model} is loading…`);
    } catch (error) {
      say(error.message);
    }
  };
  get("model").textContent = "";
  main.replaceChildren(el("h2", {}, "No model is loaded"),
    el("p", {}, "Conversations are read with the vocabulary of a model. A chat loads its own; here you can load one:"),
    el("div", { class: "actions" }, several.map(({ id }) => el("button", { click: () => load(id) }, id))));
}

// Loads one of several models and makes it the chosen one.
export async function loadAndChoose(name) {
  await findModels();
  if (!names().includes(name)) await callServer("/models/load", "POST", { model: name });
  for (;;) {
    await findModels();
    if (names().includes(name)) break;
    if (several.find((each) => each.id === name)?.status.failed) {
      throw new Error(`${name} cannot be loaded: the daemon's log says why.`);
    }
    say(`${name} is loading…`);
    await new Promise((resolve) => { setTimeout(resolve, LOADED_MS); });
  }
  say("");
  choose(name);
}
