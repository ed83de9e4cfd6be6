// A conversation as messages: what was said is shown, what was thought and what tools did is folded.

import { count, el } from "./dom.js";

const NAMES = { user: "You", assistant: "Model", system: "Instructions", tool: "Tool" };
const FOLDED = { reasoning: "Reasoning", call: "Tool call", result: "Tool result" };
const SHOWN = 100;

// A fence ends with as many backticks as it began with, or more; backticks behind its first ones are words in a line.
const FENCED = /^ {0,3}(`{3,})[^`\n]*\n([^]*?)(?:^ {0,3}\1`*[ \t]*$|(?![^]))/gm;

const words = (text) => el("pre", { class: "text" }, text);

// A text with what stands between fences as code: lines that are not broken.
function paragraphs(text) {
  const made = [];
  let at = 0;
  const say = (part) => { if (part.trim()) made.push(words(part.replace(/^\n+|\n+$/g, ""))); };
  for (const found of text.matchAll(FENCED)) {
    say(text.slice(at, found.index));
    made.push(el("pre", { class: "code" }, found[2]));
    at = found.index + found[0].length;
  }
  say(text.slice(at));
  return made;
}

const folded = (name, text, open = false) =>
  el("details", { open }, el("summary", {}, `${name}, ${count(text.length)} characters`), words(text));

const unknownMedium = () => el("p", { class: "quiet medium" }, "A picture or a sound");

// data: returns a promise of a data URL; null where what was sent is not kept.
function medium(data) {
  if (!data) return unknownMedium();
  const place = el("span", { class: "quiet medium" }, "A picture or a sound…");
  const show = () => data().then((url) => place.replaceWith(url.startsWith("data:image/")
    ? el("img", { src: url, alt: "Picture" }) : el("audio", { src: url, controls: true })),
  () => place.replaceWith(unknownMedium()));
  const seen = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    seen.disconnect();
    show();
  }, { rootMargin: "100%" });
  seen.observe(place);
  return place;
}

// pictures: takes the data of the next picture of the conversation, if it is known.
function shown({ kind, text }, role, pictures) {
  if (kind === "medium") return medium(pictures());
  if (kind in FOLDED) return folded(FOLDED[kind], text);
  return role === "system" || role === "tool" ? folded(NAMES[role], text) : paragraphs(text);
}

// Many templates have the results of tools said by the user.
const isResult = ({ role, parts }) => role === "user" && parts.every((part) => part.kind === "result");

export const textOf = ({ parts }) => parts.filter((each) => each.kind === "text").map((each) => each.text).join("\n\n");

// pictures: as above. actions: returns the buttons of a message.
export function article(message, pictures, actions = () => []) {
  const { parts } = message;
  const role = isResult(message) ? "tool" : message.role;
  return el("article", { class: `message ${role in NAMES ? role : ""}` },
    role in NAMES ? el("h4", {}, NAMES[role]) : null,
    parts.flatMap((part) => shown(part, role, pictures)),
    el("div", { class: "does" }, actions(message)));
}

// All messages, of a long conversation the last ones first. data: of the pictures in their order. actions: returns
// the buttons of a message, whose pictures it is given.
export function articles(messages, data, actions) {
  let place = 0;
  const made = messages.map((message) => {
    const own = data.slice(place, place += message.parts.filter((part) => part.kind === "medium").length);
    return () => {
      let next = 0;
      return article(message, () => own[next++], () => actions(message, own));
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
