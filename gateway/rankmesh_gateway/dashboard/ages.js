// Ages that count on between two reports, and when reports cease.

import { say } from "./dom.js";
import { age } from "./format.js";

const TICK_MS = 500;
const counting = new Map();

/** Shows an age that was `seconds` at time `at` (performance.now()), and counts on. */
export function counts(element, seconds, at, words = age) {
  counting.set(element, { born: at - seconds * 1000, words });
  say(element, words((performance.now() - at) / 1000 + seconds));
}

/** Stops the count of an element, which shows something else from now on. */
export function stops(element) {
  counting.delete(element);
}

function tick() {
  const now = performance.now();
  for (const [element, { born, words }] of counting) {
    if (element.isConnected) {
      say(element, words((now - born) / 1000));
    } else {
      counting.delete(element);
    }
  }
}

setInterval(tick, TICK_MS);
