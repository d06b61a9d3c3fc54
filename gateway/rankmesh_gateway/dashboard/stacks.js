// The stacks of a rank's threads, in its dialog: the user's frames in full and the others folded.

import { byId, foreign, h, keep, say, show } from "./dom.js";
import { many } from "./format.js";

const OWN_THREADS = ["rankmesh-", "asyncio_"];

/** Shows the threads that run the user's code, and the others behind a summary. */
export function showThreads(threads) {
  const yours = threads.filter(isYours);
  const others = threads.filter((each) => !isYours(each));
  keep(byId("rank-threads"), yours, (each) => each.ident, thread);
  keep(byId("rank-others"), others, (each) => each.ident, thread);
  show(byId("rank-others-box"), others.length > 0);
  say(byId("rank-others-count"), `${many(others.length, "thread")} without a line of yours`);
}

const isYours = ({ name, frames }) =>
  frames.some(({ origin }) => origin === "user") && !OWN_THREADS.some((prefix) => name.startsWith(prefix));

function thread() {
  const name = foreign();
  const list = h("ol", { class: "frames" });
  const element = h("div", {}, h("h4", {}, name), list);
  function update(each) {
    say(name, `${each.name} (id ${each.native_id}${each.daemon ? ", daemon" : ""})`);
    keep(list, folded(each.frames), ({ key }) => key, (part) => part.build());
  }
  return [element, update];
}

/** The frames from the outermost inwards; each run of frames that are not the user's is one item. */
function folded(frames) {
  const parts = [];
  for (const frame of frames) {
    const last = parts.at(-1);
    if (frame.origin !== "user" && last?.origin === frame.origin) {
      last.frames.push(frame);
    } else {
      const build = frame.origin === "user" ? userFrame : fold;
      parts.push({ key: `${parts.length} ${frame.origin}`, origin: frame.origin, frames: [frame], build });
    }
  }
  return parts;
}

function userFrame() {
  const where = foreign();
  const code = h("code");
  function update({ frames: [frame] }) {
    say(where, `${frame.file}:${frame.line} in ${frame.function}`);
    say(code, frame.code);
    show(code, frame.code !== "");
  }
  return [h("li", {}, where, code), update];
}

function fold() {
  const summary = h("summary", { class: "muted" });
  const list = h("ol", { class: "frames" });
  function update({ origin, frames }) {
    const who = origin === "rankmesh" ? "RankMesh" : "library";
    const ends = frames.length > 1 ? `${short(frames[0])} … ${short(frames.at(-1))}, ${frames.length} frames` : short(frames[0]);
    say(summary, `${who}: ${ends}`);
    keep(list, frames.map((frame, index) => ({ index, frames: [frame] })), ({ index }) => index, userFrame);
  }
  return [h("li", {}, h("details", {}, summary, list)), update];
}

const short = (frame) => `${frame.function} (${frame.file.split("/").pop()}:${frame.line})`;
