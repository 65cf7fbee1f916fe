// The table of the latest drops and restores, newest first.

import { KeyedList, element, setAttribute, setText } from "./elements.js";
import { NOTHING, bytes, clock, plural, seconds } from "./units.js";

const SHOWN = 20;

const ids = (groups) => groups.map((group) => group.group_id).join(" + ");
const sign = (amount) => (amount < 0 ? "−" : "+");

/** Column title and what it says of a record. */
const COLUMNS = [
  ["Time", ({ record, offsetS }) => clock(record.started_s + offsetS)],
  ["Kind", ({ record }) => record.kind],
  ["Trigger", ({ record }) => record.trigger],
  ["Groups", ({ record }) => `${ids(record.groups_before)} → ${ids(record.groups_after)}`],
  ["Memory to KV", ({ record }) => (record.freed_bytes ? sign(record.freed_bytes) + bytes.text(Math.abs(record.freed_bytes)) : NOTHING)],
  ["Remap", ({ record }) => measured(record, record.remap_s)],
  ["Gap", ({ record }) => measured(record, record.gap_s)],
  ["Moved", ({ record }) => moved(record)],
  ["Max stall", ({ record }) => measured(record, record.max_stall_s)],
  ["Took", ({ record }) => (record.finished_s === null ? NOTHING : seconds.text(record.finished_s - record.started_s))],
  ["Outcome", ({ record }) => record.outcome],
];
const TEXT_COLUMNS = new Set(["Time", "Kind", "Trigger", "Groups", "Outcome"]);

/** A duration that only a commit measures; in milliseconds below ten seconds, to compare rows. */
function measured(record, durationS) {
  if (record.committed_s === null) return NOTHING;
  if (durationS >= 10) return seconds.text(durationS);
  return `${(1000 * durationS).toLocaleString("en", { maximumFractionDigits: durationS < 0.1 ? 1 : 0 })} ms`;
}

function outcomeKind(outcome) {
  if (outcome === "running" || outcome === "done") return outcome;
  return outcome.startsWith("rolled back") ? "rolled-back" : "failed";
}

function moved({ requests_moved: count, moved_bytes: amount }) {
  return count ? `${plural(count, "request")} (${bytes.text(amount)})` : NOTHING;
}

class TransitionRow {
  constructor() {
    this.cells = COLUMNS.map(([title]) =>
      element("td", { "data-label": title, class: TEXT_COLUMNS.has(title) ? "text" : "number" }),
    );
    this.root = element("tr", {}, ...this.cells);
  }

  update(item) {
    COLUMNS.forEach(([, say], index) => setText(this.cells[index], say(item)));
    setAttribute(this.root, "data-kind", item.record.kind);
    setAttribute(this.root, "data-outcome", outcomeKind(item.record.outcome));
  }
}

export class TransitionTable {
  constructor(head, body) {
    for (const [title] of COLUMNS) {
      head.append(element("th", { scope: "col", class: TEXT_COLUMNS.has(title) ? "text" : "number" }, title));
    }
    this.rows = new KeyedList(body, () => new TransitionRow());
  }

  update(records, offsetS) {
    const items = records.slice(0, SHOWN).map((record) => ({ record, offsetS }));
    this.rows.update(items, ({ record }) => record.transition_id);
  }
}
