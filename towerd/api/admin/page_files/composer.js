// Where messages are written. Enter sends, Shift+Enter begins a line, Escape stops the reply. What was typed
// stays in this tab until it is answered.

import { ApiError, callServer, query, say } from "./api.js";
import { el } from "./dom.js";

const KINDS = "image/png,image/jpeg,image/gif,image/webp,image/bmp";
const seeing = new Map();

// Whether a model takes pictures; null: the only one.
async function sees(model) {
  if (!seeing.has(model)) {
    const props = await callServer(`/props${query({ model, autoload: model === null ? null : "false" })}`);
    seeing.set(model, Boolean(props.modalities?.vision));
  }
  return seeing.get(model);
}

export const dataOf = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});

const draftOf = (name) => `towerd-draft:${name}`;

function keep(name, text) {
  try {
    if (text) sessionStorage.setItem(draftOf(name), text);
    else sessionStorage.removeItem(draftOf(name));
  } catch (error) {
    say(`What you type is not kept: ${error.message}`);
  }
}

// A part of a message. url: of its data.
function partOf(url) {
  if (url.startsWith("data:image/")) return { type: "image_url", image_url: { url } };
  const format = url.startsWith("data:audio/wav") ? "wav" : "mp3";
  return { type: "input_audio", input_audio: { data: url.slice(url.indexOf(",") + 1), format } };
}

// media: URLs of their data.
export function contentOf(text, media) {
  return media.length ? [...(text ? [{ type: "text", text }] : []), ...media.map(partOf)] : text;
}

// name: of the draft. model: that of the pictures' capability, or undefined for what `choice` says.
// send(text, pictures, signal, began): sends a message, calls `began` with the first of the reply, and returns when
// it is answered or stopped.
export class Composer {
  constructor(name, model, send) {
    this.name = name;
    this.send = send;
    this.pictures = [];
    this.running = null;
    this.box = el("textarea", {
      id: "write", rows: 2, placeholder: "Write a message", "aria-label": "Message", autocomplete: "off",
      input: () => { keep(this.name, this.box.value); this.grow(); },
      keydown: (event) => this.key(event),
      paste: (event) => this.attach(event.clipboardData.files),
    });
    this.box.value = sessionStorage.getItem(draftOf(name)) ?? "";
    this.files = el("input", { type: "file", accept: KINDS, multiple: true, hidden: true,
      change: () => this.attach(this.files.files) });
    this.picture = el("button", { type: "button", hidden: true, click: () => this.files.click() }, "Attach a picture");
    this.go = el("button", { class: "main" }, "Send");
    this.stopping = el("button", { type: "button", hidden: true, click: () => this.stop() }, "Stop");
    this.strip = el("div", { class: "attached" });
    this.form = el("form", { class: "composer", submit: (event) => { event.preventDefault(); this.submit(); } },
      this.strip, this.box, el("div", { class: "does" }, this.go, this.stopping, this.picture, this.files));
    this.of(model);
  }

  // Asks anew whether pictures can be attached.
  of(model) {
    sees(model).then((can) => { this.picture.hidden = !can; }, () => { this.picture.hidden = true; });
  }

  grow() {
    this.box.rows = Math.min(12, Math.max(2, this.box.value.split("\n").length));
  }

  key(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.submit();
    } else if (event.key === "Escape") {
      event.stopPropagation();
      if (!this.stop()) this.box.blur();
    }
  }

  async attach(files) {
    const wanted = [...(files ?? [])].filter((file) => KINDS.split(",").includes(file.type));
    if (!wanted.length || this.picture.hidden) return;
    try {
      this.pictures.push(...await Promise.all(wanted.map(dataOf)));
    } catch (error) {
      say(error.message);
    }
    this.files.value = "";
    this.showPictures();
  }

  showPictures() {
    this.strip.replaceChildren(...this.pictures.map((data) => el("button", {
      type: "button", title: "Take it away", "aria-label": "Take this picture away",
      click: () => {
        this.pictures = this.pictures.filter((each) => each !== data);
        this.showPictures();
      },
    }, el("img", { src: data, alt: "" }))));
  }

  // Whether a reply was stopped.
  stop() {
    if (!this.running) return false;
    this.running.abort();
    return true;
  }

  async submit() {
    const [text, pictures] = [this.box.value, this.pictures];
    if (this.running || (!text.trim() && !pictures.length)) return;
    this.box.value = "";
    this.pictures = [];
    this.showPictures();
    this.grow();
    const began = () => this.settle(text);
    const sent = await this.run((signal) => this.send(text, pictures, signal, began));
    if (!sent) {
      this.box.value = this.box.value ? `${text}\n${this.box.value}` : text;
      this.pictures = [...pictures, ...this.pictures];
      this.showPictures();
    }
    this.settle(text);
    this.grow();
  }

  // Keeps what is in the box now that `sent` was sent. If its page was left meanwhile, another box may have written
  // the draft since.
  settle(sent) {
    const kept = sessionStorage.getItem(draftOf(this.name));
    if (this.box.isConnected || kept === sent) keep(this.name, this.box.value);
  }

  // Runs what ends with a reply; whether it was sent.
  async run(work) {
    if (this.running) return false;
    this.running = new AbortController();
    this.stopping.hidden = false;
    this.go.disabled = true;
    say("");
    try {
      await work(this.running.signal);
      return true;
    } catch (error) {
      if (!(error instanceof ApiError && error.status === 401)) say(error.message);
      return false;
    } finally {
      this.running = null;
      this.stopping.hidden = true;
      this.go.disabled = false;
    }
  }
}
