// Server-sent events over fetch(): EventSource cannot send the token. The rules are those of the HTML standard, 9.2.

const SILENCE_MS = 6000;
// A gateway loads its web framework at the first request.
const FIRST_ANSWER_MS = 30000;
const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 10000;

/** The gateway rejects the request, and would reject it again. */
export class RefusedError extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

/** Sends a request to the gateway, with the token if there is one. */
export async function ask(path, token, options = {}) {
  const headers = { ...(token ? { Authorization: `Bearer ${token}` } : {}), ...options.headers };
  const answer = await fetch(path, { cache: "no-store", credentials: "omit", ...options, headers });
  if (answer.ok) {
    return answer;
  }
  const problem = await answer.json().catch(() => ({}));
  const detail = problem.detail ?? `the gateway answered ${answer.status} ${answer.statusText}`.trim();
  if ([401, 403, 421].includes(answer.status)) {
    throw new RefusedError(answer.status, detail);
  }
  throw new Error(detail);
}

/** Parses a stream's text, which arrives in pieces; calls `found({id, event, data})` for each event. */
export class Parser {
  constructor(found) {
    this.found = found;
    this.rest = "";
    this.id = "";
    this.#clear();
  }

  #clear() {
    this.event = "";
    this.data = [];
  }

  push(text) {
    this.rest += text;
    // A carriage return at the end may be the first half of a line's end.
    const whole = this.rest.endsWith("\r") ? this.rest.slice(0, -1) : this.rest;
    const lines = whole.split(/\r\n|\n|\r/);
    this.rest = lines.pop() + this.rest.slice(whole.length);
    lines.forEach((line) => this.#line(line));
  }

  #line(line) {
    if (line === "") {
      const { event, data, id } = this;
      this.#clear();
      if (data.length) {
        this.found({ event: event || "message", data: data.join("\n"), id });
      }
      return;
    }
    const colon = line.indexOf(":");
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "data") {
      this.data.push(value);
    } else if (field === "event") {
      this.event = value;
    } else if (field === "id" && !value.includes("\0")) {
      this.id = value;
    }
  }
}

/**
 * The gateway's events, with reconnection.
 *
 * `onEvent({id, event, data})` gets each event; `onState(state)` gets the state of the connection:
 * `{kind: "connecting"}`, `{kind: "live"}`, `{kind: "lost", since, retryAt, reason}` (performance.now()), or
 * `{kind: "refused", error}`, which is the last state.
 */
export class Feed {
  constructor(path, token, onEvent, onState) {
    Object.assign(this, { path, token, onEvent, onState });
    this.lastId = "";
    this.endReason = ""; // what the gateway says before it ends the connection
    this.heard = 0;
    this.live = false;
    this.failures = 0;
    this.stopped = false;
    this.wake = () => {};
    this.cut = new AbortController();
  }

  async run() {
    this.onState({ kind: "connecting" });
    while (!this.stopped) {
      const reason = await this.#read();
      if (this.stopped) {
        return;
      }
      this.live = false;
      if (reason instanceof RefusedError) {
        this.onState({ kind: "refused", error: reason });
        return;
      }
      await this.#pause(reason);
    }
  }

  /** Ends the stream. */
  stop() {
    this.stopped = true;
    this.cut.abort();
    this.wake();
  }

  /** Ends a pause early. */
  hurry() {
    this.wake();
  }

  /** Reads until the connection breaks; returns the reason. */
  async #read() {
    const cut = new AbortController();
    const { signal } = cut;
    this.cut = cut;
    let watch = 0;
    const listen = (patience) => {
      clearTimeout(watch);
      watch = setTimeout(() => cut.abort(new Error(`nothing came for ${patience / 1000} s`)), patience);
    };
    const parser = new Parser((found) => {
      if (!signal.aborted) {
        // Events without a number, the overviews, leave the number of the last one as it was.
        this.lastId = found.id || this.lastId;
        this.onEvent(found);
      }
    });
    try {
      listen(FIRST_ANSWER_MS);
      const headers = { Accept: "text/event-stream", ...(this.lastId ? { "Last-Event-ID": this.lastId } : {}) };
      const path = this.lastId ? this.path : `${this.path}&after=0`;
      const answer = await ask(path, this.token, { headers, signal });
      listen(SILENCE_MS);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (;;) {
        const { done, value } = await reader.read();
        if (done) {
          return new Error(this.endReason || "the gateway ended the connection");
        }
        listen(SILENCE_MS);
        this.#alive();
        parser.push(value);
      }
    } catch (error) {
      const reason = signal.aborted ? signal.reason : error;
      // The message of fetch()'s TypeError does not help users.
      return reason instanceof TypeError ? new Error("the gateway cannot be reached") : reason;
    } finally {
      clearTimeout(watch);
      cut.abort();
    }
  }

  #alive() {
    this.heard = performance.now();
    this.endReason = "";
    this.failures = 0;
    if (!this.live) {
      this.live = true;
      this.onState({ kind: "live" });
    }
  }

  /** Waits before the next attempt, longer each time, and at random, so that not all pages of a gateway reconnect at once. */
  async #pause(reason) {
    const longest = Math.min(FIRST_PAUSE_MS * 2 ** this.failures, LONGEST_PAUSE_MS);
    const pause = longest * (0.75 + Math.random() / 4);
    this.failures += 1;
    const now = performance.now();
    this.onState({ kind: "lost", since: this.heard || now, retryAt: now + pause, reason: reason.message });
    await new Promise((resolve) => {
      const timer = setTimeout(resolve, pause);
      this.wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
    this.wake = () => {};
  }
}
