// The row of large numbers: how the whole cluster is now.

import { element, setText } from "./elements.js";
import { RATE_S } from "./history.js";
import { NOTHING, bytes, percent, perSecond, plural, requests, seconds, tokensPerSecond } from "./units.js";

/** Refused requests are no arrivals: they show only where there are any. */
function inAll({ arrivals, refusals }) {
  const taken = `${requests.text(arrivals)} in all`;
  return refusals ? `${taken}, ${requests.text(refusals)} refused` : taken;
}

/** name, what it says, and the smaller line below it. */
const TILES = [
  ["Running", (now) => [requests.text(now.latest.num_running), `${now.stalled} stalled`]],
  ["Queue", (now) => [requests.text(now.latest.num_waiting), plural(now.preemptions, "preemption")]],
  ["KV in use", (now) => [percent(now.used / now.capacity), `of ${bytes.text(now.capacity)}`]],
  ["KV demand", (now) => [percent(now.demand / now.capacity), bytes.text(now.demand)]],
  ["TTFT p99", (now) => [seconds.text(now.latest.ttft_p99_s), `p50 ${seconds.text(now.latest.ttft_p50_s)}, n=${requests.text(now.latest.ttft_count)}`]],
  ["TPOT p50", (now) => [seconds.text(now.latest.tpot_p50_s), `p99 ${seconds.text(now.latest.tpot_p99_s)}`]],
  ["Arrivals", (now) => [perSecond.text(now.arrivalRate), inAll(now.latest)]],
  ["Output tokens", (now) => [tokensPerSecond.text(now.tokenRate), `${requests.text(now.latest.generation_tokens)} in all`]],
  ["Drops", (now) => [String(now.state.num_drops), plural(now.state.num_restores, "restore")]],
  ["Wait avoided", (now) => [seconds.text(now.latest.queueing_avoided_s), `${plural(Math.round(now.latest.num_in_freed_memory), "request")} now`]],
];

export class Tiles {
  constructor(root) {
    this.views = TILES.map(([name, say]) => {
      const value = element("dd", { class: "value" }, NOTHING);
      const below = element("dd", { class: "below" }, NOTHING);
      root.append(element("div", { class: "tile", "data-tile": name }, element("dt", {}, name), value, below));
      return { say, value, below };
    });
  }

  update(state, history, blockBytes) {
    const { latest } = history;
    const loads = state.groups.map((group) => group.load).filter(Boolean);
    const total = (name) => loads.reduce((sum, load) => sum + load[name], 0);
    const now = {
      state,
      latest,
      stalled: total("num_stalled"),
      preemptions: total("num_preemptions"),
      used: total("used_blocks") * blockBytes,
      demand: total("demand_blocks") * blockBytes,
      capacity: total("capacity_blocks") * blockBytes,
      arrivalRate: history.rate("arrivals", RATE_S),
      tokenRate: history.rate("generation_tokens", RATE_S),
    };
    for (const { say, value, below } of this.views) {
      const [large, small] = say(now);
      setText(value, large);
      setText(below, small);
    }
  }
}
