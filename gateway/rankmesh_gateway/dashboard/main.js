// The page: asks for the token if the gateway needs one, follows its events and shows them.

import { showAgents } from "./agents.js";
import { counts, stops } from "./ages.js";
import { chart } from "./chart.js";
import { byId, say, show } from "./dom.js";
import { age, bytes, clock, count, many, tally } from "./format.js";
import { showGroups } from "./groups.js";
import { initSearch, showRanks } from "./hosts.js";
import { showInflight } from "./inflight.js";
import { showJobs } from "./jobs.js";
import { addEvent, addNote, beginLog } from "./log.js";
import { EVENTS, ORDER } from "./marks.js";
import { judge, showProblems, tell } from "./problems.js";
import { initRank, showOpened } from "./rank.js";
import { showStore } from "./store.js";
import { ask, Feed } from "./stream.js";
import { initTimeline } from "./timeline.js";

const REFRESH_MS = 50;
const ENDED = "the gateway has ended";
const CHANGES = /^(world-|rank-|agent-|group-failed)/;

const operationsChart = chart(byId("operations-chart"), count);
const bytesChart = chart(byId("bytes-chart"), bytes);
let feed = null;
let gateway = "";
let refresh = 0;
let lost = false;
let over = false; // whether the gateway has ended, and its jobs before it
let live = true; // whether a job is
let problem = "";

/** Exchanges a one-time code for a session, whose cookie no script can read. */
async function exchange(code) {
  await ask("v1/dashboard/sessions", { method: "POST", bearer: code });
  history.replaceState({ session: true }, "", location.pathname);
}

/** Exchanges the code of a link, which is not sent as a part of its URL. */
async function redeem() {
  const code = new URLSearchParams(location.hash.slice(1)).get("code");
  if (code) {
    history.replaceState(null, "", location.pathname);
    try {
      await exchange(code);
    } catch (error) {
      problem = error.status === 401 ? "This link has been used or has expired: rankmesh dashboard prints another." : error.message;
    }
  }
}

function connect() {
  feed?.stop();
  feed = new Feed("v1/events?overview=true", [...Object.keys(EVENTS), "overview", "gateway-ended"], onEvent, onState);
}

function onEvent({ event, data }) {
  let body;
  try {
    body = JSON.parse(data);
  } catch {
    return;
  }
  if (event === "overview") {
    showOverview(body);
  } else if (event === "gateway-ended") {
    feed.endReason = ENDED;
  } else {
    addEvent(event, body);
    if (CHANGES.test(event) && !refresh) {
      refresh = setTimeout(look, REFRESH_MS);
    }
  }
}

/** Fetches an overview at once after an event, instead of with the stream's next one. */
async function look() {
  refresh = 0;
  const asked = feed;
  try {
    const answer = await ask("v1/overview", { signal: asked.cut.signal });
    const body = await answer.json();
    if (asked === feed && !asked.cut.signal.aborted) {
      showOverview(body);
    }
  } catch {
    // the stream reports the error, and brings the next overview
  }
}

/** Fetches the rates of the time before the page was opened, or before the connection was lost. */
async function lookBack() {
  try {
    const answer = await ask("v1/rates", { signal: feed.cut.signal });
    const samples = await answer.json();
    const now = performance.now() / 1000;
    operationsChart.precede(samples.map(({ age, operations }) => ({ value: operations, at: now - age })));
    bytesChart.precede(samples.map(({ age, bytes: size }) => ({ value: size, at: now - age })));
  } catch {
    // the charts begin now
  }
}

let shownTime = 0;

function showOverview(body) {
  const at = performance.now();
  const overview = { ranks: [], agents: [], groups: [], inflight: [], store: [], jobs: [], rates: {}, gateway: {}, ...body };
  if (gateway && overview.gateway.id !== gateway) {
    shownTime = 0;
    addNote("The gateway was started anew: its data from here on are the ranks' reports since then.");
  }
  if (overview.time < shownTime) {
    return; // requested before the one that is shown
  }
  shownTime = overview.time;
  if (gateway === "") {
    lookBack();
  }
  gateway = overview.gateway.id;
  judge(overview);
  live = overview.jobs.some(({ ended }) => ended === null || ended === undefined);
  const states = new Map(overview.ranks.map((each) => [JSON.stringify([each.job, each.epoch, each.member.rank]), each.state]));
  const failures = showProblems(overview, at);
  showOpened(overview);
  showCounts(overview);
  operationsChart.add(overview.rates.operations ?? 0, at / 1000);
  bytesChart.add(overview.rates.bytes ?? 0, at / 1000);
  showJobs(overview.jobs, overview.time, at);
  showRanks(overview.ranks, at);
  showInflight(overview.inflight, at);
  const told = new Set(overview.problems?.filter(({ kind }) => kind === "failed").map(({ job }) => job));
  showGroups(overview.groups, told, (job, epoch, rank) => states.get(JSON.stringify([job, epoch, rank])), at);
  showAgents(overview.agents, at);
  showStore(overview.store);
  counts(byId("gateway-about"), overview.gateway.uptime ?? 0, at, (seconds) => `version ${overview.gateway.version}, up ${age(seconds)}`);
  const worst = ["stuck", "slow"].find((state) => overview.jobs.some((job) => job.state === state));
  document.title = failures ? `(${failures} failed) RankMesh` : worst ? `(${worst}) RankMesh` : "RankMesh";
  show(byId("cluster"), true);
}

