// The page: asks for the token if the gateway needs one, follows its events and shows them.

import { showAgents } from "./agents.js";
import { counts, stops } from "./ages.js";
import { showAttention, tell } from "./attention.js";
import { chart } from "./chart.js";
import { byId, say, show } from "./dom.js";
import { showFindings } from "./findings.js";
import { age, bytes, clock, count, many, tally } from "./format.js";
import { showGroups } from "./groups.js";
import { showRanks } from "./hosts.js";
import { showInflight } from "./inflight.js";
import { showJobs } from "./jobs.js";
import { addEvent, addNote, beginLog } from "./log.js";
import { ORDER } from "./marks.js";
import { initRank } from "./rank.js";
import { showStore } from "./store.js";
import { ask, Feed } from "./stream.js";

const KEY = "rankmesh-token";
const REFRESH_MS = 50;
const CHANGES = /^(world-|rank-|agent-|group-failed)/;

const operationsChart = chart(byId("operations-chart"), count);
const bytesChart = chart(byId("bytes-chart"), bytes);
let feed = null;
let gateway = "";
let refresh = 0;
let lost = false;
let problem = "";

/** Storage may be forbidden; the token then lives as long as the page. */
const memory = {
  token: "",
  get() {
    try {
      return sessionStorage.getItem(KEY) ?? this.token;
    } catch {
      return this.token;
    }
  },
  set(token) {
    this.token = token;
    try {
      if (token) {
        sessionStorage.setItem(KEY, token);
      } else {
        sessionStorage.removeItem(KEY);
      }
    } catch {
      // see above
    }
  },
};

/** Exchanges the one-time code of a link, which is not sent as a part of its URL, for the token of a session. */
async function redeem() {
  const code = new URLSearchParams(location.hash.slice(1)).get("code");
  if (code) {
    history.replaceState(null, "", location.pathname);
    try {
      const answer = await ask("v1/dashboard/sessions", code, { method: "POST" });
      memory.set((await answer.json()).token);
    } catch (error) {
      problem = error.status === 401 ? "This link has been used or has expired: rankmesh dashboard prints another." : error.message;
    }
  }
}

function connect() {
  feed?.stop();
  feed = new Feed("v1/events?overview=true", memory.get(), onEvent, onState);
  feed.run();
}

function onEvent({ id, event, data }) {
  let body;
  try {
    body = JSON.parse(data);
  } catch {
    return;
  }
  if (event === "overview") {
    showOverview(body);
  } else if (event === "gateway-ended") {
    feed.endReason = "the gateway has ended";
  } else if (id) {
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
    const answer = await ask("v1/overview", asked.token, { signal: asked.cut.signal });
    const body = await answer.json();
    if (asked === feed && !asked.stopped) {
      showOverview(body);
    }
  } catch {
    // the stream reports the error, and brings the next overview
  }
}

/** Fetches the rates of the time before the page was opened, or before the connection was lost. */
async function lookBack() {
  const asked = feed;
  try {
    const answer = await ask("v1/rates", asked.token, { signal: asked.cut.signal });
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
  const states = new Map(overview.ranks.map((each) => [JSON.stringify([each.job, each.epoch, each.member.rank]), each.state]));
  const failures = showAttention(overview, at);
  showFindings(overview);
  showCounts(overview);
  operationsChart.add(overview.rates.operations ?? 0, at / 1000);
  bytesChart.add(overview.rates.bytes ?? 0, at / 1000);
  showJobs(overview.jobs, overview.time, at);
  showRanks(overview.ranks, at);
  showInflight(overview.inflight, at);
  showGroups(overview.groups, (job, epoch, rank) => states.get(JSON.stringify([job, epoch, rank])), at);
  showAgents(overview.agents, at);
  showStore(overview.store);
  counts(byId("gateway-about"), overview.gateway.uptime ?? 0, at, (seconds) => `version ${overview.gateway.version}, up ${age(seconds)}`);
  document.title = failures ? `(${failures} failed) RankMesh` : "RankMesh";
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
  show(byId("forget"), memory.get() !== "");
  document.body.dataset.connection = state.kind;
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
    pill.dataset.tone = "bad";
    const since = clock((Date.now() - (performance.now() - state.since)) / 1000);
    counts(pill, 0, performance.now(), () => {
      const left = Math.ceil((state.retryAt - performance.now()) / 1000);
      const ago = age((performance.now() - state.since) / 1000);
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
  const had = memory.get() !== "";
  memory.set("");
  show(byId("forget"), false);
  show(byId("cluster"), false);
  show(byId("ask"), true);
  const ended = "This is not the gateway's token, or the session has ended: rankmesh dashboard prints a link to another.";
  const wrong = error.status === 401 ? (had ? ended : "") : error.message;
  say(byId("token-error"), wrong || problem);
  byId("token").focus();
}

byId("token-form").addEventListener("submit", (event) => {
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
  memory.set(token);
  connect();
});
byId("retry").addEventListener("click", () => feed.hurry());
byId("forget").addEventListener("click", () => {
  memory.set("");
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
initRank((path, options) => ask(path, memory.get(), options));
await redeem();
connect();
