// Requests to the daemon. The key stays in this tab; until it is right, nothing is shown.

import { get } from "./dom.js";

const KEY = "towerd-key";
const OWN = "/towerd/v1";
const END_AGAIN_MS = 1500;
let asked = null;

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function send(url, method, body, { signal, headers: more } = {}) {
  const headers = { ...more };
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const reply = await fetch(url, {
    method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (reply.ok) return reply;
  if (reply.status === 401) askForKey();
  const error = await reply.json().catch(() => null);
  throw new ApiError(reply.status, error?.error?.message ?? reply.statusText);
}

// Of several models, which one answers from now on; null: there is only one.
export function ask(model) {
  asked = model;
}

// A look never loads a model.
function addressed(path, model) {
  if (model === null) return OWN + path;
  return `${OWN}${path}${path.includes("?") ? "&" : "?"}${new URLSearchParams({ model, autoload: "false" })}`;
}

export async function call(path, method = "GET", body = undefined) {
  return (await send(addressed(path, asked), method, body)).json();
}

export async function callModel(model, path) {
  return (await send(addressed(path, model), "GET")).json();
}

// An endpoint that is not towerd's own.
export async function callServer(path, method = "GET", body = undefined) {
  return (await send(path, method, body)).json();
}

// The events of a streamed reply, one after the other. A stream that ends with an error throws it.
async function* eventsOf(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const blocks = text.split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (!data || data === "[DONE]") continue;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.code, event.error.message);
      yield event;
    }
  }
}

export const randomName = (begin) => begin
  + Array.from(crypto.getRandomValues(new Uint8Array(8)), (each) => each.toString(16).padStart(2, "0")).join("");

// A reply, with the model that was asked for: it is loaded if it is not. It continues when this page is closed, and
// ends when `signal` says so.
async function* streamReply(url, body, model, signal, more = {}) {
  const stream = randomName("explorer-");
  const options = { signal, headers: { ...more, "X-Conversation-Id": stream } };
  const end = () => send(`/v1/stream?${new URLSearchParams({ conv_id: stream })}`, "DELETE").catch(() => {});
  signal.addEventListener("abort", () => {
    end();
    setTimeout(end, END_AGAIN_MS);  // the request may still have been on its way
  });
  const named = model === null ? {} : { model };
  const address = model === null ? url : `${url}${url.includes("?") ? "&" : "?"}${new URLSearchParams(named)}`;
  yield* eventsOf(await send(address, "POST", { ...body, ...named, stream: true }, options));
}

// The reply that begins a chat of this name.
export const beginChat = (name, body, model, signal) =>
  streamReply("/v1/chat/completions", body, model, signal, { "X-Towerd-Session": name });

// That which continues one.
export const continueChat = (path, body, signal) => streamReply(OWN + path, body, asked, signal);

export const fetchBlob = async (path) => (await send(addressed(path, asked), "GET")).blob();

export async function download(path, name) {
  const url = URL.createObjectURL(await fetchBlob(path));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

function askForKey() {
  get("main").replaceChildren();
  get("model").textContent = "";
  get("choice").hidden = true;
  get("login").hidden = false;
  get("key").focus();
}

// Calls `open` when a key was typed.
export function onKey(open) {
  get("login").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, get("key").value);
    get("key").value = "";
    get("login").hidden = true;
    open();
  });
}

export function say(text) {
  get("notice").textContent = text;
  get("notice").hidden = !text;
}

export function query(values) {
  const kept = Object.entries(values).filter(([, value]) => value !== "" && value != null);
  return kept.length ? `?${new URLSearchParams(kept)}` : "";
}
