// One rank, in a dialog: its stack, its operations and its CPU use, asked of its agent while the dialog is open.

import { byId, foreign, h, keep, say, set, show } from "./dom.js";
import { age, many } from "./format.js";

const EVERY_MS = 2000;
const ANSWER_MS = 10000;
const OWN_THREADS = ["rankmesh-", "asyncio_"];

let request = null;
let opened = null;

/** Prepares the dialog; `asked(path, options)` sends a request to the gateway. */
export function initRank(asked) {
  request = asked;
  byId("rank-close").addEventListener("click", () => byId("rank").close());
  byId("rank").addEventListener("close", () => {
    clearTimeout(opened?.timer);
    opened?.cut?.abort();
    opened = null;
  });
}

/** Opens the dialog for a rank of an overview. */
export function openRank({ job, member }) {
  opened = { job, rank: member.rank, timer: 0, cut: null, before: null };
  say(byId("rank-title"), `Rank ${member.rank} of ${job}`);
  say(byId("rank-about"), `${member.host}, pid ${member.pid}`);
  say(byId("rank-status"), "asking its agent");
  show(byId("rank-details"), false);
  byId("rank").showModal();
  refresh(opened);
}

async function refresh(place) {
  const cut = new AbortController();
  place.cut = cut;
  const limit = setTimeout(() => cut.abort(), ANSWER_MS);
  try {
    const path = `v1/ranks/${place.rank}/snapshot?job=${encodeURIComponent(place.job)}`;
    const answer = await request(path, { signal: cut.signal });
    const found = await answer.json();
    if (place === opened) {
      showRank(found, place);
    }
  } catch (error) {
    if (place === opened) {
      say(byId("rank-status"), `the gateway does not answer: ${error.message}`);
    }
  } finally {
    clearTimeout(limit);
  }
  if (place === opened) {
    place.timer = setTimeout(refresh, EVERY_MS, place);
  }
}

function showRank(found, place) {
  const { snapshot } = found;
  say(byId("rank-about"), `${found.host}, pid ${found.pid}, epoch ${found.epoch}, ${found.state}`);
  if (snapshot === null) {
    const states = { T: "; its process is stopped", t: "; a debugger has stopped its process", "-": "; its process has ended" };
    say(byId("rank-status"), `it does not answer: ${found.error}${states[found.process] ?? ""}`);
    return; // what was known last stays
  }
  const attached = "its process is attached to this agent: stack and CPU time are the agent's";
  say(byId("rank-status"), snapshot.attached ? attached : found.place ? `at ${found.place}` : "in no line of yours");
  say(byId("rank-cpu"), cpuUse(snapshot, place));
  showThreads(snapshot.stacks);
  showOperations(snapshot);
  show(byId("rank-details"), true);
}

/** CPU use since the answer before, at first since the process began. */
function cpuUse({ clock, cpu_seconds: used }, place) {
  const { before } = place;
  place.before = { clock, used };
  if (!clock) {
    return "not known";
  }
  const total = `${age(used)} of CPU time in ${age(clock)}`;
  const span = before ? clock - before.clock : 0;
  return span > 0.1 ? `${Math.round((100 * (used - before.used)) / span)} % of a core in the last ${age(span)}; ${total}` : total;
}

function showThreads(threads) {
  const yours = threads.filter(isYours);
  const others = threads.filter((each) => !isYours(each));
  keep(byId("rank-threads"), yours, (each) => each.ident, thread);
  keep(byId("rank-others"), others, (each) => each.ident, thread);
  show(byId("rank-others-box"), others.length > 0);
  say(byId("rank-others-count"), `${many(others.length, "thread")} without a line of yours`);
}

const isYours = ({ name, frames }) =>
  frames.some(({ origin }) => origin === "user") && !OWN_THREADS.some((prefix) => name.startsWith(prefix));

function thread() {
  const name = foreign();
  const list = h("ol", { class: "frames" });
  const element = h("div", {}, h("h4", {}, name), list);
  function update(each) {
    say(name, `${each.name} (id ${each.native_id}${each.daemon ? ", daemon" : ""})`);
    keep(list, folded(each.frames), ({ key }) => key, (part) => part.build());
  }
  return [element, update];
}

/** The frames from the outermost inwards; each run of frames that are not the user's is one item. */
function folded(frames) {
  const parts = [];
  for (const frame of frames) {
    const last = parts.at(-1);
    if (frame.origin !== "user" && last?.origin === frame.origin) {
      last.frames.push(frame);
    } else {
      const build = frame.origin === "user" ? userFrame : fold;
      parts.push({ key: `${parts.length} ${frame.origin}`, origin: frame.origin, frames: [frame], build });
    }
  }
  return parts;
}

function userFrame() {
  const where = foreign();
  const code = h("code");
  function update({ frames: [frame] }) {
    say(where, `${frame.file}:${frame.line} in ${frame.function}`);
    say(code, frame.code);
    show(code, frame.code !== "");
  }
  return [h("li", {}, where, code), update];
}

function fold() {
  const summary = h("summary", { class: "muted" });
  const list = h("ol", { class: "frames" });
  function update({ origin, frames }) {
    const who = origin === "rankmesh" ? "RankMesh" : "library";
    const ends = frames.length > 1 ? `${short(frames[0])} … ${short(frames.at(-1))}, ${frames.length} frames` : short(frames[0]);
    say(summary, `${who}: ${ends}`);
    keep(list, frames.map((frame, index) => ({ index, frames: [frame] })), ({ index }) => index, userFrame);
  }
  return [h("li", {}, h("details", {}, summary, list)), update];
}

const short = (frame) => `${frame.function} (${frame.file.split("/").pop()}:${frame.line})`;

function showOperations({ groups, calls, ended, store_waits: waits }) {
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
  const group = h("td");
  const when = h("td", { class: "number" });
  const element = h("tr", {}, h("th", { scope: "row" }, h("code", {}, text), error), group, when);
  function update(row) {
    say(text, row.text);
    say(error, row.error);
    say(group, row.group);
    say(when, row.when);
    set(element, "data-tone", row.tone);
  }
  return [element, update];
}
