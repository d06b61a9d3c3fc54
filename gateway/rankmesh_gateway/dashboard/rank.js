// One rank, in a dialog: its stack, its operations and its CPU use, asked of its agent while the dialog is open.

import { byId, say, show } from "./dom.js";
import { age } from "./format.js";
import { showOperations } from "./operations.js";
import { showThreads } from "./stacks.js";

const EVERY_MS = 2000;
const ANSWER_MS = 10000;

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
      say(byId("rank-status"), error.status ? error.message : `the gateway does not answer: ${error.message}`);
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
