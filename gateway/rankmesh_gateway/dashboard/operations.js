// The operations of a rank, in its dialog.

import { byId, foreign, h, keep, say, set, show } from "./dom.js";
import { age } from "./format.js";

/** Shows the operations of a snapshot: those that wait, then those that have ended, the latest first. */
export function showOperations({ groups, calls, ended, store_waits: waits }) {
  const names = new Map(groups.map(({ id, name }) => [id, name]));
  const named = (call) => ({
    text: `${call.call}${call.seq ? ` #${call.seq}` : ""}`,
    group: names.get(call.group) ?? call.group,
    error: call.error ?? "",
  });
  const rows = [
    ...waits.map((wait) => ({ text: `store.${wait.op}(${wait.keys.join(", ")})`, group: "", error: "", tone: "warn", when: `waits for ${age(wait.age)}` })),
    ...calls.map((call) => ({ ...named(call), tone: "warn", when: `in flight for ${age(call.age)}` })),
    ...[...ended].sort((a, b) => a.age - b.age).map((call) => ({ ...named(call), tone: null, when: `ended ${age(call.age)} ago` })),
  ];
  keep(byId("rank-operations").tBodies[0], rows.map((row, index) => ({ ...row, index })), ({ index }) => index, operation);
  show(byId("rank-operations"), rows.length > 0);
  say(byId("rank-operations-note"), rows.length ? "" : "It has made no call yet.");
}

function operation() {
  const text = foreign();
  const error = h("p", { class: "reason" });
  const group = h("td", { class: "wide" });
  const inGroup = h("span", { class: "narrow muted small" });
  const when = h("td", { class: "number" });
  const element = h("tr", {}, h("th", { scope: "row" }, h("code", {}, text), " ", inGroup, error), group, when);
  function update(row) {
    say(text, row.text);
    say(error, row.error);
    say(group, row.group);
    say(inGroup, row.group);
    say(when, row.when);
    set(element, "data-tone", row.tone);
  }
  return [element, update];
}
