// Standalone agents and their leases.

import { counts } from "./ages.js";
import { byId, foreign, h, keep, say, show } from "./dom.js";
import { age, natural } from "./format.js";
import { badge } from "./marks.js";

/** Shows the agents of an overview of time `at` (performance.now()). */
export function showAgents(agents, at) {
  const rows = agents.map((entry) => ({ ...entry, at }));
  rows.sort((a, b) => natural(a.agent.name, b.agent.name) || natural(a.agent.id, b.agent.id));
  show(byId("agents"), rows.length > 0);
  show(byId("no-agents"), rows.length === 0);
  keep(byId("agents").tBodies[0], rows, (entry) => entry.agent.id, agentRow);
}

function agentRow() {
  const name = h("bdi", { class: "name" });
  const place = h("span", { class: "muted small" });
  const [state, showState] = badge();
  const leases = h("div");
  const beat = h("td", { class: "number" });
  const title = h("th", { scope: "row" }, name, h("br"), place);
  const element = h("tr", {}, title, h("td", {}, state, leases), beat);

  function update({ agent, state, heartbeat_age: silence, at }) {
    say(name, agent.name);
    say(place, `${agent.host}, ${(agent.urls[0] ?? "").replace(/^https?:\/\//, "")}`);
    showState(state);
    element.dataset.state = state;
    keep(leases, agent.leases, (each) => each.id, leaseLine);
    counts(beat, silence, at, (seconds) => `${age(seconds)} ago`);
  }
  return [element, update];
}

function leaseLine() {
  const job = foreign();
  const holder = h("span", { class: "muted small" });
  const part = h("span");
  function update(lease) {
    say(job, lease.job);
    say(part, lease.rank < 0 ? `, a rank of ${lease.world_size}` : `, rank ${lease.rank} of ${lease.world_size}`);
    say(holder, lease.holder);
  }
  return [h("p", {}, job, part, h("br"), holder), update];
}
