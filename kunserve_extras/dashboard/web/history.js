// The past as the charts need it: samples kept in order, summed over groups, cut into bins.

const KEPT_S = 1200;
/** Rates are over this much of the past, wherever they are shown. Longer than a bin can be. */
export const RATE_S = 5;

/** How the samples of one bin become one value. */
const FOLDS = {
  capacity_blocks: "last",
  used_blocks: "last",
  demand_blocks: "max",
  need_blocks: "max",
  num_running: "last",
  num_waiting: "max",
  ttft_p50_s: "max",
  ttft_p99_s: "max",
  tpot_p50_s: "max",
  tpot_p99_s: "max",
  bubble_ratio: "max",
  num_in_freed_memory: "last",
};
const SUMMED = ["capacity_blocks", "used_blocks", "demand_blocks", "need_blocks"];

/** Idle share of all stages of the pipelines that have worked; null without any. */
function idleShare(groups) {
  const known = groups.filter((group) => (group.bubble_ratio ?? null) !== null);
  const stages = known.reduce((sum, group) => sum + group.num_stages, 0);
  const idle = known.reduce((sum, group) => sum + group.num_stages * group.bubble_ratio, 0);
  return stages ? idle / stages : null;
}

function row(sample) {
  const row = { ...sample };
  for (const name of SUMMED) row[name] = sample.groups.reduce((sum, group) => sum + group[name], 0);
  row.bubbles = new Map(sample.groups.map((group) => [group.group_id, group.bubble_ratio ?? null]));
  row.bubble_ratio = idleShare(sample.groups);
  delete row.groups;
  return row;
}

function foldInto(bin, row) {
  for (const [name, fold] of Object.entries(FOLDS)) {
    const value = row[name] ?? null;
    const known = bin[name] ?? null;
    const both = known !== null && value !== null;
    bin[name] = fold === "max" && both ? Math.max(known, value) : (value ?? known);
  }
}

/** Growth of a counter between two rows, per second. */
function growth(first, last, name) {
  const elapsedS = last.t_s - first.t_s;
  return elapsedS > 0 ? (last[name] - first[name]) / elapsedS : 0;
}

export class History {
  constructor() {
    this.clear();
  }

  clear() {
    this.rows = [];
    this.transitions = new Map();
    this.unixOffsetS = 0;
  }

  add(timeline) {
    for (const sample of timeline.samples) {
      if (this.rows.length && sample.t_s <= this.rows.at(-1).t_s) {
        if (sample.t_s > this.rows[0].t_s) continue;
        this.rows = []; // a longer past was asked for and starts here
      }
      this.rows.push(row(sample));
      this.unixOffsetS = sample.unix_s - sample.t_s;
    }
    const oldest = (this.latest?.t_s ?? 0) - KEPT_S;
    const firstKept = this.rows.findIndex((one) => one.t_s >= oldest);
    if (firstKept > 0) this.rows.splice(0, firstKept);
    for (const record of timeline.transitions) this.transitions.set(record.transition_id, record);
  }

  get latest() {
    return this.rows.at(-1);
  }

  get hasTraffic() {
    return Boolean(this.latest && this.latest.arrivals > 0);
  }

  /** Growth of a counter per second over the last `spanS`. */
  rate(name, spanS) {
    const last = this.latest;
    return growth(this.rows.find((one) => one.t_s >= last.t_s - spanS), last, name);
  }

  /** Transitions, newest first. */
  newestTransitions() {
    return [...this.transitions.values()].sort((a, b) => b.transition_id - a.transition_id);
  }

  /**
   * One object per bin of `binS` between `fromS` and `toS`, each with `t_s` at the bin's middle.
   * Bins lie on multiples of their width, so that a moving window does not make the lines dance.
   */
  bins(fromS, toS, binS) {
    const bins = [];
    let rateFrom = 0;
    for (const one of this.rows) {
      const number = Math.floor(one.t_s / binS);
      if ((number + 1) * binS < fromS || one.t_s > toS) continue;
      if (bins.at(-1)?.number !== number) bins.push({ number, t_s: (number + 0.5) * binS });
      const bin = bins.at(-1);
      foldInto(bin, one);
      while (this.rows[rateFrom].t_s < one.t_s - RATE_S) rateFrom += 1;
      bin.arrivals_per_s = growth(this.rows[rateFrom], one, "arrivals");
      bin.tokens_per_s = growth(this.rows[rateFrom], one, "generation_tokens");
    }
    return bins;
  }
}
