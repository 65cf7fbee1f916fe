// Drops and restores on a chart's time axis: a band while one lasts, a line at its commit.

import { svg } from "./elements.js";
import { seconds } from "./units.js";

const NAMES = { drop: "Drop", restore: "Restore", recover: "Recover" };
const LABEL_GAP = 6;
const LETTER_WIDTH = 6.2;

function describe(record) {
  const took = record.finished_s === null ? "under way" : `took ${seconds.text(record.finished_s - record.started_s)}`;
  return `${NAMES[record.kind] ?? record.kind} #${record.transition_id}: ${record.trigger}; ${took}; ${record.outcome}`;
}

/** The marks between `fromS` and `toS`, oldest first; labels that would collide are left out. */
export function drawMarks(records, { fromS, toS, x, top, bottom, right }) {
  const marks = [];
  let free = -Infinity;
  const shown = records.filter((one) => (one.finished_s ?? toS) >= fromS && one.started_s <= toS);
  for (const record of shown.reverse()) {
    const start = x(Math.max(fromS, record.started_s));
    const end = x(Math.min(toS, record.finished_s ?? toS));
    const line = x(record.committed_s ?? record.started_s);
    const label = NAMES[record.kind] ?? record.kind;
    const mark = svg("g", { class: `mark ${record.kind}`, "data-mark": record.kind });
    mark.classList.toggle("undone", !["running", "done"].includes(record.outcome));
    const title = svg("title");
    title.append(describe(record));
    mark.append(
      title,
      svg("rect", { x: start, y: top, width: Math.max(2, end - start), height: bottom - top }),
    );
    if (line >= start - 1) mark.append(svg("line", { x1: line, x2: line, y1: top - 3, y2: bottom }));
    const width = label.length * LETTER_WIDTH;
    const left = Math.min(Math.max(line, start) - 2, right - width);
    if (left > free) {
      const text = svg("text", { x: left, y: top - 5 });
      text.append(label);
      mark.append(text);
      free = left + width + LABEL_GAP;
    }
    marks.push(mark);
  }
  return marks;
}
