// States: each has a word, a shape and a tone, so that none is distinguished by colour alone.

import { h, say, set, svg } from "./dom.js";

const STATES = {
  alive: ["full", "good"],
  stuck: ["triangle", "bad"],
  slow: ["ring", "warn"],
  joining: ["half", "busy"],
  suspect: ["triangle", "warn"],
  failed: ["cross", "bad"],
  left: ["dash", "quiet"],
  free: ["ring", "good"],
  leased: ["diamond", "busy"],
  forming: ["half", "busy"],
  running: ["full", "good"],
  failing: ["cross", "bad"],
  ended: ["dash", "quiet"],
};

/** The kinds of events, and the states whose marks they have. */
export const EVENTS = {
  "rank-joining": "joining",
  "world-complete": "alive",
  "rank-suspect": "suspect",
  "rank-alive": "alive",
  "rank-failed": "failed",
  "rank-left": "left",
  "rank-slow": "slow",
  "rank-in-time": "alive",
  "group-made": "free",
  "group-failed": "failed",
  "group-ended": "left",
  "call-held-up": "suspect",
  "call-ended": "alive",
  "job-restarted": "joining",
  "agent-registered": "free",
  "agent-leased": "leased",
  "agent-freed": "free",
  "agent-lost": "failed",
};

/** The order of states in counts. */
export const ORDER = ["failed", "stuck", "suspect", "slow", "joining", "alive", "leased", "free", "left"];

/** An event of a failure. */
export const isFailure = (event) => EVENTS[event] === "failed";

/** The tone of a state. */
export const toneOf = (state) => (STATES[state] ?? ["", "quiet"])[1];

/** A state's mark, hidden from screen readers. */
export function mark(state) {
  const [shape, tone] = STATES[state] ?? ["ring", "quiet"];
  return svg("svg", { class: "mark", "data-tone": tone, "aria-hidden": "true" }, svg("use", { href: `#mark-${shape}` }));
}

/** An event's mark. */
export const markOf = (event) => mark(EVENTS[event] ?? event);

/** A state with its word: the element, and the function that updates it. */
export function badge(state = "") {
  const word = h("span");
  const element = h("span", { class: "state" }, mark(state), word);
  let shown = state;
  function update(next) {
    say(word, next);
    set(element, "data-tone", toneOf(next));
    if (next !== shown) {
      element.firstChild.replaceWith(mark(next));
      shown = next;
    }
  }
  update(state);
  return [element, update];
}
