// The event log, the newest first.

import { byId, foreign, h, say, show } from "./dom.js";
import { clock, ranks as rankList } from "./format.js";
import { isFailure, mark, markOf } from "./marks.js";

const MOST = 500;

const times = new WeakMap();

/** Adds an event, `{time, job, ranks, group, detail}`, to the log. */
export function addEvent(kind, event) {
  const newest = byId("log").firstElementChild;
  if (kind === "rank-joining" && newest?.dataset.joining === event.job) {
    newest.remove(); // the next one says how many have joined
  }
  const moment = new Date(event.time * 1000);
  const time = h("time", { datetime: Number.isNaN(moment.getTime()) ? null : moment.toISOString() }, clock(event.time));
  const what = h("p", {}, h("b", {}, kind.replaceAll("-", " ")), " ", foreign(event.detail || words(event)));
  const joining = kind === "rank-joining" ? event.job : null;
  add(h("li", { "data-failure": isFailure(kind) ? "" : null, "data-joining": joining }, time, markOf(kind), what), event.time);
}

/** Adds a line of our own. */
export function addNote(text) {
  const now = Date.now() / 1000;
  add(h("li", {}, h("time", {}, clock(now)), mark("left"), h("p", {}, text)), now);
}

/** Adds a line in the order of time: the gateway notices silence later than it began. */
function add(line, time) {
  const list = byId("log");
  times.set(line, time);
  let next = list.firstElementChild;
  while (next && times.get(next) > time) {
    next = next.nextElementSibling;
  }
  list.insertBefore(line, next);
  while (list.childElementCount > MOST) {
    list.lastElementChild.remove();
  }
  note();
}

function words({ job, ranks, group }) {
  return [job, group, ranks?.length ? `ranks ${rankList(ranks)}` : ""].filter(Boolean).join(", ");
}

function note() {
  const list = byId("log");
  const only = byId("log-failures").checked;
  const shown = only ? list.querySelectorAll("[data-failure]").length : list.childElementCount;
  show(byId("log-box"), shown > 0);
  say(byId("log-note"), shown ? "" : only ? "No failures." : "Nothing has happened yet.");
}

/** Wires the choice of what is shown. */
export function beginLog() {
  byId("log-failures").addEventListener("change", (event) => {
    byId("log").classList.toggle("only-failures", event.target.checked);
    note();
  });
  note();
}
