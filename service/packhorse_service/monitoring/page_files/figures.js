// Figures for people, as packhorse_service.text.formatting has them.

const MISSING = "–";
const SCALES = [[1e9, "G"], [1e6, "M"], [1e3, "k"]];
const SPANS = [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]];

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** 1,204. */
const whole = (value) => (isNumber(value) ? value.toLocaleString("en-US", { maximumFractionDigits: 0 }) : MISSING);

/** About three figures: 12.3. */
function figure(value) {
  if (!isNumber(value)) return MISSING;
  const size = Math.abs(value);
  if (size < 1) return String(Number(value.toPrecision(3)));
  const digits = size >= 100 || Number.isInteger(value) ? 0 : size >= 10 ? 1 : 2;
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Three figures and a scale: 4.21 M. */
function number(value) {
  const scale = SCALES.find(([least]) => Math.abs(value) >= least);
  return scale ? `${figure(value / scale[0])} ${scale[1]}` : figure(value);
}

const percent = (share, digits = 1) => (isNumber(share) && isNumber(100 * share) ? `${(100 * share).toFixed(digits)}%` : MISSING);

/** Two units at most: 3.2 s, 12 s, 3 min 20 s. */
function duration(seconds) {
  if (!isNumber(seconds)) return MISSING;
  const rounded = Math.round(seconds);
  const span = SPANS.find(([least]) => rounded >= least);
  if (span) return `${whole(Math.floor(rounded / span[0]))} ${span[1]} ${Math.floor((rounded % span[0]) / span[2])} ${span[3]}`;
  return seconds < 9.95 ? `${seconds.toFixed(1)} s` : `${rounded} s`;
}

function bytes(size) {
  if (!isNumber(size)) return MISSING;
  if (size < 1024) return `${whole(size)} B`;
  return size < 1048576 ? `${figure(size / 1024)} KiB` : `${figure(size / 1048576)} MiB`;
}

const counted = (count, thing) => `${whole(count)} ${thing}${count === 1 ? "" : "s"}`;

