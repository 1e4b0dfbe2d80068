// Lines over the last minutes. Drawn at the width they have, so that their texts keep their size.

const HEIGHT = 150, LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 24;
const STEPS = [1, 2, 2.5, 5, 10];
const SMOOTH = 10; // moments
const SHORTEST_S = 60;

/** The mean of each value and those before it: steps come in gusts. A value that is missing counts as 0. */
const smoothed = (values) => values.map((_, index) =>
  mean(values.slice(Math.max(0, index + 1 - SMOOTH), index + 1).map((value) => (isNumber(value) ? value : 0))));

/** Round values from low to high, some ``few`` of them; ``least`` apart at least. */
function ticks(low, high, few, least = 0) {
  const rough = Math.max((high - low) / few, least, Number.MIN_VALUE * 1e10);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = STEPS.find((each) => each * power >= rough * 0.999) * power;
  const found = [];
  const end = Math.min(high * (1 + 1e-9), Number.MAX_VALUE);
  for (let n = Math.ceil(low / step - 1e-9); n * step <= end && found.length < 50; n += 1) found.push(n * step);
  return found;
}

class Plot {
  /** ``values(history)`` gives a number a moment, or null; ``format`` writes one; ``range(values)`` is [low, high]. */
  constructor(place, { title, unit, values, format, range, least = 0 }) {
    Object.assign(this, { title, values, format, range, least, points: [], at: null });
    this.now = make("b");
    this.svg = draw("svg", { class: "plot", role: "img" });
    place.append(make("figure", {}, make("h2", {}, title), make("figcaption", {}, this.now, ` ${unit}`), this.svg));
    new ResizeObserver(() => this.draw()).observe(this.svg);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => { this.at = null; this.draw(); });
  }

  show(history) {
    const values = this.values(history);
    this.points = history.map(({ age_s }, index) => [age_s, values[index]]).filter(([age, value]) => isNumber(age) && isNumber(value));
    this.span = Math.max(SHORTEST_S, ...history.map(({ age_s }) => age_s ?? 0));
    this.draw();
  }

  point(event) {
    const x = event.clientX - this.svg.getBoundingClientRect().left;
    const age = (1 - (x - LEFT) / this.inner) * this.span;
    this.at = this.points.reduce((best, point) => (best && Math.abs(best[0] - age) <= Math.abs(point[0] - age) ? best : point), null);
    this.draw();
  }

  draw() {
    const width = this.svg.clientWidth;
    const last = this.at ?? this.points.at(-1);
    say(this.now, last ? this.format(last[1]) : "nothing yet");
    if (!width || !this.span) return;
    this.inner = width - LEFT - RIGHT;
    const [low, high] = this.range(this.points.map(([, value]) => value));
    const x = (age) => LEFT + this.inner * within(1 - age / this.span, 0, 1);
    const y = (value) => HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * within((value - low) / (high - low), 0, 1);
    this.svg.replaceChildren(...this.axes(x, y, low, high), ...this.curve(x, y), ...this.cursor(x));
    set(this.svg, "aria-label", this.inWords());
  }

  axes(x, y, low, high) {
    const rows = ticks(low, high, 4, this.least).flatMap((value) => [
      draw("line", { class: "grid", x1: LEFT, x2: LEFT + this.inner, y1: y(value), y2: y(value) }),
      draw("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, this.format(value)),
    ]);
    const minutes = this.span >= 120;
    const [unit, name] = minutes ? [60, "min"] : [1, "s"];
    const columns = ticks(0, this.span / unit, this.inner > 300 ? 5 : 3, 1).map((ago) => draw("text", {
      x: x(ago * unit), y: HEIGHT - 6, "text-anchor": ago ? "middle" : "end",
    }, ago ? `−${ago} ${name}` : "now"));
    return [...rows, ...columns.filter((text) => text.getAttribute("x") >= LEFT)];
  }

  curve(x, y) {
    if (!this.points.length) return [];
    const path = this.points.map(([age, value]) => `${x(age).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
    const floor = HEIGHT - BOTTOM;
    const ends = [x(this.points[0][0]).toFixed(1), x(this.points.at(-1)[0]).toFixed(1)];
    return [draw("polygon", { class: "area", points: `${ends[0]},${floor} ${path} ${ends[1]},${floor}` }), draw("polyline", { class: "line", points: path })];
  }

  cursor(x) {
    if (!this.at) return [];
    const at = x(this.at[0]), late = at > LEFT + this.inner / 2;
    return [
      draw("line", { class: "cursor", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }),
      draw("text", { x: at + (late ? -6 : 6), y: HEIGHT - BOTTOM - 6, "text-anchor": late ? "end" : "start" }, `${duration(this.at[0])} ago`),
    ];
  }

  inWords() {
    const values = this.points.map(([, value]) => value);
    if (!values.length) return `${this.title}: nothing yet`;
    const [low, high] = [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
    return `${this.title} over ${duration(this.span)}: ${this.format(values.at(-1))} now, from ${this.format(low)} to ${this.format(high)}`;
  }
}

const fromZero = (least) => (values) => [0, Math.min(Math.max(least, ...values) * 1.05, Number.MAX_VALUE)];
/** Up to 100 %, and down as far as it takes to see differences. */
const upToFull = (values) => [Math.max(0, Math.min(0.95, ...values) - 0.01), 1];

const PLOTS = [
  { title: "Throughput", unit: "tokens/s, delivered; mean of 10 s", values: (history) => smoothed(history.map((moment) => moment.tokens_per_s ?? 0)), format: number, range: fromZero(1) },
  { title: "Useful fill", unit: "of the slots of new steps hold a token", values: (history) => history.map((moment) => moment.fill || null), format: (value) => percent(value, value === 1 ? 0 : 1), range: upToFull },
  { title: "Readers waiting", unit: "ask, and have nothing yet; mean of 10 s", values: (history) => smoothed(history.map((moment) => moment.waiting)), format: figure, range: fromZero(1), least: 1 },
  { title: "Steps held", unit: "made, and not yet taken by every reader; mean of 10 s", values: (history) => smoothed(history.map((moment) => moment.held)), format: figure, range: fromZero(1), least: 1 },
];

