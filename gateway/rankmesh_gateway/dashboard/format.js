// Numbers, ages and ranks in words.

const SIZES = [" B", " kB", " MB", " GB", " TB", " PB"];
const COUNTS = ["", " k", " M", " G", " T"];

/** Seconds: `0.4 s`, `42 s`, `3 min 5 s`, `2 h 10 min`, `4 d 3 h`. */
export function age(seconds) {
  const s = Math.max(0, Number(seconds) || 0);
  if (s < 10) {
    return `${(Math.floor(s * 10) / 10).toFixed(1)} s`;
  }
  const whole = Math.floor(s);
  if (whole < 60) {
    return `${whole} s`;
  }
  if (whole < 3600) {
    return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  }
  if (whole < 86400) {
    return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  }
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

/** A short time: `250 µs`, `1.5 ms`, from a second on as `age` has it. */
export function duration(seconds) {
  const [value, unit] = seconds < 1e-3 ? [seconds * 1e6, "µs"] : [seconds * 1e3, "ms"];
  return seconds < 1 ? `${value.toFixed(value < 9.95 ? 1 : 0)} ${unit}` : age(seconds);
}

/** Bytes: `512 B`, `1.5 kB`, `24 MB`. */
export function bytes(count) {
  return scaled(count, SIZES);
}

/** A share: `37 %`. */
export function percent(share) {
  return `${Math.round(100 * share)} %`;
}

/** A number of things: `7`, `4.2`, `12.3 k`. */
export function count(number) {
  return scaled(number, COUNTS);
}

function scaled(number, units) {
  let value = Math.max(0, Number(number) || 0);
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  const digits = Number.isInteger(value) || value >= 99.95 ? 0 : 1;
  return `${value.toFixed(digits)}${units[unit]}`;
}

/** Ranks as people write them: `0-3, 5`. */
export function ranks(list) {
  const sorted = [...new Set(list)].sort((a, b) => a - b);
  const parts = [];
  for (let i = 0; i < sorted.length; ) {
    let end = i;
    while (end + 1 < sorted.length && sorted[end + 1] === sorted[end] + 1) {
      end += 1;
    }
    if (end - i >= 2) {
      parts.push(`${sorted[i]}-${sorted[end]}`);
    } else {
      parts.push(...sorted.slice(i, end + 1).map(String));
    }
    i = end + 1;
  }
  return parts.join(", ");
}

/** `1 rank`, `2 ranks`. */
export function many(number, one, more = `${one}s`) {
  return `${number} ${number === 1 ? one : more}`;
}

/** How many of each: `3 alive, 1 failed`, in the order given, without those there are none of. */
export function tally(states, order) {
  const found = new Map();
  for (const state of states) {
    found.set(state, (found.get(state) ?? 0) + 1);
  }
  const known = [...order, ...[...found.keys()].filter((state) => !order.includes(state))];
  return known.filter((state) => found.has(state)).map((state) => `${found.get(state)} ${state}`).join(", ");
}

/** Compares names the way people sort them: `agent-2` before `agent-10`. */
export const natural = new Intl.Collator("en", { numeric: true }).compare;

/** A moment (unix seconds) as the clock shows it here; with the day when it is not today's. */
export function clock(unix) {
  const moment = new Date(unix * 1000);
  if (Number.isNaN(moment.getTime())) {
    return "?";
  }
  const time = moment.toLocaleTimeString("en-GB");
  const today = moment.toDateString() === new Date().toDateString();
  return today ? time : `${moment.toLocaleDateString("en-CA")} ${time}`;
}
