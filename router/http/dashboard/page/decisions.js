// The last decisions, and why one of them went where it went.

import { byId, cell, clock, el, measure, number, percent, plural, row, score, seconds, setAttribute, setMeasure, setText, shortName, sync, table } from "./dom.js";

const COLUMNS = [
  ["Time"], ["Request"], ["Instance"], ["Prompt", "number wide"], ["Hit", "number"],
  ["Score", "number"], ["Outcome", "wide"], ["First token", "number wide"],
];
const DECODE_LEG = "decode_leg";
const GOOD = new Set(["completed", "running"]);

const keyOf = (one) => `${one.router_id}/${one.sequence}`;

export class DecisionList {
  constructor(parent, choose) {
    this.parent = parent;
    this.choose = choose;
    this.current = null;
    const { node, body } = table("list", COLUMNS);
    setAttribute(node, "aria-labelledby", "decisions-title");
    this.node = node;
    this.body = body;
    this.empty = el("p", { class: "empty" }, "No decision yet. Send a request:",
      el("code", {}, `curl ${location.origin}/v1/chat/completions -H 'Content-Type: application/json' -d '{"model": "…", "messages": [{"role": "user", "content": "Hello"}]}'`));
  }

  show(decisions) {
    if (!decisions.length) {
      this.parent.replaceChildren(this.empty);
      return;
    }
    if (this.node.parentElement !== this.parent) this.parent.replaceChildren(this.node);
    sync(this.body, decisions, keyOf, (one) => this.make(one), (line, one) => this.update(line, one));
  }

  mark(key) {
    this.current = key;
    for (const [name, line] of this.body.shown ?? []) setAttribute(line, "aria-current", name === key ? "true" : null);
  }

  focus(key) {
    this.body.shown?.get(key)?.querySelector("button").focus();
  }

  make(one) {
    const open = () => this.choose(one);
    const button = el("button", { type: "button", class: "link", title: one.request_id }, one.request_id);
    const parts = { hit: measure(), word: el("span", { class: "word" }), first: el("span") };
    const line = row({}, [
      cell("Time", "", clock(one.at_s)),
      cell("Request", "name", button),
      cell("Instance", "", el("span", { class: "label", title: one.instance_id })),
      cell("Prompt", "number wide", number(one.prompt_tokens)),
      cell("Hit", "number", parts.hit),
      cell("Score", "number", ""),
      cell("Outcome", "wide", parts.word),
      cell("First token", "number wide", parts.first),
    ]);
    line.addEventListener("click", open);
    parts.instance = line.cells[2].firstElementChild;
    parts.score = line.cells[5];
    line.parts = parts;
    return line;
  }

  update(line, one) {
    const { parts } = line;
    setAttribute(line, "aria-current", keyOf(one) === this.current ? "true" : null);
    setText(parts.instance, shortName(one.instance_id));
    setAttribute(parts.instance, "title", one.instance_id);
    setMeasure(parts.hit, one.hit_tokens / one.prompt_tokens, percent(one.hit_tokens / one.prompt_tokens));
    setText(parts.score, score(one.score));
    setText(parts.word, outcome(one));
    setAttribute(parts.word, "data-kind", kindOf(one));
    setText(parts.first, seconds(one.ttft_s));
  }
}

function outcome(one) {
  const retried = one.retries_count ? `, ${plural(one.retries_count, "retry").replace("retrys", "retries")}` : "";
  const degraded = one.degraded_cause ? ", degraded" : "";
  const word = one.outcome === "completed" && one.status >= 400 ? `answered ${one.status}` : one.outcome;
  return `${word}${retried}${degraded}`;
}

function kindOf(one) {
  if (!GOOD.has(one.outcome) || one.status >= 400) return "bad";
  return one.degraded_cause || one.retries_count ? "warn" : null;
}

export function showDetail(parent, one, close) {
  const back = el("button", { type: "button" }, "Close");
  back.addEventListener("click", close);
  const title = el("h3", { id: "detail-title", tabindex: "-1" }, one.request_id);
  const several = one.attempts.length > 1;
  parent.replaceChildren(
    el("header", {}, title, back),
    ...one.attempts.map((attempt, place) => attemptOf(attempt, several ? place + 1 : null)),
    factsOf(one),
  );
  parent.hidden = false;
  byId("decisions").hidden = false;
  byId("decisions").querySelector(".columns").setAttribute("data-open", "");
  return title;
}

function attemptOf(attempt, place) {
  const { node, body } = table("candidates", [
    ["Instance"], [attempt.candidates.some((one) => one.arithmetic) ? "(queued + new) × (batch + 1)" : "Score", "number"],
    ["", ""], ["Hit tokens", "number"],
  ]);
  setAttribute(node, "aria-label", "Candidates, the chosen one first, then the best of the others");
  const finite = attempt.candidates.map((one) => one.score).filter(Number.isFinite);
  const most = Math.max(1, ...finite);
  attempt.candidates.forEach((one, index) => body.append(candidateOf(one, index === 0, most)));
  const more = attempt.candidates_count - attempt.candidates.length;
  return el("div", { class: "attempt" },
    place ? el("h3", {}, `Attempt ${place}${attempt.policy === DECODE_LEG ? ", decode leg" : ""}`) : null,
    el("p", { class: "why" }, attempt.explanation),
    node,
    more > 0 ? el("p", { class: "quiet" }, `and ${plural(more, "costlier instance")}`) : null);
}

function candidateOf(one, chosen, most) {
  const bar = measure();
  setMeasure(bar, (one.score ?? most) / most, "");
  return row({ class: chosen ? "chosen" : null }, [
    cell(null, "name",
      el("span", { class: "label", title: one.instance_id }, shortName(one.instance_id)),
      chosen ? el("span", { class: "mark" }, "chosen") : null),
    cell(one.arithmetic ? "(queued + new) × (batch + 1)" : "Score", "number sum", one.arithmetic ?? score(one.score)),
    cell(null, "", bar),
    cell("Hit tokens", "number", number(one.hit_tokens)),
  ]);
}

function factsOf(one) {
  const last = one.attempts.at(-1);
  const facts = [
    ["Outcome", outcome(one) + (one.status ? `, status ${one.status}` : "")],
    ["Model", one.model],
    ["Policy", last.measure ? `${last.policy}: ${last.measure}` : last.policy],
    ["Prompt", `${plural(one.prompt_tokens, "token")}, ${number(one.hit_tokens)} predicted as hits` +
      (one.in_flight_tokens ? `, of them ${number(one.in_flight_tokens)} by a request in flight` : "")],
    ["Hits are", one.approximate ? "an estimate: by text, or of an engine without KV events" : null],
    ["Hits reported", Number.isFinite(one.cached_tokens) ? plural(one.cached_tokens, "token") : null],
    ["First token", Number.isFinite(one.ttft_s) ? seconds(one.ttft_s) : null],
    ["Whole answer", Number.isFinite(one.e2e_s) ? seconds(one.e2e_s) : null],
    ["Without", one.degraded_cause],
    ["Decided", `${new Date(one.at_s * 1000).toISOString().replace("T", " ").slice(0, 23)} UTC`],
    ["Counters' age", Number.isFinite(last.snapshot_age_s) ? seconds(last.snapshot_age_s) : null],
    ["Path", one.endpoint],
    ["Prefilled by", one.prefill_instance_id ? shortName(one.prefill_instance_id) : null],
  ];
  return el("dl", { class: "facts" },
    ...facts.filter(([, value]) => value).flatMap(([label, value]) => [el("dt", {}, label), el("dd", {}, String(value))]));
}

export { keyOf };
