// The ranks on their hosts: a row each, or a cell each where there are many.

import { counts } from "./ages.js";
import { byId, foreign, h, keep, say, set, show } from "./dom.js";
import { age, bytes, many, natural, percent, ranks as rankList, tally } from "./format.js";
import { badge, mark, ORDER, toneOf } from "./marks.js";
import { SLOW } from "./problems.js";
import { openRank } from "./rank.js";

const MOST_ROWS = 32;
const MOST = 2000;
const COLUMNS = [["Rank", "number"], ["State", ""], ["Heartbeat", "number wide"], ["Slow", "number"], ["CPU", "number"], ["Memory", "number"], ["Process", "number wide"]];
const CALM = ORDER.indexOf("joining");

let latest = { ranks: [], at: 0 };

/** Shows the ranks of an overview of time `at` (performance.now()), those that the search is for. */
export function showRanks(ranks, at) {
  latest = { ranks, at };
  show(byId("no-ranks"), ranks.length === 0);
  show(byId("rank-search").parentElement, ranks.length > 1);
  const running = new Set(ranks.filter((rank) => rank.state !== "left").map(world));
  const words = byId("rank-search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const listed = ranks.filter((rank) => running.has(world(rank)) && words.every((word) => fits(rank, word)));
  const first = new Set([...listed].sort(troubleFirst).slice(0, MOST));
  const shown = ranks.filter((rank) => first.has(rank) || (!running.has(world(rank)) && !words.length));
  const inCells = listed.length > MOST_ROWS;
  byId("hosts").classList.toggle("in-cells", inCells);
  keep(byId("hosts"), hostsOf(shown, running, at, inCells), (host) => host.key, hostCard);
  const more = listed.length - first.size;
  const none = words.length && !listed.length ? "No rank is like that." : "";
  say(byId("hosts-note"), more ? `and ${many(more, "rank")} more; those in trouble come first` : none);
}

/** Wires the search. */
export function initSearch() {
  byId("rank-search").addEventListener("input", () => showRanks(latest.ranks, latest.at));
}

/** Whether a word is a rank's number, or a part of its job's name, its host's, or its state. */
const fits = ({ job, state, member }, word) =>
  /^\d+$/.test(word) ? member.rank === Number(word) : `${job} ${member.host} ${state}`.toLowerCase().includes(word);

const trouble = ({ state }) => Math.min(ORDER.indexOf(state), CALM);
const troubleFirst = (a, b) => trouble(a) - trouble(b);

/** The hosts with trouble first, then by name, each with its jobs and their ranks; of an ended job, their number. */
function hostsOf(ranks, running, at, inCells) {
  const hosts = new Map();
  for (const rank of ranks) {
    const key = JSON.stringify([rank.member.host, rank.member.host_id, inCells]);
    const host = hosts.get(key) ?? { key, name: rank.member.host, states: [], worlds: new Map(), over: 0, worst: CALM, inCells };
    hosts.set(key, host);
    if (!running.has(world(rank))) {
      host.over += 1;
      continue;
    }
    host.states.push(rank.state);
    host.worst = Math.min(host.worst, trouble(rank));
    const { job, epoch } = rank;
    const there = host.worlds.get(world(rank)) ?? { key: world(rank), job, epoch, at, ranks: [], isOnly: running.size === 1 };
    there.ranks.push(rank);
    host.worlds.set(there.key, there);
  }
  return [...hosts.values()].sort((a, b) => a.worst - b.worst || natural(a.name, b.name) || natural(a.key, b.key));
}

const world = (rank) => JSON.stringify([rank.job, rank.epoch]);

function hostCard({ name, inCells }) {
  const tallied = h("span", { class: "muted" });
  const box = h("div", { class: "scroll tall", role: "region", tabindex: "0", "aria-label": `Ranks on ${name}` });
  const inside = inCells ? box : rankTable(name);
  if (!inCells) {
    box.append(inside);
  }
  const note = h("p", { class: "note muted" });
  const title = h("div", { class: "title" }, h("h3", {}, foreign(name)), tallied);
  const element = h("article", { class: "card host" }, title, box, note);

  function update(host) {
    say(tallied, tally(host.states, ORDER));
    keep(inside, host.worlds.values(), (there) => there.key, inCells ? worldCells : worldBody);
    show(box, host.worlds.size > 0);
    say(note, host.over ? `${many(host.over, "rank")} of jobs that are over` : "");
  }
  return [element, update];
}

function rankTable(name) {
  const caption = h("caption", { class: "unseen" }, "Ranks on ", foreign(name));
  const head = h("tr", {}, ...COLUMNS.map(([title, kind]) => h("th", { scope: "col", class: kind }, title)));
  return h("table", { class: "ranks" }, caption, h("thead", {}, head));
}

const worldName = ({ job, epoch }) => [foreign(job), h("span", { class: "muted" }, epoch > 1 ? ` epoch ${epoch}` : "")];
const rankKey = ({ member }) => `${member.rank} ${member.instance}`;

function worldBody(there) {
  const title = h("th", { scope: "rowgroup", colspan: COLUMNS.length }, ...worldName(there));
  const element = h("tbody", {}, h("tr", { class: "job" }, title));
  function update({ ranks, at }) {
    const rows = ranks.flatMap((rank) => {
      const row = { ...rank, key: rankKey(rank), at, build: rankRow };
      return rank.reason ? [row, { ...rank, key: `${row.key} reason`, build: reasonRow }] : [row];
    });
    keep(element, rows, (row) => row.key, (row) => row.build());
  }
  return [element, update];
}

function worldCells(there) {
  const title = h("p", { class: "job muted small" }, ...worldName(there));
  const list = h("ul", { class: "cells plain" });
  function update({ ranks, isOnly }) {
    show(title, !isOnly);
    keep(list, [...ranks].sort(troubleFirst), rankKey, cell);
  }
  return [h("div", {}, title, list), update];
}

/** A rank's number, which opens its dialog: the element, and the function that updates it. */
function rankButton(kind) {
  const element = h("button", { type: "button", class: kind, "aria-haspopup": "dialog" });
  let shown = null;
  element.addEventListener("click", () => openRank(shown));
  function update(rank) {
    shown = rank;
    say(element, rank.member.rank < 0 ? "none yet" : String(rank.member.rank));
    element.disabled = rank.member.rank < 0 || rank.state === "left";
  }
  return [element, update];
}

function cell() {
  const [button, showNumber] = rankButton("rank cell");
  const state = h("span", { class: "unseen" });
  const element = h("li", {}, button, state);
  function update(rank) {
    showNumber(rank);
    if (state.textContent !== rank.state) {
      element.dataset.tone = toneOf(rank.state);
      button.querySelector(".mark")?.remove();
      button.prepend(...(trouble(rank) < CALM ? [mark(rank.state)] : []));
    }
    say(state, rank.state);
    const { usage, slow } = rank;
    element.style.setProperty("--share", Math.min(1, usage?.cpu ?? 0));
    const use = usage ? `, ${percent(usage.cpu)} of a core, ${bytes(usage.memory)}` : "";
    set(button, "title", `rank ${rank.member.rank}: ${rank.state}${slow >= SLOW ? ` ${percent(slow)}` : ""}${use}`);
  }
  return [element, update];
}

function rankRow() {
  const [number, showNumber] = rankButton("rank");
  const [state, showState] = badge();
  const cells = COLUMNS.slice(2).map(([, kind]) => h("td", { class: kind }));
  const [beat, slow, cpu, memory, process] = cells;
  set(slow, "title", "Share of the time that the others wait for this rank");
  const element = h("tr", {}, h("th", { scope: "row", class: "number" }, number), h("td", {}, state), ...cells);

  function update(rank) {
    const { usage } = rank;
    showNumber(rank);
    set(number, "title", number.disabled ? null : `Stack, operations and CPU use of rank ${rank.member.rank}`);
    showState(rank.state);
    element.dataset.state = rank.state;
    counts(beat, rank.heartbeat_age, rank.at, (seconds) => `${age(seconds)} ago`);
    say(slow, rank.slow >= SLOW ? percent(rank.slow) : "");
    say(cpu, usage ? percent(usage.cpu) : "");
    say(memory, usage ? bytes(usage.memory) : "");
    say(process, String(rank.member.pid));
  }
  return [element, update];
}

/** Below a rank that left or failed: the reason, or the rank that is the cause. */
function reasonRow() {
  const reason = h("td", { colspan: COLUMNS.length - 1 });
  const element = h("tr", { class: "below" }, h("td"), reason);
  function update(rank) {
    const causes = rank.failed_ranks ?? [];
    say(reason, causes.length ? `because of ${causes.length > 1 ? "ranks" : "rank"} ${rankList(causes)}` : rank.reason);
    reason.className = causes.length ? "muted small" : "reason";
    element.dataset.state = rank.state;
  }
  return [element, update];
}
