// Jobs: the state of each one's world, and how long it has run or ran.

import { counts, stops } from "./ages.js";
import { byId, foreign, h, keep, say, show } from "./dom.js";
import { age, clock, many, natural, tally } from "./format.js";
import { badge, ORDER } from "./marks.js";

const MOST = 50;

/** Shows the newest world of each job of an overview of time `time` (unix), at `at` (performance.now()). */
export function showJobs(jobs, time, at) {
  const newest = new Map();
  for (const job of jobs) {
    if (!(newest.get(job.job)?.epoch > job.epoch)) {
      newest.set(job.job, { ...job, time, at });
    }
  }
  const rows = [...newest.values()].sort((a, b) => isOver(a) - isOver(b) || b.since - a.since || natural(a.job, b.job));
  show(byId("jobs-section"), rows.length > 0);
  keep(byId("jobs").tBodies[0], rows.slice(0, MOST), ({ job }) => job, jobRow);
  say(byId("jobs-note"), rows.length > MOST ? `and ${rows.length - MOST} more` : "");
}

const isOver = ({ ended }) => ended !== null && ended !== undefined;

function jobRow() {
  const name = foreign();
  const epoch = h("span", { class: "muted" });
  const [state, showState] = badge();
  const ranks = h("td");
  const long = h("td");
  const element = h("tr", {}, h("th", { scope: "row" }, name, epoch), h("td", {}, state), ranks, long);

  function update(job) {
    say(name, job.job);
    say(epoch, job.epoch > 1 ? ` epoch ${job.epoch}` : "");
    showState(job.state);
    const states = Object.entries(job.ranks).flatMap(([each, number]) => Array(number).fill(each));
    say(ranks, job.state === "ended" ? many(states.length, "rank") : tally(states, ORDER));
    if (isOver(job)) {
      stops(long);
      say(long, `${age(job.ended - job.since)}, until ${clock(job.ended)}`);
    } else {
      counts(long, job.time - job.since, job.at, (seconds) => `for ${age(seconds)}`);
    }
  }
  return [element, update];
}
