// What the ranks spend their time on, asked of all agents while it is shown: waits for other ranks, and operations.

import { byId, foreign, h, keep, say, show } from "./dom.js";
import { bytes, count, duration, many, percent } from "./format.js";

const EVERY_MS = 4000;
const MOST_LABELS = 32;

let request = null;
let asked = 0;

/** Prepares the section; `ask(path)` sends a request to the gateway. */
export function initTimeline(ask) {
  request = ask;
  byId("timeline").addEventListener("toggle", refresh);
}

async function refresh() {
  asked += 1;
  const number = asked;
  while (number === asked && byId("timeline").open) {
    const began = performance.now();
    try {
      const answer = await request("v1/timelines");
      const found = await answer.json();
      keep(byId("timelines"), found, ({ job }) => job, timeline);
      say(byId("timeline-note"), found.length ? "" : "No rank answers.");
    } catch (error) {
      say(byId("timeline-note"), error instanceof TypeError ? "" : error.message); // of fetch: the page says it is lost
    }
    // Of a large job the answer takes the gateway and the agents some time.
    const pause = Math.max(EVERY_MS, 4 * (performance.now() - began));
    await new Promise((done) => setTimeout(done, pause));
  }
}

function timeline() {
  const job = foreign();
  const about = h("p", { class: "muted small" });
  const labels = h("ol", { class: "labels plain muted", "aria-hidden": "true" });
  const canvas = h("canvas", { role: "img" });
  const head = ["Operation", "Calls", "Mean", "Size", "Waits for"].map((name, i) =>
    h("th", { scope: "col", class: [1, 2].includes(i) ? "number" : i === 3 ? "number wide" : "" }, name));
  const caption = h("caption", { class: "unseen" }, "Operations, those that take the most time first");
  const table = h("table", {}, caption, h("thead", {}, h("tr", {}, ...head)), h("tbody"));
  const plot = h("div", { class: "waits" }, labels, canvas);
  const element = h("article", {}, h("h3", {}, job), about, plot, h("div", { class: "scroll" }, table));

  function update({ job: name, seconds, waits, operations, silent }) {
    const ranks = Object.keys(waits).sort((a, b) => a - b);
    const shares = ranks.map((rank) => waits[rank].reduce((sum, each) => sum + each, 0) / waits[rank].length);
    const silence = silent.length ? `; ${many(silent.length, "rank")} did not answer` : "";
    say(job, name);
    say(about, `A row is a rank, over ${duration(seconds)}: it is filled while the rank waits for others${silence}.`);
    canvas.setAttribute("aria-label", `Waits: ${ranks.map((rank, i) => `rank ${rank} ${percent(shares[i])}`).join(", ")}`);
    const step = Math.ceil(ranks.length / MOST_LABELS);
    const labelled = ranks.map((rank, i) => ({ rank, text: step > 1 ? rank : `${rank}: ${percent(shares[i])}` }));
    keep(labels, labelled.filter((_, i) => i % step === 0), ({ rank }) => rank, label);
    plot.style.setProperty("--rows", ranks.length);
    paint(canvas, ranks.map((rank) => waits[rank]));
    keep(table.tBodies[0], operations, (each) => JSON.stringify([each.group, each.call]), operation);
    show(table, operations.length > 0);
  }
  return [element, update];
}

const label = () => {
  const element = h("li");
  return [element, ({ text }) => say(element, text)];
};

/** Paints a pixel for each part of the time of each rank; the style sheet enlarges them. */
function paint(canvas, rows) {
  canvas.width = rows[0]?.length ?? 1;
  canvas.height = rows.length;
  const drawing = canvas.getContext("2d");
  drawing.fillStyle = getComputedStyle(document.body).getPropertyValue("--warn");
  rows.forEach((shares, y) =>
    shares.forEach((share, x) => {
      drawing.globalAlpha = share;
      drawing.fillRect(x, y, 1, 1);
    }));
}

function operation() {
  const call = foreign();
  const group = foreign();
  const cells = ["number", "number", "number wide", ""].map((kind) => h("td", { class: kind }));
  const title = h("th", { scope: "row" }, h("code", {}, call), " ", h("span", { class: "muted small" }, group));
  function update(each) {
    say(call, each.call);
    say(group, each.group);
    const late = each.slowest < 0 ? "" : `rank ${each.slowest}, ${duration(each.late)}`;
    [count(each.calls), duration(each.seconds), bytes(each.bytes), late].forEach((text, i) => say(cells[i], text));
  }
  return [h("tr", {}, title, ...cells), update];
}
