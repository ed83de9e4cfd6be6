// The tree of shared prefixes as a picture: what continues a box stands below it, and each is as wide as the tokens
// in it and below it. What would be too small to be seen is counted together. A click or Enter makes a box as wide
// as the page; the arrow keys walk, Escape goes back up.

import { call, query } from "./api.js";
import { bytes, count, el, facts, legend, moment, svg } from "./dom.js";

const LEAST_PX = 3;
const GROUP_PX = 8;
const ROW = 42;
const CHAR_PX = 7;
const LABEL_PX = 30;
const COUNT_PX = 70;
const RESIZED_MS = 200;
const PLACES = ["hot", "warm", "none"];
const NAMES = { hot: "in RAM", warm: "on disk", none: "without rows" };

const href = (more) => `#/tree${query(more)}`;

const places = (size) => PLACES.filter((place) => size[place])
  .map((place) => `${count(size[place])} ${NAMES[place]}`).join(", ");

// A box's own tokens by where they are, one colour above the other.
function fills(size, width) {
  const only = PLACES.filter((place) => size[place]);
  if (only.length < 2) return [svg("rect", { class: `edge ${only[0] ?? "none"}`, width, height: ROW - 2 })];
  const total = PLACES.reduce((sum, place) => sum + size[place], 0) || 1;
  let y = 0;
  return PLACES.filter((place) => size[place]).map((place) => {
    const height = (size[place] / total) * (ROW - 2);
    const rect = svg("rect", { class: place, y, width, height });
    y += height;
    return rect;
  }).concat(svg("rect", { class: "edge hollow", width, height: ROW - 2 }));
}

const cut = (text, width) => {
  const n = Math.floor((width - 10) / CHAR_PX);
  return text.length > n ? `${text.slice(0, Math.max(1, n - 1))}…` : text;
};

function labels(title, tokens, width) {
  if (width < LABEL_PX) return [];
  return [svg("text", { x: 5, y: 17 }, cut(title, width)),
    ...(width < COUNT_PX ? [] : [svg("text", { x: 5, y: 33, class: "small" }, cut(`${count(tokens)} tokens`, width))])];
}

// What of those below is too small to be drawn, even together.
function unseen({ groups }, scale) {
  const n = groups.reduce((sum, each) => (each.tokens * scale < LEAST_PX ? sum + each.boxes : sum), 0);
  return n ? ` ${count(n)} of these are too small to be seen here.` : "";
}

// What is drawn, in the order in which keys walk: of each its place, its parent's number, what it says and where it leads.
function laidOut(picture, width) {
  const scale = width / (picture.tokens || 1);
  const found = [];
  const place = ({ boxes, groups }, x, depth, parent) => {
    for (const box of boxes) {
      const words = (box.text ?? "").replace(/\s+/g, " ").trim() || `#${box.id}`;
      const at = found.length;
      found.push({ x, depth, parent, width: box.tokens * scale, size: box.own, tokens: box.tokens, title: `${box.pinned ? "📌 " : ""}${words}`,
        about: `${words}\n${count(box.own.tokens)} tokens from ${count(box.p0)} on: ${places(box.own)}. With what continues it: ${count(box.tokens)} tokens, ${count(box.segments)} segments.${unseen(box, scale)}`,
        to: { root: box.id } });
      place(box, x, depth + 1, at);
      x += box.tokens * scale;
    }
    for (const group of groups) {
      if (group.tokens * scale < LEAST_PX) continue;  // its parent says that it is there
      found.push({ x, depth, parent, width: group.tokens * scale, size: group, tokens: group.tokens, isGroup: true, title: `${count(group.boxes)}`,
        about: `${count(group.boxes)} smaller ones together: ${count(group.tokens)} tokens, ${count(group.segments)} segments: ${places(group)}.`,
        to: { root: group.root, from: group.from, boxes: group.boxes } });
      x += group.tokens * scale;
    }
  };
  place(picture, 0, 0, undefined);
  return found;
}

function drawn({ x, depth, width, size, tokens, title, about, isGroup }, number) {
  const inner = Math.max(1, width - 1);
  return svg("g", {
    class: isGroup && width >= GROUP_PX ? "node group" : "node", tabindex: number ? -1 : 0, role: "treeitem", "aria-level": depth + 1,
    "aria-label": about, "data-number": number, transform: `translate(${x.toFixed(1)} ${depth * ROW})`,
  }, fills(size, inner), labels(title, tokens, inner));
}

