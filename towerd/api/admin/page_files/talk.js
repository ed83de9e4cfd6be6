// The messages of a conversation, and what is written to it: a reply is streamed, can be stopped, made anew, and
// a message of the user's changed. What is continued are the tokens in the store, on whatever device they were said.

import { beginChat, call, continueChat, fetchBlob, query, randomName } from "./api.js";
import { Composer, contentOf, dataOf } from "./composer.js";
import { count, el } from "./dom.js";
import { all, choose, chosen } from "./models.js";
import { Growing, article, articles, textOf } from "./messages.js";

const SHOW_MS = 60;
const RECORDED_MS = 250;
const RECORDED_TRIES = 40;
const SLACK_PX = 120;
const notes = new Map();
const PICTURE_CHARS_MAX = 1 << 26;
const pictures = new Map();
let pictureChars = 0;

const keyOf = (chat) => JSON.stringify([chat.id, chat.scope ?? "", chat.tokenizer ?? ""]);
const wait = (ms) => new Promise((resolve) => { setTimeout(resolve, ms); });

// What a reply's prompt was made of, and how fast it was.
function note({ id, timings, towerd }) {
  if (!timings) return null;
  const [found, evaluated] = [timings.cache_n, timings.prompt_n];
  const places = Object.entries(towerd?.reuse ?? {}).filter(([name, n]) => n && name !== "prefill")
    .map(([name, n]) => `${count(n)} ${name}`).join(", ");
  return [
    `${count(found)} of ${count(found + evaluated)} tokens were there${places ? ` (${places})` : ""}, `,
    el("a", { href: `#/why/${encodeURIComponent(id)}` }, `${count(evaluated)} evaluated`),
    ` in ${timings.prompt_ms.toFixed(0)} ms; ${count(timings.predicted_n)} generated, ${timings.predicted_per_second.toFixed(1)} a second.`,
  ];
}

// Whether the end of a message is seen, or nearly so: it is followed then as it grows.
const endIsSeen = (message) => message.getBoundingClientRect().bottom <= innerHeight + SLACK_PX;

export const showEnd = (message) => message?.scrollIntoView({ block: "end" });

// Shows a reply as it comes; calls `started` with the first of it. Returns what its last event says; undefined if it was stopped after it had begun.
async function grow(into, events, signal, started = () => {}) {
  const growing = new Growing();
  into.append(growing.article);
  showEnd(growing.article);
  let last;
  let began = false;
  let timer = 0;
  const show = () => {
    timer = 0;
    const follows = endIsSeen(growing.article);
    growing.show();
    if (follows) showEnd(growing.article);
  };
  try {
    for await (const event of events) {
      if (growing.add(event.choices?.[0]?.delta ?? {})) {
        if (!began) started();
        began = true;
        timer ||= setTimeout(show, SHOW_MS);
      }
      if (event.timings) last = event;
    }
  } catch (error) {
    if (!signal.aborted || !began) growing.article.remove();
    if (!signal.aborted) throw error;
    if (!began) throw new Error("Stopped before anything was answered.");
    return undefined;
  }
  return last;
}

const userMessage = (text, pictures) =>
  ({ role: "user", parts: [...(text ? [{ kind: "text", text }] : []), ...pictures.map(() => ({ kind: "medium" }))] });

const shownMessage = (text, pictures) => {
  let next = 0;
  return article(userMessage(text, pictures), () => {
    const data = pictures[next++];
    return () => Promise.resolve(data);
  });
};

// The data of a picture of a conversation, which is asked for once while there is room for it.
async function pictureAt(path) {
  if (pictures.has(path)) return pictures.get(path);
  const data = await dataOf(await fetchBlob(path));
  pictureChars += data.length;
  pictures.set(path, data);
  for (const [first, { length }] of pictures) {
    if (pictureChars <= PICTURE_CHARS_MAX) break;
    pictures.delete(first);
    pictureChars -= length;
  }
  return data;
}

