// Asks the server for its state and timeline, again and again, and says how that goes.

const PERIOD_MS = 333;
const RETRY_MS = 1000;
const TIMEOUT_MS = 5000;
const KEY_NAME = "kunserve-api-key";

class KeyNeeded extends Error {}

function storedKey() {
  try {
    return sessionStorage.getItem(KEY_NAME);
  } catch {
    return null; // storage is switched off: the key lives as long as the page
  }
}

function reason(error) {
  if (error instanceof TypeError) return "no answer from the server";
  if (error.name === "TimeoutError") return `no answer within ${TIMEOUT_MS / 1000} s`;
  return error.message;
}

export class Feed {
  /**
   * `listener` has `data({state, timeline})`, `restarted()` (another server run: forget everything
   * of the last one), `lost(reason)` and `keyNeeded(wasWrong)`.
   */
  constructor(listener) {
    this.listener = listener;
    this.key = storedKey();
    this.runId = null;
    this.sinceS = null;
    this.historyS = 300;
    this.timer = null;
    this.busy = false;
    document.addEventListener("visibilitychange", () => this.poll());
  }

  start() {
    this.poll();
  }

  /** From now on answers carry (and the next one starts with) this much of the past. */
  wantHistory(seconds) {
    if (seconds > this.historyS) this.sinceS = null;
    this.historyS = Math.max(seconds, this.historyS);
  }

  useKey(key) {
    this.key = key;
    try {
      sessionStorage.setItem(KEY_NAME, key);
    } catch {
      // kept in this object only
    }
    this.poll();
  }

  /** One round; the next one is scheduled by its end. Nothing is asked for a hidden page. */
  async poll() {
    clearTimeout(this.timer);
    if (this.busy || document.hidden) return;
    this.busy = true;
    const began = performance.now();
    let pauseMs = PERIOD_MS;
    try {
      await this.round();
    } catch (error) {
      pauseMs = RETRY_MS;
      if (error instanceof KeyNeeded) {
        pauseMs = null;
        this.listener.keyNeeded(Boolean(this.key));
      } else {
        this.listener.lost(reason(error));
      }
    }
    this.busy = false;
    if (pauseMs !== null) {
      const spentMs = performance.now() - began;
      this.timer = setTimeout(() => this.poll(), Math.max(50, pauseMs - spentMs));
    }
  }

  async round() {
    const asked = this.sinceS;
    const stateAnswer = this.fetch("kunserve/state");
    const sinceS = asked ?? (await stateAnswer).now_s - this.historyS;
    const [state, timeline] = await Promise.all([
      stateAnswer,
      this.fetch(`kunserve/timeline?since=${sinceS}`),
    ]);
    if (timeline.run_id !== this.runId) {
      const isFirst = this.runId === null;
      this.runId = timeline.run_id;
      this.sinceS = null;
      this.listener.restarted();
      if (!isFirst) return; // asked with the old run's clock: the next round starts afresh
    }
    const newest = timeline.samples.at(-1);
    if (newest) this.sinceS = newest.t_s;
    this.listener.data({ state, timeline });
  }

  async fetch(path) {
    const headers = this.key ? { Authorization: `Bearer ${this.key}` } : {};
    const signal = AbortSignal.timeout(TIMEOUT_MS);
    const answer = await fetch(path, { headers, signal, cache: "no-store" });
    if (answer.status === 401) throw new KeyNeeded();
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    return answer.json();
  }
}
