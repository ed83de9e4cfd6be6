// What runs, how full the tiers are, and the last hours: reuse, time to first token, speed.

import { call, callModel, query } from "./api.js";
import { bytes, count, el, facts, layers, legend, moment, svg, table } from "./dom.js";
import { chosen, hasSeveral, loaded } from "./models.js";

const SOURCES = ["live", "hot", "warm", "cold", "prefill"];
const BUCKETS = 48;
const [WIDTH, HEIGHT] = [960, 120];
const ROWS = 50;

// A frozen session's tokens are evaluated: they are part of `prefill` in the daemon's figures.
function parts(reuse) {
  return { ...reuse, prefill: reuse.prefill - reuse.cold };
}

function bucketed(finished) {
  const end = Date.now() / 1000;
  const start = Math.min(end - 600, ...finished.map((each) => each.finished));
  const buckets = Array.from({ length: BUCKETS }, () => []);
  for (const each of finished) {
    const place = Math.floor(((each.finished - start) / (end - start)) * BUCKETS);
    buckets[Math.min(place, BUCKETS - 1)].push(each);
  }
  return { start, buckets };
}

function median(values) {
  const known = values.filter((value) => value != null).sort((a, b) => a - b);
  return known.length ? known[Math.floor(known.length / 2)] : null;
}

function chart(name, buckets, stacks) {
  const totals = stacks.map((stack) => stack.reduce((sum, [, n]) => sum + n, 0));
  const top = Math.max(...totals, 1);
  const step = WIDTH / BUCKETS;
  const bars = stacks.flatMap((stack, i) => {
    let y = HEIGHT;
    return stack.filter(([, n]) => n > 0).map(([kind, n]) => {
      const height = (n / top) * (HEIGHT - 16);
      y -= height;
      return svg("rect", { class: kind, x: i * step, y, width: step - 2, height });
    });
  });
  return svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": name }, bars,
    svg("text", { x: 0, y: 12 }, `at most ${count(Math.round(top))}`));
}

const wait = (request) => (request.ttft_ms == null ? "–" : `${request.ttft_ms.toFixed(0)} ms`);
const speed = (request) =>
  (request.tokens_per_second == null ? "–" : request.tokens_per_second.toFixed(1));

// Why tokens were evaluated, as a link to the texts.
function why({ id, why: said, model }) {
  return said ? el("a", { href: `#/why/${encodeURIComponent(id)}${query({ model })}` }, said) : "–";
}

const heads = () => (hasSeveral() ? ["model", "conversation"] : ["conversation"]);

// The model, where there are several, and the conversation, which its id alone may not tell from others. The
// first turn of one is recorded when it ends: until then there is nothing to open.
function conversation({ session, scope, tokenizer, model, finished }, titles) {
  const name = nameOf({ scope, id: session, tokenizer });
  const href = `#/chat/${encodeURIComponent(session ?? "")}${query({ scope, tokenizer, model })}`;
  const shown = titles.get(name) || session || "–";
  const link = session && (finished || titles.has(name)) ? el("a", { href }, shown) : shown;
  return model === null ? [link] : [model, link];
}

function history(finished, titles) {
  if (!finished.length) return [el("p", { class: "quiet" }, "No request was answered since the start.")];
  const { start, buckets } = bucketed(finished);
  const one = (value) => buckets.map((bucket) => [["live", median(bucket.map(value)) ?? 0]]);
  const sums = buckets.map((bucket) => SOURCES.map((source) =>
    [source, bucket.reduce((sum, each) => sum + parts(each.reuse)[source], 0)]));
  return [
    el("p", { class: "quiet" }, `since ${moment(start)}, until now`),
    el("h3", {}, "Prompt tokens by source"), chart("Prompt tokens by source", buckets, sums),
    legend(SOURCES.map((source) => [source, source === "prefill" ? "evaluated" : source])),
    el("h3", {}, "Time to first token, median, ms"), chart("Time to first token", buckets, one((each) => each.ttft_ms)),
    el("h3", {}, "Tokens a second, median"), chart("Tokens a second", buckets, one((each) => each.tokens_per_second)),
    el("h3", {}, "Last requests"),
    table(["when", ...heads(), "reused", "evaluated", "why", "first token", "generated", "tokens/s"],
      finished.slice(0, ROWS).map((each) => [
        moment(each.finished), ...conversation(each, titles),
        count(each.reuse.live + each.reuse.hot + each.reuse.warm), count(each.reuse.prefill),
        why(each), wait(each), count(each.generated), speed(each),
      ])),
  ];
}

