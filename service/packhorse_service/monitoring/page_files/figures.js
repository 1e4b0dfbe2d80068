// Figures for people, as packhorse_service.text.formatting has them: every number has a short text, and none throws.

const MISSING = "–";
const LONG = 1e15; // from here on a number has so many digits that an exponent is easier to read
const SCALES = [[1e9, "G"], [1e6, "M"], [1e3, "k"]];
const SPANS = [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]];

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** Where it lies between two ends, or the nearer of them: all that is drawn has a place, whatever a server says. */
const within = (value, low, high) => Math.min(Math.max(value ?? low, low), high);

const sum = (values) => values.reduce((total, value) => total + value, 0);
/** The mean of some numbers, of whatever size: no sum on the way overflows, or loses what is small beside it. */
const mean = (values) => values.reduce((total, value) => total + value / values.length, 0);

/** 0.00436, 1.7e+308. */
const threeFigures = (value) => String(Number(value.toPrecision(3))).replace("Infinity", "∞");
/** 12.30: without the sign of what shows as zero. */
const fixed = (value, digits) => value.toFixed(digits).replace(/^-(?=[0.]*$)/, "");

/** 1,204. */
function whole(value) {
  if (!isNumber(value)) return MISSING;
  return Math.abs(value) < LONG ? value.toLocaleString("en-US", { maximumFractionDigits: 0 }) : threeFigures(value);
}

/** About three figures: 12.3. */
function figure(value) {
  if (!isNumber(value)) return MISSING;
  const size = Math.abs(value);
  if (size < 1 || size >= LONG) return threeFigures(value);
  const digits = size >= 100 || Number.isInteger(value) ? 0 : size >= 10 ? 1 : 2;
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Three figures and a scale: 4.21 M. */
function number(value) {
  const scale = SCALES.find(([least]) => Math.abs(value) >= least);
  return scale ? `${figure(value / scale[0])} ${scale[1]}` : figure(value);
}

/** 12.3%. */
function percent(share, digits = 1) {
  if (!isNumber(share)) return MISSING;
  return `${Math.abs(share) < LONG ? fixed(100 * share, digits) : threeFigures(100 * share)}%`;
}

/** Two units at most: 3.2 s, 12 s, 3 min 20 s. */
function duration(seconds) {
  if (!isNumber(seconds)) return MISSING;
  if (Math.abs(seconds) >= LONG) return `${threeFigures(seconds / 86400)} d`;
  const rounded = Math.round(seconds);
  const span = SPANS.find(([least]) => rounded >= least);
  if (span) return `${whole(Math.floor(rounded / span[0]))} ${span[1]} ${Math.floor((rounded % span[0]) / span[2])} ${span[3]}`;
  return seconds < 9.95 ? `${fixed(seconds, 1)} s` : `${rounded} s`;
}

function bytes(size) {
  if (!isNumber(size)) return MISSING;
  if (size < 1024) return `${whole(size)} B`;
  return size < 1048576 ? `${figure(size / 1024)} KiB` : `${figure(size / 1048576)} MiB`;
}

const counted = (count, thing) => `${whole(count)} ${thing}${count === 1 ? "" : "s"}`;

