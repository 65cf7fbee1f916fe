// One card per instance: what its memory holds, weights against KV.

import { element, setAttribute, setText } from "./elements.js";
import { bytes, layers } from "./units.js";

/** An instance's memory in bytes. Weights and KV always add up to all of it. */
function memory(instance, place) {
  const { spec } = instance;
  const kv = instance.kv_units * spec.unit_bytes;
  const freed = Math.max(0, instance.kv_units - spec.kv_units) * spec.unit_bytes;
  const stageLayers = place ? place.stage.layers.end - place.stage.layers.first : 0;
  const blocks = place?.group.load?.used_blocks ?? 0;
  const used = Math.min(kv, blocks * stageLayers * spec.unit_bytes);
  return { total: spec.memory_bytes, weights: spec.memory_bytes - kv, kv, freed, used };
}

function amount(className, label) {
  const value = element("b");
  const name = element("span", {}, label);
  return { root: element("span", { class: "amount" }, element("i", { class: `swatch ${className}` }), name, " ", value), name, value };
}

export class InstanceCard {
  constructor(id) {
    this.title = element("h3", {}, `Instance ${id}`);
    this.role = element("span", { class: "role" });
    this.held = element("span", { class: "held" });
    this.weights = element("div", { class: "part weights" });
    this.used = element("div", { class: "part used" });
    this.hatch = element("div", { class: "part hatch" });
    this.bar = element(
      "div", { class: "bar", role: "img" }, this.weights, this.used, this.hatch,
    );
    this.strip = element("div", { class: "strip", "aria-hidden": "true" });
    this.amounts = {
      weights: amount("weights", "weights"),
      free: amount("free", "KV free"),
      used: amount("used", "KV used"),
      freed: amount("freed", "of the KV, from dropped layers"),
    };
    this.root = element(
      "li", { class: "card instance", "data-instance": id },
      element("div", { class: "card-head" }, this.title, " ", this.role, " ", this.held),
      this.bar,
      this.strip,
      element("p", { class: "amounts" }, ...Object.values(this.amounts).map((one) => one.root)),
    );
    this.id = id;
  }

  /** `place` is the instance's `{group, stage, index}`, or undefined if it is in none. */
  update({ instance, place }) {
    if (!instance.alive) return this.showDead(instance);
    const shares = memory(instance, place);
    const total = instance.spec.num_layers;
    const { host } = instance.spec.place;
    setText(this.title, `Instance ${this.id}${host ? ` on ${host}` : ""}`);
    this.root.classList.remove("dead");
    setText(this.role, roleOf(place));
    setText(this.held, layers(instance.held, total));
    this.size(shares);
    this.showLayers(instance.held, total);
    setText(this.amounts.weights.name, instance.spec.shared_weights_bytes ? "part of the shared weights" : "weights");
    setText(this.amounts.weights.value, bytes.text(shares.weights));
    setText(this.amounts.freed.value, bytes.text(shares.freed));
    setText(this.amounts.used.value, bytes.text(shares.used));
    setText(this.amounts.free.value, bytes.text(shares.kv - shares.used));
    this.amounts.freed.root.hidden = shares.freed === 0;
    setAttribute(this.bar, "aria-label", describe(this.id, instance, shares));
  }

  showDead(instance) {
    this.root.classList.add("dead");
    setText(this.role, "dead");
    setText(this.held, `${bytes.text(instance.spec.memory_bytes)} gone`);
    setAttribute(this.bar, "aria-label", `Instance ${this.id} is dead.`);
  }

  /** Weights grow from the left, KV from the right; a drop moves the border between them. */
  size({ total, weights, freed, used }) {
    const share = (part) => `${(100 * part) / total}%`;
    this.weights.style.width = share(weights);
    this.hatch.style.left = share(weights);
    this.hatch.style.width = share(freed);
    this.used.style.width = share(used);
  }

  showLayers(held, total) {
    while (this.strip.children.length < total) this.strip.append(element("i"));
    for (let layer = 0; layer < total; layer += 1) {
      const isHeld = held.first <= layer && layer < held.end;
      this.strip.children[layer].classList.toggle("held", isHeld);
    }
  }
}

function roleOf(place) {
  if (!place) return "in no group";
  const { group, index } = place;
  if (group.stages.length === 1) return `group ${group.group_id}`;
  return `group ${group.group_id}, stage ${index}${index === 0 ? ", leader" : ""}`;
}

function describe(id, instance, shares) {
  const freed = shares.freed ? `, of which ${bytes.text(shares.freed)} freed from dropped layers` : "";
  return (
    `Instance ${id}: ${bytes.text(shares.total)} of memory; ${instance.spec.shared_weights_bytes ? "its part of the shared weights" : "weights"} ${bytes.text(shares.weights)} ` +
    `(${layers(instance.held, instance.spec.num_layers)}); KV ${bytes.text(shares.kv)}${freed}; ` +
    `${bytes.text(shares.used)} of the KV in use.`
  );
}
