// Requests to the gateway, and the stream of its events, with reconnection. A session's cookie goes with both.

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

/** Sends a request to the gateway, with a credential if one is given. */
export async function ask(path, { bearer = "", ...options } = {}) {
  const headers = bearer ? { Authorization: `Bearer ${bearer}` } : {};
  const answer = await fetch(path, { cache: "no-store", headers, ...options });
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

/**
 * The gateway's events.
 *
 * `onEvent({id, event, data})` gets each event of the given kinds; `onState(state)` gets the state of the connection:
 * `{kind: "connecting"}`, `{kind: "live"}`, `{kind: "lost", since, retryAt, reason}` (performance.now()), or
 * `{kind: "refused", error}`, which is the last state.
 */
export class Feed {
  constructor(path, kinds, onEvent, onState) {
    Object.assign(this, { path, kinds, onEvent, onState });
    this.lastId = "0";
    this.endReason = ""; // what the gateway says before it ends the connection
    this.heard = 0;
    this.live = false;
    this.failures = 0;
    this.source = null;
    this.timer = 0;
    this.cut = new AbortController();
    onState({ kind: "connecting" });
    this.#connect();
  }

  /** Ends the stream. */
  stop() {
    this.cut.abort();
    this.#close();
  }

  /** Ends a pause early. */
  hurry() {
    if (this.source === null && !this.cut.signal.aborted) {
      this.#connect();
    }
  }

  #connect() {
    this.#close();
    // The browser's own reconnection tells neither when nor why.
    const source = new EventSource(`${this.path}&after=${this.lastId}`);
    this.source = source;
    let heard = false;
    for (const kind of this.kinds) {
      source.addEventListener(kind, ({ data, lastEventId }) => {
        heard = true;
        this.#alive();
        this.lastId = lastEventId || this.lastId;
        // An event without a number, as an overview is, has that of the one before.
        this.onEvent({ event: kind, data });
      });
    }
    source.onerror = () => {
      const isRejected = source.readyState === EventSource.CLOSED;
      this.#lose(heard ? this.endReason || "the gateway ended the connection" : "the gateway cannot be reached", isRejected);
    };
    this.#watch(FIRST_ANSWER_MS);
  }

  #close() {
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
  }

  #watch(patience) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.#lose(`nothing came for ${patience / 1000} s`), patience);
  }

  #alive() {
    this.#watch(SILENCE_MS);
    this.heard = performance.now();
    this.endReason = "";
    this.failures = 0;
    if (!this.live) {
      this.live = true;
      this.onState({ kind: "live" });
    }
  }

  /** Ends the connection, and waits before the next one, longer each time, and at random: not all pages come back at once. */
  async #lose(reason, isRejected = false) {
    this.#close();
    this.live = false;
    const error = isRejected ? await this.#rejection(reason) : new Error(reason);
    if (this.cut.signal.aborted) {
      return;
    }
    if (error instanceof RefusedError) {
      this.stop();
      this.onState({ kind: "refused", error });
      return;
    }
    const pause = Math.min(FIRST_PAUSE_MS * 2 ** this.failures, LONGEST_PAUSE_MS) * (0.75 + Math.random() / 4);
    this.failures += 1;
    const now = performance.now();
    this.timer = setTimeout(() => this.#connect(), pause);
    this.onState({ kind: "lost", since: this.heard || now, retryAt: now + pause, reason: error.message });
  }

  /** Returns the reason for which the gateway rejects the stream, which an EventSource does not tell. */
  async #rejection(reason) {
    const cut = new AbortController();
    const limit = setTimeout(() => cut.abort(), FIRST_ANSWER_MS);
    try {
      await ask(this.path, { signal: cut.signal });
      return new Error(reason);
    } catch (error) {
      return error;
    } finally {
      clearTimeout(limit);
      cut.abort();
    }
  }
}
