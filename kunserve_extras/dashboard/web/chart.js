// One chart over time: SVG, so that it is sharp, themed by CSS, and readable by machines.

import { element, setAttribute, setText, svg } from "./elements.js";
import { drawMarks } from "./marks.js";
import { clock } from "./units.js";

const HEIGHT = 172;
const MARGIN = { top: 20, right: 10, bottom: 22, left: 66 };
const TICK_STEPS_S = [5, 10, 15, 30, 60, 120, 300, 600];
const TICK_WIDTH = 72;

/** The smallest round step that cuts `max` into at most `count` parts. */
function roundStep(max, count) {
  const rough = max / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((step) => step >= rough * 0.999);
}

export class Chart {
  /**
   * `series` entries have `name`, `kind` (a CSS class), `value(bin)` and optionally `fill` (the
   * area below) and `steps` (held until the next value). `onHover(timeS | null)` is shared by all.
   */
  constructor({ id, title, unit, series, onHover }) {
    Object.assign(this, { title, unit, series });
    this.values = series.map(() => element("b"));
    const entries = series.map((one, index) =>
      element("li", {}, element("i", { class: `ink ${one.kind}` }), `${one.name} `, this.values[index]),
    );
    this.svg = svg("svg", { role: "img", height: HEIGHT });
    this.nothing = element("p", { class: "nothing" });
    this.root = element(
      "figure", { class: "chart", "data-chart": id },
      element("figcaption", {}, element("h3", {}, title), element("ul", {}, ...entries)),
      element("div", { class: "plot" }, this.svg, this.nothing),
    );
    this.width = 0;
    this.view = null;
    this.svg.addEventListener("pointermove", (event) => onHover(this.timeAt(event.clientX)));
    this.svg.addEventListener("pointerleave", () => onHover(null));
    new ResizeObserver(([entry]) => {
      this.width = Math.round(entry.contentRect.width);
      if (this.view) this.draw(this.view);
    }).observe(this.svg.parentElement);
  }

  timeAt(clientX) {
    if (!this.view) return null;
    const { fromS, toS } = this.view;
    const offsetX = clientX - this.svg.getBoundingClientRect().left;
    const share = (offsetX - MARGIN.left) / (this.width - MARGIN.left - MARGIN.right);
    return share < 0 || share > 1 ? null : fromS + share * (toS - fromS);
  }

  /** `view`: fromS, toS, bins, records (newest first), hoverS, offsetS (to Unix time), emptyText. */
  draw(view) {
    this.view = view;
    if (!this.width) return;
    const { fromS, toS } = view;
    const right = this.width - MARGIN.right;
    const bottom = HEIGHT - MARGIN.bottom;
    const scale = this.scale(view.bins);
    const frame = {
      fromS, toS, right, bottom,
      top: MARGIN.top,
      x: (t) => MARGIN.left + ((t - fromS) / (toS - fromS)) * (right - MARGIN.left),
      y: (value) => bottom - (value / scale.max) * (bottom - MARGIN.top),
    };
    const isEmpty = this.series.every((one) => view.bins.every((bin) => !one.value(bin)));
    setAttribute(this.svg, "width", String(this.width));
    this.svg.replaceChildren(
      ...this.valueAxis(scale, frame),
      ...this.timeAxis(view, frame),
      ...drawMarks(view.records, frame),
      ...this.series.flatMap((one) => this.line(one, view.bins, frame)),
      ...this.crosshair(view, frame),
    );
    this.nothing.hidden = !isEmpty;
    if (isEmpty) setText(this.nothing, view.emptyText);
    this.showValues(view);
  }

  scale(bins) {
    let max = this.unit.least;
    for (const one of this.series) for (const bin of bins) max = Math.max(max, one.value(bin) ?? 0);
    const [divisor, suffix] = this.unit.axis(max);
    const step = roundStep((max * 1.04) / divisor, 4);
    const count = Math.ceil((max * 1.04) / divisor / step);
    return { max: count * step * divisor, divisor, suffix, step, count };
  }

  valueAxis({ divisor, suffix, step, count }, { right, y }) {
    const parts = [];
    for (let tick = 0; tick <= count; tick += 1) {
      const at = y(tick * step * divisor);
      const label = svg("text", { class: "tick", x: MARGIN.left - 6, y: at + 4, "text-anchor": "end" });
      const number = (tick * step).toLocaleString("en", { maximumFractionDigits: 3 });
      label.append(suffix.startsWith("/") ? number + suffix : `${number} ${suffix}`.trim());
      parts.push(svg("line", { class: tick ? "grid" : "axis", x1: MARGIN.left, x2: right, y1: at, y2: at }), label);
    }
    return parts;
  }

  timeAxis({ fromS, toS, offsetS }, { x, right, bottom }) {
    const room = Math.max(1, Math.floor((right - MARGIN.left) / TICK_WIDTH));
    const stepS = TICK_STEPS_S.find((one) => (toS - fromS) / one <= room) ?? 1200;
    const parts = [];
    const first = Math.ceil((fromS + offsetS) / stepS) * stepS;
    for (let unixS = first; unixS <= toS + offsetS; unixS += stepS) {
      const at = x(unixS - offsetS);
      const anchor = at > right - 24 ? "end" : at < MARGIN.left + 24 ? "start" : "middle";
      const label = svg("text", { class: "tick", x: at, y: bottom + 16, "text-anchor": anchor });
      label.append(clock(unixS));
      parts.push(svg("line", { class: "axis", x1: at, x2: at, y1: bottom, y2: bottom + 4 }), label);
    }
    return parts;
  }

  /** A path per run of values without a hole; a lonely value becomes a dot. */
  line(series, bins, { x, y, bottom }) {
    const runs = [];
    let run = null;
    for (const bin of bins) {
      const value = series.value(bin);
      if (value === null) {
        run = null;
        continue;
      }
      if (!run) runs.push((run = []));
      run.push([x(bin.t_s).toFixed(1), y(value).toFixed(1)]);
    }
    return runs.flatMap((points) => {
      const [[firstX, firstY], ...rest] = points;
      const draw = series.steps ? ([px, py]) => `H${px}V${py}` : ([px, py]) => `L${px} ${py}`;
      const stroke = `M${firstX} ${firstY}${rest.length ? rest.map(draw).join("") : "h0.01"}`;
      const paths = [svg("path", { class: `line ${series.kind}`, d: stroke })];
      if (series.fill && rest.length) {
        const area = `${stroke}V${bottom}H${firstX}Z`;
        paths.unshift(svg("path", { class: `area ${series.kind}`, d: area }));
      }
      return paths;
    });
  }

  crosshair({ hoverS }, { x, top, bottom }) {
    if (hoverS === null) return [];
    const at = x(hoverS);
    return [svg("line", { class: "crosshair", x1: at, x2: at, y1: top, y2: bottom })];
  }

  /** The legend carries the numbers: at the pointer, else the latest. */
  showValues({ bins, hoverS, offsetS }) {
    let bin = bins.at(-1);
    if (hoverS !== null) {
      bin = bins.reduce((best, one) => (Math.abs(one.t_s - hoverS) < Math.abs(best.t_s - hoverS) ? one : best), bin);
    }
    if (!bin) return;
    const said = this.series.map((one, index) => {
      const text = this.unit.text(one.value(bin));
      setText(this.values[index], text);
      return `${one.name} ${text}`;
    });
    setAttribute(this.svg, "aria-label", `${this.title} at ${clock(bin.t_s + offsetS)}: ${said.join(", ")}`);
  }
}
