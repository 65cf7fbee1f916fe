// Numbers as people read them, always with their unit.

export const NOTHING = "–";

const BYTE_STEPS = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]];
const TIME_STEPS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]];

/** At most three significant digits, without cutting whole numbers short. */
function digits(value) {
  const size = Math.abs(value);
  if (size >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return value.toLocaleString("en", { maximumFractionDigits: size >= 10 ? 1 : 2 });
}

function stepFor(steps, size) {
  return steps.find(([divisor]) => size >= divisor) ?? steps[steps.length - 1];
}

function text(steps, value) {
  if (value === null || value === undefined) return NOTHING;
  const [divisor, suffix] = value === 0 ? steps[steps.length - 1] : stepFor(steps, Math.abs(value));
  return `${digits(value / divisor)} ${suffix}`;
}

/** A unit can write a value, and says how an axis up to `max` is divided and named. */
export const bytes = {
  text: (value) => text(BYTE_STEPS, value),
  axis: (max) => stepFor(BYTE_STEPS, max),
  least: 2 ** 20,
};

export const seconds = {
  text: (value) => (value === 0 ? "0 ms" : text(TIME_STEPS, value)),
  axis: (max) => stepFor(TIME_STEPS.slice(0, 2), max),
  least: 0.01,
};

export const requests = {
  text: (value) => (value === null || value === undefined ? NOTHING : digits(value)),
  axis: () => [1, ""],
  least: 4,
};

export const perSecond = {
  text: (value) => (value === null || value === undefined ? NOTHING : `${digits(value)}/s`),
  axis: () => [1, "/s"],
  least: 2,
};

export const tokensPerSecond = {
  text: (value) => (value === null || value === undefined ? NOTHING : `${digits(value)} tok/s`),
  axis: () => [1, ""],
  least: 10,
};

export const shares = {
  text: (value) => (value === null || value === undefined ? NOTHING : percent(value)),
  axis: () => [0.01, "%"],
  least: 0.2,
};

export function percent(share) {
  return Number.isFinite(share) ? `${Math.round(100 * share)} %` : NOTHING;
}

export function plural(count, noun) {
  return `${digits(count)} ${noun}${count === 1 ? "" : "s"}`;
}

/** `layers 0-14 of 30` for the half-open range [0, 15). */
export function layers(range, total) {
  if (range.end <= range.first) return `no layers of ${total}`;
  const shown = range.end - range.first === 1 ? `layer ${range.first}` : `layers ${range.first}-${range.end - 1}`;
  return total === undefined ? shown : `${shown} of ${total}`;
}

export function clock(unixS) {
  return new Date(unixS * 1000).toLocaleTimeString("en-GB");
}