export class Talk {
  // chat: what names it. ended: called after each reply.
  constructor(chat, ended) {
    this.chat = chat;
    this.ended = ended;
    this.read = null;
    this.isBehind = false;
    this.messages = el("div", { class: "messages" });
    this.status = el("p", { class: "quiet", role: "status" });
    this.elsewhere = el("p", { class: "quiet", hidden: true }, "A reply is being written…");
    this.composer = new Composer(keyOf(chat), chosen(), (text, pictures, signal, began) =>
      this.reply({ message: { role: "user", content: contentOf(text, pictures) } }, signal,
        { asked: shownMessage(text, pictures), began }));
    this.composer.form.hidden = true;
    this.element = el("div", { class: "talk" }, this.messages, this.elsewhere, this.status, this.composer.form);
  }

  path(more = {}, of = "chat") {
    const which = { scope: this.chat.scope, tokenizer: this.chat.tokenizer };
    return `/sessions/${encodeURIComponent(this.chat.id)}/${of}${query({ ...which, ...more })}`;
  }

  get isRunning() {
    return Boolean(this.composer.running);
  }

  // The form of a message that is being changed and was not sent.
  get edited() {
    return this.messages.querySelector("form:not([hidden])");
  }

  get isEdited() {
    return Boolean(this.edited);
  }

  // Says whether a reply is being written elsewhere, or was begun here before the page was closed.
  async look() {
    const { running } = await call(`/requests${query({ session: this.chat.id, scope: this.chat.scope, limit: 1 })}`);
    const isWritten = running.some((each) => each.session === this.chat.id);
    if (this.isRunning || !this.element.isConnected) return;
    this.elsewhere.hidden = !isWritten;
  }

  // Reads the messages from the store.
  async fill() {
    this.show(await call(this.path({ turn: this.chat.turn })));
  }

  // While a message is being changed, its form stays where it is: what is new is shown when it is closed or sent.
  show(read) {
    this.read = read;
    const { messages, continues, media } = this.read;
    const last = messages.at(-1);
    const actions = (message, own) => (continues ? this.actions(message, message === last, own) : []);
    const data = media.map((key) => key && (() => pictureAt(this.path({}, `media/${key}`))));
    this.isBehind = this.isEdited;
    if (!this.isBehind) this.messages.replaceChildren(...articles(messages, data, actions));
    this.composer.form.hidden = !continues;
    const said = notes.get(keyOf(this.chat));
    if (said) said.turn ??= this.read.turn;
    this.status.replaceChildren(...(said?.turn === this.read.turn ? said.note : []));
  }

  actions(message, isLast, own) {
    const button = (text, click) => el("button", { class: "small", type: "button", click }, text);
    const copy = navigator.clipboard ? [button("Copy", () => navigator.clipboard.writeText(textOf(message)))] : [];
    if (message.role === "user" && !textOf(message)) return [];
    if (message.role === "user") {
      return this.read.named ? [button("Edit", (event) => this.edit(message, own, event.target)), ...copy] : copy;
    }
    if (isLast && message.role === "assistant") {
      return [button("Regenerate", () => this.composer.run((signal) =>
        this.reply({}, signal, { instead: this.messages.lastElementChild }))), ...copy];
    }
    return message.role === "assistant" ? copy : [];
  }