function showCounts({ ranks, groups, agents }) {
  const here = ranks.filter((each) => each.state !== "left");
  say(byId("count-ranks"), String(here.length));
  say(byId("count-ranks-note"), tally(here.map((each) => each.state), ORDER));
  const jobs = new Set(here.map((each) => each.job)).size;
  say(byId("count-groups"), String(groups.length));
  say(byId("count-groups-note"), jobs ? `in ${many(jobs, "job")}` : "");
  say(byId("count-agents"), String(agents.length));
  say(byId("count-agents-note"), tally(agents.map((each) => each.state), ORDER));
}

function onState(state) {
  const pill = byId("connection");
  show(byId("retry"), state.kind === "lost");
  show(byId("forget"), history.state?.session === true);
  over = state.kind === "lost" && (over || (state.reason === ENDED && !live));
  document.body.dataset.connection = over ? "ended" : state.kind;
  stops(pill);
  if (state.kind === "live") {
    pill.dataset.tone = "good";
    say(pill, "live");
    show(byId("ask"), false);
    if (lost) {
      tell("The connection to the gateway is back.");
    }
    lost = false;
  } else if (state.kind === "lost") {
    pill.dataset.tone = over ? "quiet" : "bad";
    const since = clock((Date.now() - (performance.now() - state.since)) / 1000);
    counts(pill, 0, performance.now(), () => {
      const left = Math.ceil((state.retryAt - performance.now()) / 1000);
      const ago = age((performance.now() - state.since) / 1000);
      if (over) {
        return `the gateway has ended, as its jobs are over; connection lost since ${since}`;
      }
      return `connection lost since ${since} (${ago}): ${state.reason}; ${left > 0 ? `next try in ${left} s` : "trying"}`;
    });
    if (!lost) {
      tell(`The connection to the gateway is lost: ${state.reason}. The data shown are from ${since}.`);
    }
    lost = true;
  } else if (state.kind === "refused") {
    pill.dataset.tone = state.error.status === 401 ? "warn" : "bad";
    say(pill, state.error.status === 401 ? "token wanted" : "refused");
    refused(state.error);
  } else {
    pill.dataset.tone = "quiet";
    say(pill, "connecting");
  }
}

function refused(error) {
  const ended = history.state?.session ? "The session has ended: rankmesh dashboard prints a link to another." : "";
  history.replaceState(null, "", location.pathname);
  show(byId("forget"), false);
  show(byId("cluster"), false);
  show(byId("ask"), true);
  say(byId("token-error"), (error.status === 401 ? ended : error.message) || problem);
  byId("token").focus();
}

byId("token-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const field = byId("token");
  const token = field.value.trim();
  // The characters of a header value; a token with others cannot be the gateway's.
  if (!/^[\x21-\x7e]+$/.test(token)) {
    say(byId("token-error"), "A token consists of letters, digits and signs, without spaces.");
    field.focus();
    return;
  }
  field.value = "";
  say(byId("token-error"), "");
  problem = "";
  try {
    const answer = await ask("v1/dashboard/codes", { method: "POST", bearer: token });
    await exchange((await answer.json()).code);
    connect();
  } catch (error) {
    say(byId("token-error"), error.status === 401 ? "This is not the gateway's token." : error.message);
    field.focus();
  }
});
byId("retry").addEventListener("click", () => feed.hurry());
byId("forget").addEventListener("click", async () => {
  await ask("v1/dashboard/sessions", { method: "DELETE" }).catch(() => {}); // its end is the gateway's, too
  history.replaceState(null, "", location.pathname);
  location.reload();
});
addEventListener("online", () => feed.hurry());
addEventListener("pagehide", () => feed.stop());
addEventListener("pageshow", (event) => {
  if (event.persisted) {
    connect();
  }
});

say(byId("gateway-address"), location.host);
const master = `MASTER_ADDR=${location.hostname} MASTER_PORT=${location.port || 80}`;
say(byId("start-line"), `${master} WORLD_SIZE=2 RANK=0 python train.py\n${master} WORLD_SIZE=2 RANK=1 python train.py`);
beginLog();
initSearch();
initRank(ask);
initTimeline(ask);
await redeem();
connect();
