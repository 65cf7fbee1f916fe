// Which charts there are, and the window of time that they share.

import { Chart } from "./chart.js";
import { element } from "./elements.js";
import { bytes, perSecond, requests, seconds, shares, tokensPerSecond } from "./units.js";

export const SPANS_S = [60, 300, 1200];
const MOST_BINS = 300;
const LEAST_BIN_S = 0.2;
const LEAST_SPAN_S = 30;

/** Where `blockBytes` is needed it is looked up late: it is known with the first state only. */
function definitions(blockBytes) {
  const inBytes = (name) => (bin) => (bin[name] ?? null) === null ? null : bin[name] * blockBytes();
  const plain = (name) => (bin) => bin[name] ?? null;
  return [
    {
      id: "kv", title: "KV demand and capacity", unit: bytes,
      series: [
        { name: "used", kind: "used", value: inBytes("used_blocks"), fill: true },
        { name: "demand", kind: "demand", value: inBytes("demand_blocks") },
        { name: "with queue", kind: "need", value: inBytes("need_blocks") },
        { name: "capacity", kind: "capacity", value: inBytes("capacity_blocks"), steps: true },
      ],
    },
    {
      id: "ttft", title: "Time to first token (TTFT)", unit: seconds,
      series: [
        { name: "p99", kind: "p99", value: plain("ttft_p99_s") },
        { name: "p50", kind: "p50", value: plain("ttft_p50_s") },
      ],
    },
    {
      id: "requests", title: "Requests", unit: requests,
      series: [
        { name: "running", kind: "running", value: plain("num_running"), fill: true },
        { name: "waiting", kind: "waiting", value: plain("num_waiting") },
      ],
    },
    {
      id: "tpot", title: "Time per output token (TPOT)", unit: seconds,
      series: [
        { name: "p99", kind: "p99", value: plain("tpot_p99_s") },
        { name: "p50", kind: "p50", value: plain("tpot_p50_s") },
      ],
    },
    {
      id: "arrivals", title: "Arrivals per second", unit: perSecond,
      series: [{ name: "requests", kind: "arrivals", value: plain("arrivals_per_s"), fill: true, steps: true }],
    },
    {
      id: "output", title: "Output tokens per second", unit: tokensPerSecond,
      series: [{ name: "tokens", kind: "output", value: plain("tokens_per_s"), fill: true }],
    },
    {
      id: "bubbles", title: "Bubbles: idle share of pipelines' stages", unit: shares,
      series: [{ name: "idle", kind: "bubbles", value: plain("bubble_ratio"), fill: true, steps: true }],
    },
    {
      id: "saved", title: "Requests that run in the memory of dropped layers", unit: requests,
      series: [{ name: "would wait", kind: "saved", value: plain("num_in_freed_memory"), fill: true, steps: true }],
    },
  ];
}

export class Charts {
  /** `onSpan(seconds)` is told when the visitor wants another window. */
  constructor(root, spanButtons, history, onSpan) {
    this.history = history;
    this.blockBytes = 0;
    this.hoverS = null;
    this.spanS = 300;
    const onHover = (timeS) => {
      this.hoverS = timeS;
      this.draw();
    };
    this.charts = definitions(() => this.blockBytes).map((one) => new Chart({ ...one, onHover }));
    root.append(...this.charts.map((one) => one.root));
    this.buttons = SPANS_S.map((spanS) => {
      const button = element("button", { type: "button" }, `${spanS / 60} min`);
      button.addEventListener("click", () => {
        this.showSpan(spanS);
        onSpan(spanS);
      });
      return button;
    });
    spanButtons.append(...this.buttons);
    this.showSpan(this.spanS);
  }

  showSpan(spanS) {
    this.spanS = spanS;
    this.buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(SPANS_S[index] === spanS)));
    this.draw();
  }

  update(blockBytes) {
    this.blockBytes = blockBytes;
    this.draw();
  }

  draw() {
    const { history } = this;
    if (!history.latest) return;
    const toS = history.latest.t_s;
    // A server younger than the window fills it: else its story is squeezed into a corner.
    const ageS = Math.max(LEAST_SPAN_S, toS - history.rows[0].t_s);
    const fromS = toS - Math.min(this.spanS, ageS);
    const view = {
      fromS,
      toS,
      bins: history.bins(fromS, toS, Math.max(LEAST_BIN_S, (toS - fromS) / MOST_BINS)),
      records: history.newestTransitions(),
      hoverS: this.hoverS !== null && this.hoverS >= fromS ? this.hoverS : null,
      offsetS: history.unixOffsetS,
      emptyText: history.hasTraffic ? "Nothing measured in this window." : "No traffic yet.",
    };
    for (const chart of this.charts) chart.draw(view);
  }
}
