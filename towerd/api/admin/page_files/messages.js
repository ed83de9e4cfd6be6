// A conversation as messages: what was said is shown, what was thought and what tools did is folded.

import { count, el } from "./dom.js";

const NAMES = { user: "You", assistant: "Model", system: "Instructions", tool: "Tool" };
const FOLDED = { reasoning: "Reasoning", call: "Tool call", result: "Tool result" };
const SHOWN = 100;

const words = (text) => el("pre", { class: "text" }, text);

const folded = (name, text, open = false) =>
  el("details", { open }, el("summary", {}, `${name}, ${count(text.length)} characters`), words(text));

// The bytes of a picture are not kept: it is shown where it was sent from, as long as that page is open.
function medium(data) {
  return data ? el("img", { src: data, alt: "Picture" }) : el("p", { class: "quiet medium" }, "A picture or a sound");
}

// pictures: takes the data of the next picture of the conversation, if it is known.
function shown({ kind, text }, role, pictures) {
  if (kind === "medium") return medium(pictures());
  if (kind in FOLDED) return folded(FOLDED[kind], text);
  return role === "system" || role === "tool" ? folded(NAMES[role], text) : words(text);
}

export const textOf = ({ parts }) => parts.filter((each) => each.kind === "text").map((each) => each.text).join("\n\n");

// actions: returns the buttons of a message.
export function article(message, pictures, actions = () => []) {
  const { role, parts } = message;
  return el("article", { class: `message ${role in NAMES ? role : ""}` },
    role in NAMES ? el("h4", {}, NAMES[role]) : null, parts.map((part) => shown(part, role, pictures)),
    el("div", { class: "does" }, actions(message)));
}

// All messages, of a long conversation the last ones first. data: of the pictures in their order.
export function articles(messages, data, actions) {
  let place = 0;
  const made = messages.map((message) => {
    const first = place;
    place += message.parts.filter((part) => part.kind === "medium").length;
    return () => {
      let next = first;
      return article(message, () => data[next++], actions);
    };
  });
  if (made.length <= SHOWN) return made.map((make) => make());
  const earlier = made.length - SHOWN;
  const more = el("button", { click: () => more.replaceWith(...made.slice(0, earlier).map((make) => make())) },
    `Show ${count(earlier)} earlier messages`);
  return [more, ...made.slice(earlier).map((make) => make())];
}

// A text that grows, in one node.
class GrowingText {
  constructor() {
    this.node = document.createTextNode("");
    this.element = el("pre", { class: "text" }, this.node);
    this.waiting = "";
  }

  add(text) {
    this.waiting += text ?? "";
  }

  // Shows what was added.
  show() {
    if (this.waiting) this.node.appendData(this.waiting);
    this.waiting = "";
    return this.node.length > 0;
  }
}

// A message while it is generated. What comes is shown some times a second: a fast model sends thousands of tokens.
export class Growing {
  constructor() {
    this.parts = [new GrowingText(), new GrowingText(), new GrowingText()];
    [this.reasoning, this.text, this.calls] = this.parts;
    this.thought = el("details", { hidden: true, open: true }, el("summary", {}, FOLDED.reasoning), this.reasoning.element);
    this.called = el("details", { hidden: true, open: true }, el("summary", {}, FOLDED.call), this.calls.element);
    this.article = el("article", { class: "message assistant growing" }, el("h4", {}, NAMES.assistant),
      this.thought, this.text.element, this.called);
    this.hasText = false;
  }

  // Whether anything was added.
  add(delta) {
    this.reasoning.add(delta.reasoning_content);
    this.text.add(delta.content);
    for (const call of delta.tool_calls ?? []) {
      if (call.function?.name) this.calls.add(`${call.function.name} `);
      this.calls.add(call.function?.arguments);
    }
    return this.parts.some((part) => part.waiting);
  }

  show() {
    const [thought, text, called] = this.parts.map((part) => part.show());
    this.thought.hidden = !thought;
    this.called.hidden = !called;
    if (text && !this.hasText) this.thought.open = false;
    this.hasText = text;
  }
}
