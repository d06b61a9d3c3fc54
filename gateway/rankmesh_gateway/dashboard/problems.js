// What is wrong, in the gateway's words: the list that `rankmesh status` and `rankmesh diagnose` print.

import { counts } from "./ages.js";
import { byId, foreign, h, keep, say, show } from "./dom.js";
import { age, many } from "./format.js";
import { mark } from "./marks.js";

const LATELY_S = 600;
const JOIN_S = 10; // every job waits a little for its ranks
const MOST = 8;
/** Least share of the time for which the others wait for a slow rank: see the gateway's scores.py. */
export const SLOW = 0.05;
const STALLS = ["stopped", "ended", "silent", "order", "messages", "tags", "key", "elsewhere", "call"];
const MARKS = { failed: "failed", warning: "suspect", note: "left" };

let known = null;

/** Shows the problems of an overview of time `at` (performance.now()); returns the number of failures. */
export function showProblems({ problems = [], ranks }, at) {
  const several = new Set(ranks.map(({ job }) => job)).size > 1;
  const found = problems.filter(isCurrent).map((each) => ({ ...each, several, at }));
  const failures = found.filter(({ severity }) => severity === "failed").length;
  show(byId("problems"), found.length > 0);
  byId("problems").dataset.tone = failures ? "bad" : "warn";
  keep(byId("problems-list"), found.slice(0, MOST), keyOf, problemItem);
  const more = found.length - MOST;
  say(byId("problems-note"), more > 0 ? `and ${many(more, "more problem")}; rankmesh status lists all` : "");
  announce(found.filter(({ severity, young }) => severity !== "note" && !young));
  return failures;
}

/** Makes the state of ranks and jobs `stuck` or `slow`, by the problems of an overview. */
export function judge({ problems = [], ranks, jobs }) {
  const stalls = problems.filter(({ kind, severity, young }) => STALLS.includes(kind) && severity !== "note" && !young);
  const stuck = new Set(stalls.flatMap(({ job, ranks: causes }) => causes.map((rank) => JSON.stringify([job, rank]))));
  const live = ranks.filter(({ state }) => state === "alive");
  for (const each of live) {
    const isStuck = stuck.has(JSON.stringify([each.job, each.member.rank]));
    each.state = isStuck ? "stuck" : each.slow >= SLOW ? "slow" : "alive";
  }
  for (const each of jobs.filter(({ state }) => state === "running")) {
    const isSlow = live.some(({ job, epoch, state }) => state === "slow" && job === each.job && epoch === each.epoch);
    each.state = stalls.some(({ job }) => job === each.job) ? "stuck" : isSlow ? "slow" : "running";
  }
}

const isCurrent = ({ kind, severity, seconds }) =>
  severity === "failed" ? seconds < LATELY_S : kind !== "joining" || seconds >= JOIN_S;

const keyOf = ({ job, kind, severity, ranks, call, name }) => JSON.stringify([job, kind, severity, ranks, call, name]);

/** A problem in words, with its job where there are several. */
const inWords = ({ job, text, several }) => (several && !text.includes(`job ${job}`) ? `${job}: ${text}` : text);

function problemItem({ severity }) {
  const text = foreign();
  const since = h("span", { class: "muted" });
  const last = h("p", { class: "muted small" });
  const remedy = h("p", { class: "small" });
  const element = h("li", { "data-state": severity }, mark(MARKS[severity]), h("div", {}, text, since, last, remedy));
  function update(each) {
    say(text, inWords(each));
    if (severity === "failed" && each.seconds) {
      counts(since, each.seconds, each.at, (seconds) => ` ${age(seconds)} ago`);
    }
    say(last, each.last ? `last common operation: ${each.last}` : "");
    show(last, each.last !== "");
    say(remedy, `what to do: ${each.remedy}${each.young ? "; the wait is young, and may be a slow step" : ""}`);
  }
  return [element, update];
}

/** Announces new problems; those before the page was opened are only shown. */
function announce(problems) {
  const fresh = known === null ? [] : problems.filter((each) => !known.has(keyOf(each)));
  known = new Set(problems.map(keyOf));
  fresh.slice(0, 3).map(inWords).forEach(tell);
  if (fresh.length > 3) {
    tell(`And ${many(fresh.length - 3, "more problem")}.`);
  }
}

/** Announces a text to screen readers, after those before it. */
export function tell(text) {
  const announcer = byId("announcer");
  announcer.append(h("p", {}, text));
  while (announcer.childElementCount > MOST) {
    announcer.firstElementChild.remove();
  }
}
