// What runs, how full the tiers are, and the last hours: reuse, time to first token, speed.

import { call } from "./api.js";
import { bytes, count, el, legend, moment, svg, table } from "./dom.js";

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
    table(["when", "conversation", "reused", "evaluated", "first token", "generated", "tokens/s"],
      finished.slice(0, ROWS).map((each) => [
        moment(each.finished),
        each.session ? el("a", { href: `#/chat/${encodeURIComponent(each.session)}` }, titles.get(each.session) || each.session) : "–",
        count(each.reuse.live + each.reuse.hot + each.reuse.warm), count(each.reuse.prefill),
        wait(each), count(each.generated), speed(each),
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

function running(requests) {
  if (!requests.length) return el("p", { class: "quiet" }, "Nothing runs.");
  return table(["slot", "conversation", "tokens", "reused", "evaluated", "first token", "generated", "tokens/s"],
    requests.map((each) => [String(each.slot), each.session ?? "–", count(each.tokens),
      count(each.prompt_reused), count(each.prompt_evaluated), wait(each), count(each.generated), speed(each)]));
}

export async function showLive(main, _, stats) {
  const fill = async () => {
    const [requests, figures, { sessions }] = await Promise.all([call("/requests"), stats(), call("/sessions?limit=200")]);
    const titles = new Map(sessions.map((session) => [session.id, session.title]));
    main.replaceChildren(el("h2", {}, "Running"), running(requests.running),
      ...(figures ? [el("h2", {}, "Tiers"), tiers(figures)] : []),
      el("h2", {}, "Last hours"), ...history(requests.finished, titles));
  };
  await fill();
  return fill;
}
