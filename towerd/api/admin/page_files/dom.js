// Elements and figures. Whatever the daemon says becomes text nodes: nothing is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, String(value));
  }
  node.append(...children.flat().filter((child) => child != null));
  return node;
}

export const el = (name, attributes = {}, ...children) =>
  filled(document.createElement(name), attributes, children);

export const svg = (name, attributes = {}, ...children) =>
  filled(document.createElementNS(SVG, name), attributes, children);

export const get = (id) => document.getElementById(id);

export function table(heads, rows) {
  return el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
    el("tbody", {}, rows.map((cells) => el("tr", {}, cells.map((cell) => el("td", {}, cell)))))));
}

export function facts(pairs) {
  return el("dl", { class: "facts" },
    pairs.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

export function legend(names) {
  return el("p", { class: "legend quiet" },
    names.flatMap(([kind, text]) => [el("span", { class: kind }), text]));
}

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) {
    n /= 1024;
    unit += 1;
  }
  return `${n.toFixed(unit ? 1 : 0)} ${units[unit]}`;
}

export const count = (n) => n.toLocaleString("en");

export function ago(unixSeconds) {
  const seconds = Math.max(0, Date.now() / 1000 - unixSeconds);
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= length) return `${Math.floor(seconds / length)} ${unit} ago`;
  }
  return "just now";
}

export const moment = (unixSeconds) => new Date(unixSeconds * 1000).toLocaleString();

// What conversations, or one of them, take after each layer of the store.
export function layers(footprint) {
  const formats = footprint.formats.map((each) => `${each.format} ${bytes(each.bytes)}`).join(", ");
  const bar = (value) => el("progress", { value, max: footprint.slot_bytes || 1 });
  return table(["after", "takes", ""], [
    ["a slot file each", "slot_bytes"], ["shared prefixes", "shared_bytes"], ["levels", "levels_bytes"],
    ["transform", "transform_bytes"], [`kept${formats ? `: ${formats}` : ""}`, "kept_bytes"],
  ].map(([name, key]) => [name, bytes(footprint[key]), bar(footprint[key])]));
}

// What the rows of a conversation take in each layer, keys below values.
export function layerChart(list) {
  const most = Math.max(0, ...list.map((each) => each.k_bytes + each.v_bytes));
  if (!most) return null;
  const [width, height] = [640, 90];
  const step = width / list.length;
  const bars = list.flatMap(({ layer, k_bytes, v_bytes, window }, i) => {
    const [k, v] = [k_bytes, v_bytes].map((each) => (each / most) * height);
    const title = `layer ${layer}${window ? " (sliding window)" : ""}: keys ${bytes(k_bytes)}, values ${bytes(v_bytes)}`;
    const bar = (kind, y, size) => svg("rect", { class: kind, x: i * step, y, width: Math.max(1, step - 2), height: size },
      svg("title", {}, title));
    return [bar("keys", height - k, k), bar("values", height - k - v, v)];
  });
  return el("figure", {}, svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": "Bytes by layer", preserveAspectRatio: "none", class: "layers" }, bars),
  el("figcaption", {}, legend([["keys", "keys"], ["values", "values"]]),
    el("span", { class: "quiet" }, `${list.length} layers, ${bytes(most)} at most`)));
}
