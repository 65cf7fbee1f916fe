// One card per group: its pipeline, how full it is, and what it works on.

import { KeyedList, element, setAttribute, setText } from "./elements.js";
import { bytes, layers, percent, plural, seconds } from "./units.js";

class StageBox {
  constructor() {
    this.name = element("b");
    this.leader = element("span", { class: "leader" }, "leader");
    this.range = element("span", { class: "range" });
    this.root = element("li", { class: "stage" }, this.name, " ", this.leader, " ", this.range);
  }

  update({ stage, index }) {
    setText(this.name, `Instance ${stage.instance_id}`);
    this.leader.hidden = index !== 0;
    setText(this.range, layers(stage.layers));
  }
}

/** Bytes of one block over all layers: the same for every group of one model. */
export function blockBytes(state) {
  const spec = state.instances[0]?.spec;
  return spec ? spec.num_layers * spec.unit_bytes : 0;
}

export class GroupCard {
  constructor(id) {
    this.size = element("span", { class: "role" });
    this.busy = element("span", { class: "badge" });
    this.bubbles = element("span", { class: "role bubble-ratio", title: "Idle share of its stages' time, lately" });
    const stages = element("ol", { class: "stages", "aria-label": "Stages in order" });
    this.stages = new KeyedList(stages, () => new StageBox());
    this.used = element("div", { class: "part used" });
    this.demand = element("div", { class: "demand-mark" });
    this.bar = element("div", { class: "bar thin", role: "img" }, this.used, this.demand);
    this.capacity = element("p", { class: "amounts" });
    this.counts = {};
    const counts = element("dl", { class: "counts" });
    for (const name of ["running", "waiting", "stalled", "preempted"]) {
      this.counts[name] = element("dd");
      counts.append(element("div", {}, element("dt", {}, name), this.counts[name]));
    }
    this.root = element(
      "li", { class: "card group", "data-group": id },
      element(
        "div", { class: "card-head" },
        element("h3", {}, `Group ${id}`), this.size, this.bubbles, this.busy, counts,
      ),
      stages,
      this.bar,
      this.capacity,
    );
    this.id = id;
  }

  /** `transition` is the one that the group stands in now, and `formingS` how long it forms, if
   * any; `bubbles` may be null. */
  update({ group, blockBytes, transition, formingS, bubbles }) {
    setText(this.size, group.stages.length === 1 ? "whole model" : `pipeline of ${plural(group.stages.length, "stage")}`);
    this.bubbles.hidden = bubbles === null;
    if (bubbles !== null) setText(this.bubbles, `bubbles ${percent(bubbles)}`);
    this.busy.hidden = !transition && formingS === undefined;
    if (transition) setText(this.busy, `${transition.kind} under way`);
    else if (formingS !== undefined) setText(this.busy, `forms for ${seconds.text(formingS)}`);
    this.stages.update(
      group.stages.map((stage, index) => ({ stage, index })),
      ({ stage }) => stage.instance_id,
    );
    if (group.load) this.showLoad(group.load, blockBytes);
  }

  showLoad(load, blockBytes) {
    const capacity = load.capacity_blocks * blockBytes;
    const demand = load.demand_blocks * blockBytes;
    const demandShare = demand / capacity;
    const usedShare = load.used_blocks / load.capacity_blocks || 0;
    this.used.style.width = `${100 * Math.min(1, usedShare)}%`;
    this.demand.style.left = `${100 * Math.min(1, demandShare || 0)}%`;
    this.bar.classList.toggle("over", demandShare > 1);
    const cached = load.cached_blocks
      ? `cached ${percent(load.cached_blocks / load.capacity_blocks)}, `
      : "";
    const said =
      `capacity ${bytes.text(capacity)}, used ${percent(usedShare)}, ${cached}` +
      `demand ${bytes.text(demand)} (${percent(demandShare)})`;
    setText(this.capacity, said);
    setAttribute(this.bar, "aria-label", `Group ${this.id}: ${said}`);
    setText(this.counts.running, String(load.num_running));
    setText(this.counts.waiting, String(load.num_waiting));
    setText(this.counts.stalled, String(load.num_stalled));
    setText(this.counts.preempted, String(load.num_preemptions));
  }
}