// The number of the box that a key leads to; undefined for other keys, or where there is none.
function step(key, at, laid) {
  const { parent, depth } = laid[at];
  const beside = laid.flatMap((each, i) => (each.depth === depth ? [i] : []));
  const to = {
    ArrowUp: parent, ArrowDown: laid.findIndex((each) => each.parent === at), ArrowLeft: beside[beside.indexOf(at) - 1],
    ArrowRight: beside[beside.indexOf(at) + 1], Home: 0, End: laid.length - 1,
  }[key];
  return to in laid ? to : undefined;
}

function drawing(picture, width, info) {
  const laid = laidOut(picture, width);
  const depths = Math.max(1, ...laid.map((each) => each.depth + 1));
  const numberOf = (event) => event.target.closest?.("g.node")?.dataset.number;
  const told = (event) => {
    const number = numberOf(event);
    if (number !== undefined) info.textContent = laid[number].about;
  };
  const open = (number) => { location.hash = href(laid[number].to); };
  const image = svg("svg", {
    width, height: depths * ROW, role: "tree", "aria-label": "Tree of shared prefixes", class: "icicle",
    click: (event) => { if (numberOf(event) !== undefined) open(numberOf(event)); },
    pointerover: told, focusin: told,
    keydown: (event) => {
      const at = numberOf(event);
      if (at === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
      if (event.key === "Enter") open(at);
      const to = step(event.key, Number(at), laid);
      if (to === undefined) return;
      event.preventDefault();
      boxes[at].setAttribute("tabindex", -1);
      boxes[to].setAttribute("tabindex", 0);
      boxes[to].focus();
    },
  });
  const boxes = laid.map(drawn);
  image.append(...boxes);
  return image;
}

async function details(id) {
  if (!id) return { path: [], about: [] };
  const { segment } = await call(`/segments/${id}?text=1`);
  return {
    path: segment.path,
    about: [facts([
      ["tokens", `${count(segment.tokens)}, from ${count(segment.p0)} on`],
      ["rows", segment.hot ? "in RAM" : segment.warm ? "on disk" : "none: tokens only"],
      ["takes", segment.hot || segment.warm ? `${bytes(segment.bytes)}, ${segment.format}` : "–"],
      ["used", segment.hits === null ? "–" : `${count(segment.hits)} times, last ${moment(segment.last_used)}`],
    ]), el("pre", { class: "text message" }, segment.text)],
  };
}

const SHOWN_ABOVE = 6;

// The segments above, the last of them by name.
function way(path, root, boxes) {
  if (!root && !boxes) return null;
  const above = path.slice(0, -1);
  const links = above.slice(-SHOWN_ABOVE).flatMap((each) => [el("a", { href: href({ root: each }) }, `#${each}`), " › "]);
  const here = root ? boxes ? [el("a", { href: href({ root }) }, `#${root}`), " › "] : [el("strong", {}, `#${root}`)] : [];
  return el("p", {}, el("a", { href: "#/tree" }, "all"), " › ", above.length > SHOWN_ABOVE ? "… › " : "", links, here,
    boxes ? el("strong", {}, `${count(Number(boxes))} of those below`) : "");
}

export async function showTree(main, { root = 0, from, boxes }) {
  const space = el("div", { class: "space" });
  const info = el("p", { class: "quiet told" }, "");
  const known = await details(Number(root));
  const up = boxes ? { root: Number(root) || null } : { root: known.path.at(-2) };
  let seen = 0;
  const draw = async (focuses) => {
    const width = Math.max(240, Math.floor(space.clientWidth));
    if (width === seen) return;
    seen = width;
    const picture = await call(`/tree${query({ root, from, boxes, parts: Math.floor(width / LEAST_PX), text: 1 })}`);
    if (!picture.tokens) {
      space.replaceChildren(el("p", { class: "quiet" }, "Nothing is stored yet."));
      return;
    }
    const image = drawing(picture, width, info);
    space.replaceChildren(image);
    info.textContent = `${count(picture.tokens)} tokens in ${count(picture.segments)} segments: ${places(picture)}.${unseen(picture, width / picture.tokens)}`;
    if (focuses) image.querySelector("g.node")?.focus({ preventScroll: true });
  };
  let timer = 0;
  new ResizeObserver(() => {
    clearTimeout(timer);
    timer = setTimeout(() => { if (space.isConnected) draw(false).catch(() => {}); }, RESIZED_MS);
  }).observe(space);
  main.replaceChildren(...[el("h2", {}, "Shared prefixes"), way(known.path, Number(root), boxes),
    legend([["hot", "in RAM"], ["warm", "on disk"], ["none", "without rows"]]), info, space, ...(boxes ? [] : known.about)].filter(Boolean));
  main.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && (Number(root) || boxes)) location.hash = href(up);
  });
  await draw(Number(root) > 0 || Boolean(boxes));
}
