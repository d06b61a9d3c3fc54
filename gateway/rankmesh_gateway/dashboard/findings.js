// Why jobs are stuck: the findings of `rankmesh diagnose`, in the same sentences.

import { tell } from "./attention.js";
import { byId, foreign, h, keep, say, show } from "./dom.js";
import { many } from "./format.js";
import { mark } from "./marks.js";

const MOST = 8;
const JOIN_MS = 10000; // every job waits a little for its ranks

let known = new Set();
let joining = new Map();

/** Shows the findings of an overview, but those of failed ranks, which the list below it has. */
export function showFindings({ findings = [], ranks }) {
  const several = new Set(ranks.map(({ job }) => job)).size > 1;
  const now = performance.now();
  joining = new Map(findings.filter(({ kind }) => kind === "joining").map(({ job }) => [job, joining.get(job) ?? now]));
  const found = findings
    .filter(({ kind, job }) => kind !== "failed" && (kind !== "joining" || now - joining.get(job) >= JOIN_MS))
    .map((each) => ({ ...each, several }));
  show(byId("findings"), found.length > 0);
  keep(byId("findings-list"), found.slice(0, MOST), keyOf, finding);
  say(byId("findings-note"), found.length > MOST ? `and ${many(found.length - MOST, "more finding")}; rankmesh diagnose lists all` : "");
  const fresh = found.filter((each) => !each.young && !known.has(keyOf(each)));
  known = new Set(found.filter((each) => !each.young).map(keyOf));
  if (fresh.length) {
    tell(fresh[0].text);
  }
}

const keyOf = ({ job, kind, ranks, call }) => JSON.stringify([job, kind, ranks, call]);

function finding() {
  const text = foreign();
  const last = h("p", { class: "muted small" });
  const remedy = h("p", { class: "small" });
  const element = h("li", {}, mark("suspect"), h("div", {}, text, last, remedy));
  function update(each) {
    say(text, each.several ? `${each.job}: ${each.text}` : each.text);
    say(last, each.last ? `last common operation: ${each.last}` : "");
    show(last, each.last !== "");
    say(remedy, `what to do: ${each.remedy}${each.young ? "; the wait is young, and may be a slow step" : ""}`);
  }
  return [element, update];
}
