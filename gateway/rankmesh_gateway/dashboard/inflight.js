// Calls in flight: the ranks that have arrived, and those that are missing.

import { counts, stops } from "./ages.js";
import { byId, foreign, h, keep, say, set, show } from "./dom.js";
import { age, bytes, many, ranks as rankList } from "./format.js";

// Members report once a second: a call that was younger then may have completed since.
const BRIEF_S = 2;
const LONG_S = 5;

/** The operations that keep ranks waiting; the others complete before a reader could see them. */
export const lasting = (inflight) => inflight.filter((each) => each.age >= BRIEF_S);

/** Shows what is in flight, as it was at `at` (performance.now()). */
export function showInflight(inflight, at) {
  const rows = lasting(inflight).map((each) => ({ ...each, at }));
  rows.sort((a, b) => b.age - a.age);
  const table = byId("inflight");
  show(table, rows.length > 0);
  keep(table.tBodies[0], rows, keyOf, row);
  const brief = inflight.length - rows.length;
  const begun = `${many(brief, "operation")} under way for less than ${BRIEF_S} s`;
  say(byId("inflight-note"), brief ? (rows.length ? `and ${begun}` : `${begun}.`) : rows.length ? "" : "Nothing is in flight.");
  const note = byId("count-inflight-note");
  if (rows.length) {
    counts(note, rows[0].age, at, (seconds) => `oldest ${age(seconds)}`);
  } else {
    stops(note);
    say(note, "");
  }
  say(byId("count-inflight"), String(inflight.length));
}

const keyOf = (each) => JSON.stringify([each.job, each.epoch, each.group, each.seq, each.op]);

function row() {
  const op = foreign();
  const where = foreign();
  const long = h("td", { class: "number" });
  const size = h("td", { class: "number wide" });
  const missing = h("p", { class: "missing" });
  const arrived = h("p", { class: "muted" });
  const differing = h("ul", { class: "reason plain" });
  const title = h("th", { scope: "row" }, h("code", {}, op), h("br"), h("span", { class: "muted small" }, where));
  const element = h("tr", {}, title, long, size, h("td", {}, missing, differing, arrived));

  function update(each) {
    say(op, each.op);
    say(where, `#${each.seq} in ${each.name}, ${each.job}`);
    counts(long, each.age, each.at);
    say(size, bytes(each.bytes));
    say(missing, each.missing.length ? `missing ${rankList(each.missing)}` : "");
    show(missing, each.missing.length > 0);
    say(arrived, each.arrived.length ? `arrived ${rankList(each.arrived)}` : "no rank has arrived");
    keep(differing, Object.entries(each.differing ?? {}), ([rank]) => rank, differs);
    set(element, "data-tone", each.missing.length && each.age >= LONG_S ? "warn" : null);
  }
  return [element, update];
}

/** A member that makes another call at the same sequence number. */
function differs([rank]) {
  const op = foreign();
  return [h("li", {}, `rank ${rank} does `, op), ([, other]) => say(op, other)];
}
