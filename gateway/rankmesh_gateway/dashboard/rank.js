// One rank, in a dialog: what the overview has of it, and its stack and operations, asked of its agent while it is open.

import { byId, say, show } from "./dom.js";
import { bytes, percent, ranks as rankList } from "./format.js";
import { showOperations } from "./operations.js";
import { showThreads } from "./stacks.js";

const EVERY_MS = 2000;
const ANSWER_MS = 10000;

let request = null;
let opened = null;
let latest = { ranks: [], problems: [] };

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
export function openRank({ job, epoch, member, state }) {
  opened = { job, epoch, rank: member.rank, timer: 0, cut: null };
  say(byId("rank-title"), `Rank ${member.rank} of ${job}`);
  say(byId("rank-status"), state === "failed" ? "" : "asking its agent");
  show(byId("rank-details"), false);
  byId("rank").showModal();
  showOpened(latest);
  if (state !== "failed") {
    refresh(opened);
  }
}

/** Shows what an overview has of the rank of the dialog: its problem, and its use of the host. */
export function showOpened({ ranks, problems = [] }) {
  latest = { ranks, problems };
  const isIt = ({ job, epoch, member }) => job === opened.job && epoch === opened.epoch && member.rank === opened.rank;
  const found = opened && ranks.find(isIt);
  if (!found) {
    return;
  }
  const { member, state, usage, reason, failed_ranks: causes = [] } = found;
  const address = member.http.replace(/^https?:\/\//, "");
  say(byId("rank-about"), `${member.host}, pid ${member.pid}, epoch ${found.epoch}, ${state}, agent ${address}`);
  const problem = problems.find((each) => each.job === opened.job && each.ranks.includes(opened.rank));
  const because = causes.length ? `because of ${causes.length > 1 ? "ranks" : "rank"} ${rankList(causes)}: ${reason}` : reason;
  say(byId("rank-reason"), problem?.text ?? because);
  say(byId("rank-remedy"), problem ? `what to do: ${problem.remedy}` : "");
  const wait = usage?.core_wait >= 0.005 ? `; its main thread waits for a core ${percent(usage.core_wait)} of the time` : "";
  const use = usage && `${percent(usage.cpu)} of a core in the last 10 s, ${bytes(usage.memory)} of memory${wait}`;
  say(byId("rank-cpu"), use ?? "not known");
  show(byId("rank-use"), state !== "failed");
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
      showRank(found);
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

function showRank(found) {
  const { snapshot } = found;
  if (snapshot === null) {
    const states = { T: "; its process is stopped", t: "; a debugger has stopped its process", "-": "; its process has ended" };
    say(byId("rank-status"), `it does not answer: ${found.error}${states[found.process] ?? ""}`);
    return; // what was known last stays
  }
  const attached = "its process is attached to this agent: the stack is the agent's";
  say(byId("rank-status"), snapshot.attached ? attached : found.place ? `at ${found.place}` : "in no line of yours");
  showThreads(snapshot.stacks);
  showOperations(snapshot);
  show(byId("rank-details"), true);
}