function tiers({ engine, tiers: held, space }) {
  const bar = (value, max) => el("progress", { value: Math.min(value, max || 1), max: max || 1 });
  const known = space.tokens_resumable + space.tokens_to_prefill;
  return table(["tier", "held", "limit", ""], [
    ["live", `${count(engine.live_cells_used)} tokens`, `${count(engine.live_cells)} tokens`, bar(engine.live_cells_used, engine.live_cells)],
    ["hot, in RAM", bytes(held.hot_bytes), bytes(held.hot_bytes_max), bar(held.hot_bytes, held.hot_bytes_max)],
    ["warm, on disk", bytes(held.warm_bytes), bytes(held.warm_bytes_max), bar(held.warm_bytes, held.warm_bytes_max)],
    ["resumes without prefill", `${count(space.tokens_resumable)} tokens`, `${count(known)} tokens`, bar(space.tokens_resumable, known)],
  ]);
}

function writtenToday({ today_bytes, budget_bytes }) {
  const budget = budget_bytes ? ` of ${bytes(budget_bytes)}` : "";
  return `${bytes(today_bytes)}${budget} written today.`;
}

function running(requests, titles) {
  if (!requests.length) return el("p", { class: "quiet" }, "Nothing runs.");
  return table(["slot", ...heads(), "tokens", "reused", "evaluated", "first token", "generated", "tokens/s"],
    requests.map((each) => [String(each.slot), ...conversation(each, titles), count(each.tokens),
      count(each.prompt_reused), count(each.prompt_evaluated), wait(each), count(each.generated), speed(each)]));
}

// The requests of all loaded models together, each with its model and the tokenizer of its conversation.
async function allRequests() {
  const names = loaded();
  if (names === null) return [await call("/requests")].map(named(null));
  const answers = await Promise.allSettled(names.map((name) => callModel(name, "/requests").then(named(name))));
  const got = answers.filter((each) => each.status === "fulfilled").map((each) => each.value);
  if (!got.length) throw answers[0].reason;  // one that was just unloaded is left out
  return got;
}

const named = (model) => ({ running, finished, tokenizer }) => {
  const label = (each) => ({ ...each, model, tokenizer });
  return { model, tokenizer, running: running.map(label), finished: finished.map(label) };
};

const nameOf = ({ scope, id, tokenizer }) => JSON.stringify([scope, id, tokenizer]);

// The listed model's own conversations are listed without their tokenizer.
function titlesOf(sessions, answers) {
  const own = answers.find((each) => each.model === chosen())?.tokenizer;
  return new Map(sessions.map((each) => [nameOf({ ...each, tokenizer: each.tokenizer || own }), each.title]));
}

function sides({ before, stored, sent }) {
  const text = (said) => el("pre", { class: "text" }, said);
  return facts([["both", text(before)], ["stored", text(stored)], ["sent", text(sent)]]);
}

// Why a request did not find more of its prompt: where it left a stored conversation, and both texts.
export async function showWhy(main, { id }) {
  const { request, why: said, divergence } = await call(`/requests/${encodeURIComponent(id)}/why`);
  main.replaceChildren(el("h2", {}, said || "All of it was found."),
    el("p", { class: "quiet" }, `${request.id}, ${moment(request.finished)}: ${count(request.reuse.prefill)} tokens were evaluated.`));
  if (!divergence) return;
  const { session, title, base, known, before, advice } = divergence;
  const href = `#/chat/${encodeURIComponent(session)}${query({ scope: request.scope })}`;
  main.append(el("p", {}, "Diverged from ", session ? el("a", { href }, title || session) : `the base ${base}`,
    `, which has ${count(known)} of them, too.`),
    before === null ? el("p", { class: "quiet" }, "One of the two conversations was deleted.") : sides(divergence),
    el("p", {}, advice));
}

export async function showLive(main, _, stats) {
  const fill = async () => {
    const [answers, figures, { sessions }] = await Promise.all([allRequests(), stats(), call("/sessions?limit=200")]);
    const titles = titlesOf(sessions, answers);
    const finished = answers.flatMap((each) => each.finished).sort((a, b) => b.finished - a.finished);
    const model = chosen();
    main.replaceChildren(el("h2", {}, "Running"), running(answers.flatMap((each) => each.running), titles),
      ...(figures ? [el("h2", {}, model === null ? "Tiers" : `Tiers of ${model}`), tiers(figures),
        el("h2", {}, "What conversations take"), layers(figures.footprint),
        el("p", {}, writtenToday(figures.written))] : []),
      el("h2", {}, "Last hours"), ...history(finished, titles));
  };
  await fill();
  return fill;
}
