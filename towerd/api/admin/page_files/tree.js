// The tree of shared prefixes as a picture: a column for each level, a box for each segment, as high as
// what continues it. A click or Enter makes a segment the root; the arrow keys walk.

import { call, query } from "./api.js";
import { bytes, count, el, facts, legend, moment, svg } from "./dom.js";

const DEPTH = 5;
const LIMIT = 150;
const COLUMN = 210;
const ROW = 30;
const LABEL_CHARS = 26;

const tierOf = (segment) => (segment.hot ? "hot" : segment.warm ? "warm" : "none");
const leaves = (segment) => segment.children.reduce((n, child) => n + leaves(child), 0) || 1;

function label(segment) {
  const words = (segment.text ?? "").replace(/\s+/g, " ").trim();
  return words.length > LABEL_CHARS ? `${words.slice(0, LABEL_CHARS)}…` : words || `#${segment.id}`;
}

function box(segment, depth, row, open) {
  const height = leaves(segment) * ROW - 3;
  const node = svg("g", {
    class: "node", tabindex: -1, role: "treeitem", "aria-level": depth + 1,
    "aria-label": `${count(segment.tokens)} tokens: ${label(segment)}`,
    transform: `translate(${depth * COLUMN} ${row * ROW})`,
    click: () => open(segment.id),
    keydown: (event) => { if (event.key === "Enter") open(segment.id); },
  },
  svg("title", {}, `${segment.text ?? ""}\n${count(segment.tokens)} tokens${segment.hits === null ? "" : `, ${segment.hits} uses`}`),
  svg("rect", { class: tierOf(segment), width: COLUMN - 6, height, rx: 4 }),
  svg("text", { x: 6, y: 18 }, `${segment.pinned ? "📌" : ""}${label(segment)}`));
  return node;
}

// The number of the box that a key leads to from box `at`; undefined for other keys, or where there is none.
function step(key, at, parents) {
  const child = parents[at + 1] === at ? at + 1 : undefined;
  const to = {
    ArrowDown: at + 1, ArrowUp: at - 1, ArrowLeft: parents[at], ArrowRight: child, Home: 0, End: parents.length - 1,
  }[key];
  return to in parents ? to : undefined;
}

// Tab goes to one box of all, as in every tree: to that which had the focus last.
function walk(event, boxes, parents) {
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  const at = boxes.indexOf(event.target);
  const to = step(event.key, at, parents);
  if (to === undefined) return;
  event.preventDefault();
  boxes[at].setAttribute("tabindex", -1);
  boxes[to].setAttribute("tabindex", 0);
  boxes[to].focus();
}

function picture(segments, open) {
  const [boxes, parents] = [[], []];
  let depths = 1;
  const place = (list, depth, row, parent) => {
    depths = Math.max(depths, depth + 1);
    for (const segment of list) {
      boxes.push(box(segment, depth, row, open));
      parents.push(parent);
      if (segment.children.length) place(segment.children, depth + 1, row, boxes.length - 1);
      row += leaves(segment);
    }
    return row;
  };
  const rows = place(segments, 0, 0, undefined);
  boxes[0].setAttribute("tabindex", 0);
  const [width, height] = [depths * COLUMN, Math.max(rows, 1) * ROW];
  return el("div", { class: "scroll" },
    svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "tree", "aria-label": "Tree of shared prefixes",
      keydown: (event) => walk(event, boxes, parents) }, boxes));
}

async function details(id) {
  if (!id) return [];
  const { segment } = await call(`/segments/${id}?text=1`);
  const links = segment.path.slice(0, -1).flatMap((each) => [el("a", { href: `#/tree?root=${each}` }, `#${each}`), " › "]);
  return [
    el("p", {}, el("a", { href: "#/tree" }, "all"), " › ", links, el("strong", {}, `#${id}`)),
    facts([
      ["tokens", `${count(segment.tokens)}, from ${count(segment.p0)} on`],
      ["rows", segment.hot ? "in RAM" : segment.warm ? "on disk" : "none: tokens only"],
      ["takes", segment.hot || segment.warm ? `${bytes(segment.bytes)}, ${segment.format}` : "–"],
      ["used", segment.hits === null ? "–" : `${count(segment.hits)} times, last ${moment(segment.last_used)}`],
    ]),
    el("pre", { class: "text message" }, segment.text),
  ];
}

export async function showTree(main, { root = 0 }) {
  const open = (id) => { location.hash = `#/tree?root=${id}`; };
  const [tree, about] = await Promise.all([
    call(`/trie${query({ root, depth: DEPTH, limit: LIMIT, text: 1 })}`), details(Number(root)),
  ]);
  main.replaceChildren(el("h2", {}, "Shared prefixes"),
    legend([["hot", "in RAM"], ["warm", "on disk"], ["none", "tokens only"]]), ...about,
    tree.trie.length ? picture(tree.trie, open) : el("p", { class: "quiet" }, "Nothing goes on from here."));
  if (tree.truncated) main.append(el("p", { class: "quiet" }, "There is more: open a segment to see what continues it."));
}