  // Puts a message into a box of its own; what is sent of it branches off where it began. own: the data of its pictures.
  edit(message, own, at) {
    if (this.isEdited) this.edited.querySelector("textarea").focus();
    if (this.isRunning || this.isEdited) return;
    const [shown, { turn }] = [at.closest(".message"), this.read];
    const box = el("textarea", { rows: 4, "aria-label": "Changed message" });
    box.value = textOf(message);
    const close = () => {
      form.replaceWith(shown);
      if (this.isBehind && !this.isRunning) this.show(this.read);
    };
    const send = (event) => {
      event.preventDefault();
      const text = box.value;
      if (!text.trim()) return;
      this.composer.run(async (signal) => {
        const sent = (await Promise.all(own.map((data) => data?.().catch(() => null)))).filter((data) => data);
        const content = { turn, at: message.at, message: { role: "user", content: contentOf(text, sent) } };
        const behind = [];
        for (let next = form.nextElementSibling; next; next = next.nextElementSibling) behind.push(next);
        const before = [form, ...behind];
        for (const each of before) each.hidden = true;
        try {
          await this.reply(content, signal, { asked: shownMessage(text, sent) });
        } catch (error) {
          for (const each of before) each.hidden = false;
          throw error;
        }
      });
    };
    const form = el("form", { class: "edit", submit: send, keydown: (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      }
    } }, box, own.some((data) => !data)
      ? el("p", { class: "quiet" }, "It is sent without the pictures that are not kept.") : null,
    el("div", { class: "does" }, el("button", { class: "main" }, "Send as a branch"),
      el("button", { type: "button", click: close }, "Cancel")));
    shown.replaceWith(form);
    box.focus();
  }

  // Asks for a reply. asked: the message as it is shown until it is recorded. instead: what it takes the place of.
  async reply(body, signal, { asked = null, instead = null, began } = {}) {
    const before = this.read.turn;
    if (asked) this.messages.append(asked);
    if (instead) instead.hidden = true;
    let last;
    try {
      last = await grow(this.messages, continueChat(this.path(), { turn: before, ...body }, signal), signal, began);
    } catch (error) {
      asked?.remove();
      if (instead) instead.hidden = false;
      throw error;
    }
    this.chat = { ...this.chat, turn: undefined };
    const follows = endIsSeen(this.messages.lastElementChild);
    await this.recorded(before);
    if (follows) showEnd(this.messages.lastElementChild);
    if (last) {
      notes.set(keyOf(this.chat), { turn: this.read.turn, note: note(last) });
      this.status.replaceChildren(...note(last));
    }
    await this.ended();
  }

  // Shows the turn of a reply as it is in the store: that of a stopped one comes there a moment later.
  async recorded(before) {
    let read;
    for (let tries = 0; tries < RECORDED_TRIES; tries += 1) {
      read = await call(this.path());
      if (read.turn !== before) break;
      await wait(RECORDED_MS);
    }
    this.show(read);
  }
}

// Waits until a new chat is in the store, which is a moment after its reply was stopped.
async function exists(name) {
  for (let tries = 0; tries < RECORDED_TRIES; tries += 1) {
    try {
      return await call(`/sessions/${encodeURIComponent(name)}`);
    } catch (error) {
      if (error.status !== 404) throw error;
      await wait(RECORDED_MS);
    }
  }
}

// A chat that has not begun. It gets its page with the first reply.
export function newChat(pane) {
  const names = all();
  const choice = el("select", { "aria-label": "Model", change: () => composer.of(choice.value) },
    (names ?? []).map((name) => el("option", { value: name, selected: name === chosen() }, name)));
  const messages = el("div", { class: "messages" });
  const composer = new Composer("new", chosen(), async (text, pictures, signal, began) => {
    const name = randomName("chat-");
    const model = names === null ? null : choice.value;
    const content = { messages: [{ role: "user", content: contentOf(text, pictures) }] };
    const asked = shownMessage(text, pictures);
    messages.replaceChildren(asked);
    let last;
    try {
      last = await grow(messages, beginChat(name, content, model, signal), signal, began);
    } catch (error) {
      asked.remove();
      throw error;
    }
    if (model !== null) choose(model);
    const scope = (await exists(name))?.session.scope;
    const key = keyOf({ id: name, scope });
    if (last) notes.set(key, { note: note(last) });
    if (!pane.isConnected) return;
    location.hash = `#/chat/${encodeURIComponent(name)}${query({ scope })}`;
  });
  pane.replaceChildren(el("h2", {}, "New chat"),
    ...(names === null ? [] : [el("p", {}, el("label", {}, "Model ", choice))]), messages, composer.form);
  composer.box.focus();
}
