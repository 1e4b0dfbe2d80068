// A cell for each reader, however many there are, and a table of those worth a look.

const SIGNS = {
  lost: "✕", absent: "", "keeps others": "!", waiting: "‖", forming: "○", receiving: "↓", training: "•", left: "–",
};
const AT_WORK = new Set(["training", "receiving"]);
const SIZES = [[32, "large"], [256, "middle"], [Infinity, "small"]];

/** Its state; of a stream that is stalled by readers, those that all others wait for are told from those at work. */
function stateOf(reader, stream) {
  const byReaders = ["trainer", "slow_peer"].includes(stream.stall?.cause);
  return byReaders && AT_WORK.has(reader.state) && reader.taken[0] === stream.step ? "keeps others" : reader.state;
}

const isHere = (reader) => reader.state !== "absent" && reader.state !== "left";
const positionOf = ([step, index]) => `${whole(step)}\u00a0·\u00a0${whole(index)}`;
const asked = (reader) => (!isHere(reader) ? MISSING : reader.loop_age_s ? `${duration(reader.loop_age_s)} ago` : "now");

/** What it is doing, and why: "waiting 12 s: for dp0·cp1·tp0·pp0". */
function doing(reader) {
  const since = reader.state === "waiting" ? ` ${duration(reader.waits_s)}` : "";
  return `${reader.state}${since}${reader.why ? `: ${reader.why}` : ""}`;
}

function sign(element, state) {
  set(element, "data-state", state);
  say(element, SIGNS[state] ?? "?");
}

function showState(place, reader, state) {
  if (!place.firstChild) place.append(make("span", { class: "cell", "aria-hidden": "true" }), make("span"));
  sign(place.children[0], state);
  say(place.children[1], ` ${doing(reader)}`);
}

function described(reader) {
  const name = `Rank ${whole(reader.rank)}, ${reader.at}: ${doing(reader)}.`;
  if (!isHere(reader)) return name;
  const loop = reader.loop_age_s ? `its loop asked ${duration(reader.loop_age_s)} ago` : "its loop asks now";
  return `${name} It takes step ${positionOf(reader.taken)} next, with ${whole(reader.ready)} ready, ${whole(reader.lag)} behind; `
    + `${loop}; heard ${duration(reader.silence_s)} ago; waited ${duration(reader.waited_s)} in all.`;
}

class Readers {
  constructor() {
    this.cells = byId("cells");
    this.shown = this.chosen = null; // index of the reader whose details are shown, and of the one that was chosen
    this.stream = null;
    this.readers = [];
    this.fill = table(byId("notable"), "Readers worth a look", [
      { head: "rank", kind: "name", text: (reader) => `rank\u00a0${whole(reader.rank)}` },
      { head: "at", kind: "word", text: (reader) => reader.at },
      { head: "takes next", kind: "figure", text: (reader) => (isHere(reader) ? positionOf(reader.taken) : MISSING) },
      { head: "ready", kind: "figure", text: (reader) => whole(reader.ready) },
      { head: "behind", kind: "figure", text: (reader) => whole(reader.lag) },
      { head: "loop asked", kind: "figure", text: asked },
      { head: "state", kind: "wide", show: (place, reader) => showState(place, reader, this.state(reader)) },
    ]);
    const indexOf = (event) => [...this.cells.children].indexOf(event.target.closest(".cell"));
    this.cells.addEventListener("pointerover", (event) => this.point(indexOf(event)));
    this.cells.addEventListener("pointerleave", () => this.point(this.chosen ?? -1));
    this.cells.addEventListener("focusin", (event) => this.choose(indexOf(event)));
    this.cells.addEventListener("click", (event) => this.choose(indexOf(event)));
    this.cells.addEventListener("keydown", (event) => this.move(event));
  }

  show(stream) {
    this.stream = stream;
    this.readers = stream.readers;
    if (this.chosen >= this.readers.length) this.shown = this.chosen = null;
    set(this.cells, "data-size", SIZES.find(([most]) => this.readers.length <= most)[1]);
    each(this.cells, this.readers, () => make("div", { class: "cell", role: "option" }), (cell, reader, index) => this.cell(cell, reader, index));
    this.legend();
    this.details();
    const byRank = new Map(this.readers.map((reader) => [reader.rank, reader]));
    const notable = stream.notable.map((rank) => byRank.get(rank)).filter(Boolean);
    const more = this.readers.length - notable.length;
    if (!more) notable.sort((one, other) => one.rank - other.rank); // all are there: each keeps its place
    this.fill(notable);
    say(byId("notable-title"), more ? "Those worth a look" : "Each of them");
    say(byId("more"), more ? `and ${whole(more)} more` : "");
  }

  state(reader) {
    return stateOf(reader, this.stream);
  }

  cell(cell, reader, index) {
    sign(cell, this.state(reader));
    set(cell, "data-rank", String(reader.rank));
    set(cell, "aria-label", `rank ${reader.rank}, ${reader.at}: ${doing(reader)}`);
    set(cell, "aria-selected", String(index === this.chosen));
    set(cell, "tabindex", index === (this.chosen ?? 0) ? "0" : "-1");
  }

  legend() {
    const counts = new Map();
    for (const reader of this.readers) counts.set(this.state(reader), (counts.get(this.state(reader)) ?? 0) + 1);
    const present = [...new Set([...Object.keys(SIGNS), ...counts.keys()])].filter((state) => counts.has(state));
    const create = () => make("li", {}, make("span", { class: "cell", "aria-hidden": "true" }), make("span"));
    each(byId("states"), present, create, (item, state) => {
      sign(item.children[0], state);
      say(item.children[1], `${whole(counts.get(state))} ${state}`);
    });
  }

  details() {
    const reader = this.readers[this.shown];
    say(byId("details"), reader ? described(reader) : this.readers.length ? "Point at a reader, or choose one, for its details." : "");
  }

  point(index) {
    this.shown = index < 0 ? null : index;
    this.details();
  }

  choose(index) {
    if (index < 0) return;
    this.chosen = index;
    [...this.cells.children].forEach((cell, at) => this.cell(cell, this.readers[at], at));
    this.point(index);
  }

  /** Arrow keys go from cell to cell, as the eye does. */
  move(event) {
    const cells = [...this.cells.children], at = cells.indexOf(event.target);
    const across = cells.findIndex((cell) => cell.offsetTop > cells[0].offsetTop);
    const columns = across < 0 ? cells.length : across;
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -at, End: cells.length - 1 - at };
    const next = cells[at + steps[event.key]];
    if (!(event.key in steps)) return;
    event.preventDefault();
    next?.focus();
  }
}

