// A line over the last five minutes, drawn as SVG, with the same in words.

import { h, say, set, svg } from "./dom.js";

const SPANS_S = [60, 120, 300];
const LONGEST_S = SPANS_S.at(-1);
const GAP_S = 4;
const WIDTH = 300;
const HEIGHT = 64;

/**
 * Fills a figure with a chart of numbers that come about once a second.
 *
 * `words(value)` shows a number. Returns `add(value, at)`, where `at` is in seconds and only goes up,
 * and `precede(earlier)`, which adds points `{value, at}` before those there are.
 */
export function chart(figure, words) {
  const title = figure.querySelector("figcaption").textContent;
  const now = h("span", { class: "figure" }, "–");
  const top = h("span", { class: "top-value muted", "aria-hidden": "true" });
  const area = svg("path", { class: "area" });
  const line = svg("path", { class: "line" });
  const dot = h("span", { class: "dot", hidden: true });
  const drawing = svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `${title}: no data yet` },
    svg("path", { class: "grid", d: `M0 .5H${WIDTH}M0 ${HEIGHT / 2}H${WIDTH}M0 ${HEIGHT - 0.5}H${WIDTH}` }),
    area,
    line,
  );
  const start = h("span");
  figure.append(
    now,
    h("div", { class: "plot" }, drawing, dot, top),
    h("div", { class: "axis muted", "aria-hidden": "true" }, start, h("span", {}, "now")),
  );
  let points = [];

  function precede(earlier) {
    const first = points[0]?.at ?? Infinity;
    points = [...earlier.filter((point) => point.at < first), ...points];
  }

  function add(value, at) {
    points = [...points.filter((point) => at - point.at <= LONGEST_S && point.at < at), { value, at }];
    const values = points.map((point) => point.value);
    const limit = roundUp(Math.max(...values));
    const span = SPANS_S.find((each) => at - points[0].at <= each);
    const x = (point) => WIDTH * (1 - (at - point.at) / span);
    const y = (point) => HEIGHT - 1 - ((HEIGHT - 2) * point.value) / limit;
    const runs = unbroken(points).map((run) => run.map((point) => `${x(point).toFixed(1)} ${y(point).toFixed(1)}`));
    set(line, "d", runs.map((run) => `M${run.join("L")}`).join(""));
    const closed = unbroken(points).map((run, i) => {
      const [left, right] = [x(run[0]).toFixed(1), x(run.at(-1)).toFixed(1)];
      return `M${left} ${HEIGHT}L${runs[i].join("L")}L${right} ${HEIGHT}Z`;
    });
    set(area, "d", closed.join(""));
    dot.hidden = false;
    dot.style.top = `${(100 * y({ value })) / HEIGHT}%`;
    say(now, `${words(value)}/s`);
    say(top, words(limit));
    say(start, `${span / 60} min ago`);
    const mean = values.reduce((sum, each) => sum + each, 0) / values.length;
    const seconds = Math.round(at - points[0].at);
    set(
      drawing,
      "aria-label",
      `${title}, last ${seconds} s: now ${words(value)}, mean ${words(mean)}, ` +
        `least ${words(Math.min(...values))}, most ${words(Math.max(...values))}`,
    );
  }
  return { add, precede };
}

/** The next of 1, 2, 5, 10, 20, …, so that the scale stays where it is for a while. */
export function roundUp(value) {
  const unit = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 5, 10].map((step) => step * unit).find((step) => step >= value);
}

/** The points between which nothing is missing. */
function unbroken(points) {
  const runs = [];
  for (const point of points) {
    const run = runs.at(-1);
    if (run && point.at - run.at(-1).at <= GAP_S) {
      run.push(point);
    } else {
      runs.push([point]);
    }
  }
  return runs;
}
