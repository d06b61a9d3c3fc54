// Recent failures: shown at the top, and announced once to screen readers.

import { counts } from "./ages.js";
import { byId, foreign, h, keep, say, show } from "./dom.js";
import { age, many, ranks as rankList } from "./format.js";
import { mark } from "./marks.js";

const LATELY_S = 600;
const MOST = 8;
const HELD_UP_S = 10; // of overviews without `held_up`, the gateway's own answer

let known = null;

/** Shows the failures and suspects of an overview of time `at` (performance.now()); returns the number of failures. */
export function showAttention(overview, at) {
  const found = [...failedRanks(overview), ...failedAgents(overview), ...failedGroups(overview), ...heldUp(overview)];
  const items = found.slice(0, MOST).map((each) => ({ ...each, at }));
  if (found.length > MOST) {
    items.push({ key: "more", state: "failed", text: `and ${found.length - MOST} more, see below`, at });
  }
  show(byId("attention"), items.length > 0);
  byId("attention").dataset.tone = found.some((each) => each.state === "failed") ? "bad" : "warn";
  keep(byId("attention-list"), items, (each) => each.key, line);
  const failed = found.filter((each) => each.state === "failed");
  announce(failed);
  return failed.reduce((sum, { victims = [] }) => sum + 1 + victims.length, 0);
}

/** Suspect and failed ranks; below the first failure of a world, the ranks that failed because others had. */
function failedRanks({ ranks }) {
  const wrong = ranks.filter(({ state, heartbeat_age: age }) => state === "suspect" || (state === "failed" && age < LATELY_S));
  wrong.sort((a, b) => isVictim(a) - isVictim(b) || b.heartbeat_age - a.heartbeat_age);
  const causes = new Map();
  const items = [];
  for (const rank of wrong) {
    const world = JSON.stringify([rank.job, rank.epoch]);
    if (isVictim(rank) && causes.has(world)) {
      causes.get(world).victims.push(rank);
      continue;
    }
    const item = rankItem(rank);
    items.push(item);
    if (rank.state === "failed" && !causes.has(world)) {
      causes.set(world, item);
    }
  }
  return items;
}

/** Whether a rank reported that others had failed when it ended. */
const isVictim = ({ state, failed_ranks: blamed = [] }) => state === "failed" && blamed.length > 0;

function rankItem({ job, epoch, state, heartbeat_age: silence, reason, member }) {
  const what = state === "failed" ? "failed" : "is suspect";
  return {
    key: JSON.stringify(["rank", job, epoch, member.rank, member.instance, state]),
    state,
    text: `Rank ${member.rank} of ${job} ${what} (${member.host}, pid ${member.pid})${reason ? `: ${reason}` : ""}`,
    silence,
    victims: [],
  };
}

function failedAgents({ agents }) {
  const wrong = agents.filter(({ state, heartbeat_age: age }) => state === "suspect" || (state === "failed" && age < LATELY_S));
  return wrong.map(({ state, heartbeat_age: silence, agent }) => ({
    key: JSON.stringify(["agent", agent.id, state]),
    state,
    text: `Agent ${agent.name} ${state === "failed" ? "failed" : "is suspect"} (${agent.host}, pid ${agent.pid})`,
    silence,
  }));
}

/** Failed groups of jobs without a failed rank. */
function failedGroups({ groups, ranks }) {
  const failedJobs = new Set(ranks.filter(({ state }) => state === "failed").map(({ job, epoch }) => JSON.stringify([job, epoch])));
  const wrong = groups.filter(({ failure, job, epoch }) => failure && !failedJobs.has(JSON.stringify([job, epoch])));
  return wrong.map(({ job, epoch, id, name, failure }) => ({
    key: JSON.stringify(["group", job, epoch, id]),
    state: "failed",
    text: `Group ${name} of ${job} failed: ${failure}`,
  }));
}

function heldUp({ inflight }) {
  const wrong = inflight.filter(({ age, missing, held_up }) => held_up ?? (age >= HELD_UP_S && missing.length > 0));
  return wrong.map(({ job, epoch, group, name, op, seq, missing }) => ({
    key: JSON.stringify(["op", job, epoch, group, seq]),
    state: "suspect",
    text: `${op} #${seq} in ${name} of ${job} waits for ${many(missing.length, "rank")}: ${missing.slice(0, 16).join(", ")}`,
  }));
}

function line({ state }) {
  const text = foreign();
  const silence = h("span", { class: "muted" });
  const summary = h("summary", { class: "muted small" });
  const list = h("ul", { class: "small" });
  const after = h("details", {}, summary, list);
  function update(each) {
    say(text, each.text);
    if (each.silence !== undefined) {
      counts(silence, each.silence, each.at, (seconds) => ` last heard ${age(seconds)} ago`);
    }
    const victims = each.victims ?? [];
    show(after, victims.length > 0);
    const them = rankList(victims.map(({ member }) => member.rank));
    say(summary, `${many(victims.length, "rank")} failed because of it: ${them}`);
    keep(list, victims, ({ member }) => `${member.rank} ${member.instance}`, victimLine);
  }
  return [h("li", { "data-state": state }, mark(state), h("div", {}, text, silence, after)), update];
}

function victimLine() {
  const text = foreign();
  return [h("li", {}, text), ({ member, reason }) => say(text, `rank ${member.rank}: ${reason}`)];
}

/** Announces new failures; those before the page was opened are only shown. */
function announce(failures) {
  const fresh = known === null ? [] : failures.filter((each) => !known.has(each.key));
  known = new Set(failures.map((each) => each.key));
  if (fresh.length) {
    const first = fresh.slice(0, 3).map((each) => each.text).join(". ");
    tell(fresh.length > 3 ? `${first}. And ${fresh.length - 3} more.` : first);
  }
}

/** Announces a text to screen readers, after those before it: a failure and a finding often come at once. */
export function tell(text) {
  const announcer = byId("announcer");
  announcer.append(h("p", {}, text));
  while (announcer.childElementCount > MOST) {
    announcer.firstElementChild.remove();
  }
}
