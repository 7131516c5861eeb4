// Asks again and again, one request after the other: a connection that is kept reaches the same
// router process each time, also where several share the port.

import { KeyWanted, ask, forgetKey, hasKey, useKey } from "./api.js";
import { DecisionList, keyOf, showDetail } from "./decisions.js";
import { byId, clock, plural, setAttribute, setText } from "./dom.js";
import { showFleets } from "./fleet.js";

const POLL_MS = 2000;
const LOST_MS = 7000;
const SHOWN = 40;

const page = { heardMs: null, paused: false, state: "waiting", wake: null, keyTried: false, detail: null };
const list = new DecisionList(byId("list"), choose);

function setState(state, label) {
  page.state = state;
  setAttribute(byId("state"), "data-state", state);
  setText(byId("state-label"), label);
}

function notice(text, kind = null) {
  const node = byId("notice");
  node.hidden = !text;
  setText(node, text ?? "");
  setAttribute(node, "data-kind", kind);
}

function showAge() {
  const ageMs = page.heardMs === null ? null : Date.now() - page.heardMs;
  const waiting = page.state === "locked" || ageMs === null;
  setText(byId("state-age"), waiting ? "" : `updated ${Math.round(ageMs / 1000)} s ago`);
  if (!waiting && !page.paused && ageMs > LOST_MS) lost();
}

function lost() {
  setState("lost", "Disconnected");
  const since = page.heardMs === null ? "" : ` What is shown is from ${clock(page.heardMs / 1000)}.`;
  notice(`This router does not answer.${since} Trying again.`, "lost");
  setAttribute(byId("main"), "data-stale", "");
}

function locked() {
  setState("locked", "Locked");
  notice(null);
  setAttribute(byId("key-hint"), "data-kind", page.keyTried ? "wrong" : null);
  setText(byId("key-hint"), page.keyTried ? "The router does not take this key." : "It stays in this tab and goes out as a header only.");
  byId("fleets").replaceChildren();
  byId("fleets").shown = undefined;
  byId("decisions").hidden = true;
  byId("forget").hidden = true;
  if (byId("key").hidden) {
    byId("key").hidden = false;
    byId("key-value").focus();
  }
}

async function poll() {
  const fleet = await ask("/fleet");
  const recent = await ask(`/decisions?limit=${SHOWN}`);
  page.heardMs = Date.now();
  page.keyTried = false;
  byId("key").hidden = true;
  byId("forget").hidden = !hasKey();
  setAttribute(byId("main"), "data-stale", null);
  const router = fleet.router ?? {};
  const queued = router.queued ? `, ${router.queued} queued` : "";
  setText(byId("router"), `router ${recent.router_id} · ${plural(router.in_flight ?? 0, "request")} in flight${queued}`);
  if (fleet.degraded) {
    setState("degraded", "Degraded");
    notice(`Decisions are made without the index: ${fleet.reason}. Shown is the fleet as last known.`);
  } else if (router.draining) {
    setState("draining", "Draining");
    notice("This router is stopping and takes no new request.");
  } else {
    setState("live", "Live");
    notice(null);
  }
  showFleets(byId("fleets"), fleet);
  byId("decisions").hidden = false;
  list.show(recent.decisions.map((one) => ({ ...one, router_id: recent.router_id })));
  if (page.detail?.outcome === "running") await followDetail();
}

async function followDetail() {
  const [found] = await lookUp(page.detail.request_id, page.detail.sequence);
  if (!found || !page.detail || keyOf(found) !== keyOf(page.detail)) return;
  if (found.outcome === "running" && found.attempts_count === page.detail.attempts_count) return;
  page.detail = found;
  showDetail(byId("detail"), found, close);
}

async function run() {
  for (;;) {
    if (!page.paused && !document.hidden) {
      try {
        await poll();
      } catch (error) {
        if (error instanceof KeyWanted) locked();
        else lost();
      }
      showAge();
    }
    await new Promise((resolve) => {
      page.wake = resolve;
      setTimeout(resolve, POLL_MS);
    });
  }
}

async function lookUp(requestId, sequence = null) {
  const answer = await ask(`/decisions?request_id=${encodeURIComponent(requestId)}`);
  const found = sequence === null ? answer.decisions[0] : answer.decisions.find((one) => one.sequence === sequence);
  if (!found) return [null, `Nothing is kept of ${requestId}: router ${answer.router_id} keeps its last ${answer.kept_max} decisions.`];
  return [{ ...found, router_id: answer.router_id }, null];
}

async function choose(one, sequence = one.sequence ?? null) {
  const result = byId("find-result");
  try {
    const [found, problem] = await lookUp(one.request_id, sequence);
    result.hidden = !problem;
    setText(result, problem ?? "");
    if (!found) return;
    page.detail = found;
    list.mark(keyOf(found));
    history.replaceState(null, "", `#${new URLSearchParams({ request: found.request_id })}`);
    showDetail(byId("detail"), found, close).focus();
  } catch (error) {
    if (error instanceof KeyWanted) locked();
    else {
      result.hidden = false;
      setText(result, "This router did not answer. Try again.");
    }
  }
}

function close() {
  const key = page.detail && keyOf(page.detail);
  page.detail = null;
  byId("detail").hidden = true;
  byId("detail").replaceChildren();
  setAttribute(document.querySelector(".columns"), "data-open", null);
  history.replaceState(null, "", location.pathname);
  list.focus(key);
  list.mark(null);
}

byId("pause").addEventListener("click", () => {
  page.paused = !page.paused;
  setAttribute(byId("pause"), "aria-pressed", page.paused);
  setText(byId("pause"), page.paused ? "Resume" : "Pause");
  if (page.paused) setState("paused", "Paused");
  else page.wake?.();
});
byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key-value").value);
  byId("key-value").value = "";
  page.keyTried = true;
  page.wake?.();
});
byId("forget").addEventListener("click", () => {
  forgetKey();
  page.wake?.();
});
byId("find").addEventListener("submit", (event) => {
  event.preventDefault();
  choose({ request_id: byId("find-id").value.trim() });
});
document.addEventListener("visibilitychange", () => page.wake?.());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && page.detail) close();
});
setInterval(showAge, 1000);
run();
const linked = new URLSearchParams(location.hash.slice(1)).get("request");
if (linked) choose({ request_id: linked });
