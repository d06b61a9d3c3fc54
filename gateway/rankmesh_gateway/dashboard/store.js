// The store's keys, by job.

import { byId, foreign, h, keep, say, show } from "./dom.js";
import { many, natural } from "./format.js";

/** Shows the keys: `[{job, keys, names}]`, where `names` may be the first ones only. */
export function showStore(store) {
  const jobs = [...store].sort((a, b) => natural(a.job, b.job));
  keep(byId("store"), jobs, (each) => each.job, jobKeys);
  say(byId("store-note"), jobs.length ? "" : "No job's store to show.");
}

function jobKeys() {
  const job = foreign();
  const number = h("span", { class: "muted" });
  const list = h("ul", { class: "keys" });
  const more = h("p", { class: "note muted" });
  const element = h("details", { open: "" }, h("summary", {}, job, " ", number), list, more);

  function update(each) {
    say(job, each.job);
    say(number, many(each.keys, "key"));
    keep(list, each.names, (name) => name, key);
    const hidden = each.keys - each.names.length;
    show(more, hidden > 0);
    say(more, hidden > 0 ? `and ${hidden} more` : "");
  }
  return [element, update];
}

function key(name) {
  return [h("li", {}, foreign(name)), () => {}];
}
