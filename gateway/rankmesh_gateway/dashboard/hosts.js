// The ranks on their hosts.

import { counts } from "./ages.js";
import { byId, foreign, h, keep, say, set, show } from "./dom.js";
import { age, many, natural, percent, tally } from "./format.js";
import { badge, ORDER } from "./marks.js";
import { openRank } from "./rank.js";

const MOST = 300;
const COLUMNS = ["Rank", "State", "Heartbeat", "Slow", "Process", "Agent"];
const SLOW = 0.05; // see the gateway's scores.py

let latest = { ranks: [], at: 0 };

/** Shows the ranks of an overview of time `at` (performance.now()), those that the search is for. */
export function showRanks(ranks, at) {
  latest = { ranks, at };
  show(byId("no-ranks"), ranks.length === 0);
  show(byId("rank-search").parentElement, ranks.length > 1);
  const running = new Set(ranks.filter((rank) => rank.state !== "left").map(world));
  const words = byId("rank-search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const listed = ranks.filter((rank) => running.has(world(rank)) && words.every((word) => fits(rank, word)));
  const first = new Set([...listed].sort((a, b) => ORDER.indexOf(a.state) - ORDER.indexOf(b.state)).slice(0, MOST));
  const shown = ranks.filter((rank) => first.has(rank) || (!running.has(world(rank)) && !words.length));
  keep(byId("hosts"), hostsOf(shown, running, at), (host) => host.key, hostCard);
  const more = listed.length - first.size;
  const none = words.length && !listed.length ? "No rank is like that." : "";
  say(byId("hosts-note"), more ? `and ${many(more, "rank")} more; those that are not alive come first` : none);
}

/** Wires the search. */
export function initSearch() {
  byId("rank-search").addEventListener("input", () => showRanks(latest.ranks, latest.at));
}

/** Whether a word is a rank's number, or a part of its job's name, its host's, or its state. */
const fits = ({ job, state, member }, word) =>
  /^\d+$/.test(word) ? member.rank === Number(word) : `${job} ${member.host} ${state}`.toLowerCase().includes(word);

/** The hosts by name, each with its jobs and their ranks; of an ended job, only the number of its ranks here. */
function hostsOf(ranks, running, at) {
  const hosts = new Map();
  for (const rank of ranks) {
    const key = JSON.stringify([rank.member.host, rank.member.host_id]);
    const host = hosts.get(key) ?? { key, name: rank.member.host, at, states: [], worlds: new Map(), over: 0 };
    hosts.set(key, host);
    if (!running.has(world(rank))) {
      host.over += 1;
      continue;
    }
    host.states.push(rank.state);
    const there = host.worlds.get(world(rank)) ?? { key: world(rank), job: rank.job, epoch: rank.epoch, at, ranks: [] };
    there.ranks.push(rank);
    host.worlds.set(there.key, there);
  }
  return [...hosts.values()].sort((a, b) => natural(a.name, b.name) || natural(a.key, b.key));
}

const world = (rank) => JSON.stringify([rank.job, rank.epoch]);

function hostCard(host) {
  const tallied = h("span", { class: "muted" });
  const caption = h("caption", { class: "unseen" }, "Ranks on ", foreign(host.name));
  const head = h("tr", {}, ...COLUMNS.map((name, i) => h("th", { scope: "col", class: column(i) }, name)));
  const table = h("table", { class: "ranks" }, caption, h("thead", {}, head));
  const box = h("div", { class: "scroll tall", role: "region", tabindex: "0" }, table);
  const note = h("p", { class: "note muted" });
  const title = h("h3", {}, foreign(host.name));
  const element = h("article", { class: "card host" }, h("div", { class: "title" }, title, tallied), box, note);
  box.setAttribute("aria-label", `Ranks on ${host.name}`);

  function update(host) {
    say(tallied, tally(host.states, ORDER));
    keep(table, host.worlds.values(), (there) => there.key, worldBody);
    show(box, host.worlds.size > 0);
    say(note, host.over ? `${many(host.over, "rank")} of jobs that are over` : "");
  }
  return [element, update];
}

function worldBody({ job, epoch }) {
  const title = h("th", { scope: "rowgroup", colspan: COLUMNS.length }, foreign(job));
  if (epoch > 1) {
    title.append(h("span", { class: "muted" }, ` epoch ${epoch}`));
  }
  const element = h("tbody", {}, h("tr", { class: "job" }, title));
  function update(there) {
    const rows = there.ranks.flatMap((rank) => {
      const key = `${rank.member.rank} ${rank.member.instance}`;
      const row = { ...rank, key, at: there.at, build: rankRow };
      return rank.reason ? [row, { ...rank, key: `${key} reason`, build: reasonRow }] : [row];
    });
    keep(element, rows, (row) => row.key, (row) => row.build());
  }
  return [element, update];
}

function rankRow() {
  const number = h("button", { type: "button", class: "rank", "aria-haspopup": "dialog" });
  const [state, showState] = badge();
  const beat = h("td", { class: column(2) });
  const slow = h("td", { class: column(3), title: "Share of the time that the others wait for this rank" });
  const process = h("td", { class: column(4) });
  const agent = h("td", { class: column(5) }, foreign());
  const element = h("tr", {}, h("th", { scope: "row", class: column(0) }, number), h("td", {}, state), beat, slow, process, agent);

  let shown = null;
  number.addEventListener("click", () => openRank(shown));
  function update(rank) {
    shown = rank;
    say(number, rank.member.rank < 0 ? "none yet" : String(rank.member.rank));
    number.disabled = rank.member.rank < 0 || rank.state === "left";
    set(number, "title", number.disabled ? null : `Stack, operations and CPU use of rank ${rank.member.rank}`);
    showState(rank.state);
    element.dataset.state = rank.state;
    counts(beat, rank.heartbeat_age, rank.at, (seconds) => `${age(seconds)} ago`);
    say(slow, rank.slow >= SLOW ? percent(rank.slow) : "");
    say(process, String(rank.member.pid));
    say(agent.firstChild, rank.member.http.replace(/^https?:\/\//, ""));
  }
  return [element, update];
}

/** The reason of a rank that left or failed, below it. */
function reasonRow() {
  const reason = h("td", { class: "reason", colspan: COLUMNS.length - 1 });
  const element = h("tr", { class: "below" }, h("td"), reason);
  function update(rank) {
    say(reason, rank.reason);
    element.dataset.state = rank.state;
  }
  return [element, update];
}

function column(index) {
  return ["number", "", "number", "number", "number wide", "wide"][index];
}
