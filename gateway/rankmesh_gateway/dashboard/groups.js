// Groups: medium, rates, and the state of each member.

import { counts } from "./ages.js";
import { byId, foreign, h, keep, say, set, show } from "./dom.js";
import { age, bytes, count, many, natural, percent } from "./format.js";
import { mark } from "./marks.js";

const MOST = 200;
const MOST_MEMBERS = 32;
const COLUMNS = 4;

/**
 * Shows the groups, as they were at `at` (performance.now()).
 *
 * `told` has the jobs with a failure among the problems; `stateOf(job, epoch, rank)` returns a member's state.
 */
export function showGroups(groups, told, stateOf, at) {
  const sorted = [...groups].sort(inOrder);
  const rows = sorted.slice(0, MOST).map((group) => ({ ...group, isTold: told.has(group.job), stateOf, at }));
  const table = byId("groups");
  show(table, rows.length > 0);
  keep(table, rows, (group) => JSON.stringify([group.job, group.epoch, group.id]), body);
  const more = sorted.length - rows.length;
  say(byId("groups-note"), more ? `and ${many(more, "group")} more` : rows.length ? "" : "No group yet.");
}

/** Failed groups first, then by job, its world before the others. */
function inOrder(a, b) {
  const failed = (b.failure !== "") - (a.failure !== "");
  const world = (b.name === "world") - (a.name === "world");
  return failed || natural(a.job, b.job) || a.epoch - b.epoch || world || natural(a.name, b.name) || natural(a.id, b.id);
}

function body() {
  const name = h("bdi", { class: "name" });
  const where = foreign();
  const medium = h("td", { class: "wide" });
  const carried = h("span", { class: "narrow" });
  const operations = h("td", { class: "number" });
  const size = h("td", { class: "number" });
  const failure = h("p", { class: "reason" });
  const members = h("ul", { class: "members" });
  const reported = h("p", { class: "muted small" });
  const title = h("th", { scope: "row" }, name, " ", h("span", { class: "muted small" }, where, carried));
  const below = h("td", { colspan: COLUMNS }, failure, members, reported);
  const element = h("tbody", {}, h("tr", {}, title, medium, operations, size), h("tr", { class: "below" }, below));

  function update(group) {
    say(name, group.name);
    say(where, group.epoch > 1 ? `${group.job}, epoch ${group.epoch}` : group.job);
    say(medium, group.medium);
    say(carried, `, ${group.medium}`);
    say(operations, `${count(group.operations_rate)}/s`);
    say(size, `${bytes(group.bytes_rate)}/s`);
    say(failure, group.failure && !group.isTold ? `failed: ${group.failure}` : "");
    set(element, "data-state", group.failure ? "failed" : null);
    members.setAttribute("aria-label", `Members of ${group.name}`);
    keep(members, membersOf(group), (member) => member.rank, chip);
    const ages = Object.values(group.ages ?? {});
    const more = group.ranks.length - MOST_MEMBERS;
    const others = more > 0 ? `and ${many(more, "rank")} more; ` : "";
    show(reported, ages.length > 0 || more > 0);
    counts(reported, Math.max(0, ...ages), group.at, (seconds) =>
      `${others}operations begun and the share of the time in them, as of ${age(seconds)} ago`);
  }
  return [element, update];
}

const isOdd = ({ state }) => state !== "alive" && state !== undefined;

/** The members of a group; of a large one, those in trouble, and those that have begun the fewest operations. */
function membersOf(group) {
  const { job, epoch, ranks, seqs, busy = {} } = group;
  const found = ranks.map((rank) => ({ rank, seq: seqs[rank], busy: busy[rank], state: group.stateOf(job, epoch, rank) }));
  const first = [...found].sort((a, b) => isOdd(b) - isOdd(a) || (a.seq ?? 0) - (b.seq ?? 0) || (a.busy ?? 0) - (b.busy ?? 0));
  const shown = new Set(first.slice(0, MOST_MEMBERS));
  return found.filter((member) => shown.has(member));
}

function chip({ rank }) {
  const number = h("b", {}, String(rank));
  const seq = h("span");
  const share = h("span", { title: "Share of its time in the group's operations" });
  const how = h("span", { class: "unseen" });
  const element = h("li", {}, h("span", { class: "unseen" }, "rank "), number, seq, share, how);
  let shown = null;

  function update(member) {
    say(seq, member.seq === undefined ? "–" : `#${member.seq}`);
    say(share, member.busy === undefined ? "" : percent(member.busy));
    const odd = isOdd(member) ? member.state : null;
    if (odd !== shown) {
      element.querySelector(".mark")?.remove();
      if (odd) {
        element.prepend(mark(odd));
      }
      shown = odd;
    }
    set(element, "data-state", odd);
    say(how, odd ? `, ${odd}` : "");
  }
  return [element, update];
}
