// Fleets and their instances.

import { cell, el, measure, number, percent, plural, row, setAttribute, setMeasure, setText, shortName, sync, table } from "./dom.js";

const COLUMNS = [
  ["Instance"], ["State"], ["Batch size", "number"], ["Queued prefill", "number"],
  ["Waiting in engine", "number"], ["KV$ in use", "number"], ["Hit ratio", "number"],
  ["Index complete", "number"], ["Failures", "number"],
];
const BATCH_SCALE_MIN = 8;
const QUEUE_SCALE_MIN = 4096;
const LONG_MIN = 10;
const KV_HIGH_RATIO = 0.95;

const batchOf = (one) => (one.reserved_requests ?? 0) + (one.foreign_requests ?? 0);
const sum = (items, of) => items.reduce((total, one) => total + (of(one) ?? 0), 0);

export function showFleets(parent, view) {
  if (!view.fleets.length) {
    parent.replaceChildren(el("section", {},
      el("p", { class: "empty" }, "No instance has announced itself yet. A sidecar does so for its engine:",
        el("code", {}, "python -m indexer --engine_url http://HOST:8000 --redis_url redis://HOST:6379"))));
    parent.shown = undefined;
    return;
  }
  if (!parent.shown) parent.replaceChildren();
  const nowS = view.router?.now_s ?? Date.now() / 1000;
  sync(parent, view.fleets, (fleet) => fleet.fleet_id, makeFleet, (section, fleet) => updateFleet(section, fleet, nowS));
}

function makeFleet(fleet) {
  const title = `fleet-${fleet.fleet_id}`;
  const { node, body } = table("instances", COLUMNS);
  const figures = el("dl", { class: "figures" });
  const scroller = el("div", { class: "scroller" }, node);
  const empty = el("p", { class: "empty", hidden: true }, "No instance of this model is here now.");
  const section = el("section", { class: "fleet", "aria-labelledby": title },
    el("div", { class: "heading" }, el("h2", { id: title }, fleet.model_scope)), figures, scroller, empty);
  section.parts = { figures, node, body, scroller, empty };
  setAttribute(node, "aria-labelledby", title);
  return section;
}

function updateFleet(section, fleet, nowS) {
  const { figures, body, scroller, empty } = section.parts;
  const all = fleet.instances;
  const said = fleet.predictions ?? {};
  const shown = [
    ["Serving", `${all.filter((one) => one.eligible && !isEjected(one)).length} of ${all.length}`],
    ["In flight", number(sum(all, batchOf))],
    ["Queued prefill tokens", number(sum(all, (one) => one.reserved_prefill_tokens))],
    ["Hit ratio", percent(said.hit_ratio_actual)],
    ["Predicted to the token", percent(said.exact_ratio)],
  ];
  sync(figures, shown, ([label]) => label, ([label]) => el("div", {}, el("dt", {}, label), el("dd")),
    (pair, [, value]) => setText(pair.lastElementChild, value));
  setAttribute(scroller, "hidden", all.length ? null : "");
  // Beyond what fits a screen the decisions below would be out of sight.
  const long = all.length > LONG_MIN;
  setAttribute(scroller, "data-long", long ? "" : null);
  setAttribute(scroller, "tabindex", long ? "0" : null);
  setAttribute(scroller, "role", long ? "region" : null);
  setAttribute(scroller, "aria-label", long ? `Instances of ${fleet.model_scope}` : null);
  setAttribute(empty, "hidden", all.length ? "" : null);
  const scale = {
    batch: Math.max(BATCH_SCALE_MIN, ...all.map(batchOf)),
    queue: Math.max(QUEUE_SCALE_MIN, ...all.map((one) => one.reserved_prefill_tokens ?? 0)),
  };
  sync(body, all, (one) => one.instance_id, makeInstance, (line, one) => updateInstance(line, one, { scale, nowS }));
}

function makeInstance(one) {
  const parts = {
    state: el("span", { class: "word" }), why: el("span", { class: "sub" }),
    batch: measure(), queue: measure(), kv: measure(), hits: measure(),
    waiting: el("span"), complete: el("span"), failures: el("span"),
  };
  const status = el("span", { class: "status" }, el("span", { class: "dot", "aria-hidden": "true" }), parts.state);
  const line = row({}, [
    cell(null, "name",
      el("span", { class: "label", title: one.instance_id }, shortName(one.instance_id)),
      el("span", { class: "sub" }, aside(one))),
    cell("State", "state-cell", status, parts.why),
    cell("Batch size", "number", parts.batch),
    cell("Queued prefill", "number", parts.queue),
    cell("Waiting in engine", "number", parts.waiting),
    cell("KV$ in use", "number", parts.kv),
    cell("Hit ratio", "number", parts.hits),
    cell("Index complete", "number", parts.complete),
    cell("Failures", "number", parts.failures),
  ]);
  line.parts = { ...parts, status };
  return line;
}

// The port and host are its name; what tells engines apart beyond that is small print.
function aside(one) {
  const rank = Number.isInteger(one.data_parallel_rank) ? `rank ${one.data_parallel_rank}` : null;
  const version = one.engine_version ? `engine ${one.engine_version}` : null;
  const role = one.role === "both" ? null : one.role;
  return [role, rank, version, one.adapters?.length ? plural(one.adapters.length, "adapter") : null]
    .filter(Boolean).join(" · ");
}

const isEjected = (one) => Boolean(one.ejection);

function stateOf(one, nowS) {
  if (isEjected(one)) {
    const { cause, until_s: endS } = one.ejection;
    const next = endS > nowS ? `${Math.ceil(endS - nowS)} s left` : "being probed";
    return ["bad", `ejected, ${next}`, `after: ${cause}`];
  }
  if (one.eligible === undefined) return ["idle", "joining"];
  if (!one.eligible) return [one.ineligible_reason === "lease ended" ? "bad" : "warn", one.ineligible_reason];
  return batchOf(one) ? ["good", "serving"] : ["idle", "idle"];
}

function updateInstance(line, one, { scale, nowS }) {
  const { parts } = line;
  const [kind, word, why] = stateOf(one, nowS);
  setAttribute(parts.status, "data-kind", kind);
  setText(parts.state, word);
  setText(parts.why, why ?? "");
  const batch = batchOf(one);
  setMeasure(parts.batch, batch / scale.batch, number(batch));
  const detail = `${number(one.reserved_requests)} reserved, ${number(one.foreign_requests)} from elsewhere; engine: ${number(one.running_count)} running, ${number(one.waiting_count)} waiting`;
  setAttribute(parts.batch, "title", detail);
  setMeasure(parts.queue, one.reserved_prefill_tokens / scale.queue, number(one.reserved_prefill_tokens));
  setText(parts.waiting, number(one.waiting_count));
  setMeasure(parts.kv, one.kv_usage_ratio, percent(one.kv_usage_ratio), one.kv_usage_ratio >= KV_HIGH_RATIO);
  const hits = one.predictions?.hit_ratio_actual;
  setMeasure(parts.hits, hits, percent(hits));
  setText(parts.complete, percent(one.completeness_ratio));
  setText(parts.failures, number(one.failures_in_a_row ?? 0));
}
