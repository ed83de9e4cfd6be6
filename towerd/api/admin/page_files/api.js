// Requests to /towerd/v1. The key stays in this tab; until it is right, nothing is shown.

import { get } from "./dom.js";

const KEY = "towerd-key";
export const OWN = "/towerd/v1";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function send(path, method, body) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const reply = await fetch(OWN + path, {
    method, headers, body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (reply.ok) return reply;
  if (reply.status === 401) askForKey();
  const error = await reply.json().catch(() => null);
  throw new ApiError(reply.status, error?.error?.message ?? reply.statusText);
}

export async function call(path, method = "GET", body = undefined) {
  return (await send(path, method, body)).json();
}

export async function download(path, name) {
  const url = URL.createObjectURL(await (await send(path, "GET")).blob());
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

function askForKey() {
  get("main").replaceChildren();
  get("model").textContent = "";
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
