// The settings in force.

import { call } from "./api.js";
import { el, table } from "./dom.js";
import { chosen } from "./models.js";

const shown = (value) =>
  value == null || value === "" ? "–" : Array.isArray(value) ? value.join(", ") || "–" : String(value);

export async function showSettings(main) {
  const { settings } = await call("/settings");
  main.replaceChildren(el("h2", {}, chosen() === null ? "Settings in force" : `Settings in force for ${chosen()}`),
    table(["setting", "value", "what it does"],
      settings.map(({ flag, value, help }) => [el("code", {}, flag), shown(value), help])));
}
