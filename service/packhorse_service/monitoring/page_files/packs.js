// The last packs as pictures: a bar a row, its segments in two shades, their padding hatched, the rest empty.

const HATCH = "hatch";

function hatching() {
  const pattern = draw("pattern", { id: HATCH, width: 4, height: 4, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
  pattern.append(draw("line", { class: "hatch", x1: 0, x2: 0, y1: 0, y2: 4 }));
  const holder = draw("svg", { width: 0, height: 0, style: "position: absolute", "aria-hidden": "true" });
  holder.append(pattern);
  return holder;
}

/** A rectangle from ``begin`` to ``end``; a share of the row, so that it needs no drawing anew when the window changes. */
function slots(pack, kind, begin, end) {
  const from = within(begin, 0, pack.width), to = within(end, from, pack.width);
  return draw("rect", { ...kind, x: `${(100 * from) / pack.width}%`, width: `${(100 * (to - from)) / pack.width}%`, height: "100%" });
}

function segments(pack) {
  let begin = 0;
  return pack.padded_lengths.flatMap((padded, index) => {
    const length = Math.min(pack.lengths[index] ?? padded, padded);
    const drawn = [slots(pack, { class: index % 2 ? "even" : "odd" }, begin, begin + length)];
    if (padded > length) drawn.push(slots(pack, { fill: `url(#${HATCH})` }, begin + length, begin + padded));
    begin += padded;
    return drawn;
  });
}

function packInWords(pack) {
  const useful = sum(pack.lengths), padded = sum(pack.padded_lengths);
  const parts = [`${percent(useful / pack.width)} useful`, `${percent((padded - useful) / pack.width)} alignment padding`,
    `${percent(1 - padded / pack.width)} empty`];
  return `${counted(pack.lengths.length, "segment")} in ${whole(pack.width)} slots: ${parts.join(", ")}`;
}

class Packs {
  constructor() {
    this.place = byId("packs");
    this.drawn = "";
    document.body.append(hatching());
  }

  show(packs) {
    const now = JSON.stringify(packs);
    if (now === this.drawn) return;
    this.drawn = now;
    byId("packs-section").hidden = !packs.length;
    this.place.replaceChildren(...packs.filter((pack) => pack.width > 0).map((pack) => this.row(pack)));
  }

  row(pack) {
    const bar = draw("svg", { role: "img", "aria-label": packInWords(pack), ...(pack.filler ? { class: "filler" } : {}) });
    bar.append(draw("title", {}, packInWords(pack)), ...segments(pack));
    const label = `dp${pack.rank} · ${whole(pack.index)}${pack.filler ? " (filler)" : ""}`;
    return make("div", { class: "pack" }, make("span", {}, label), bar, make("span", {}, percent(sum(pack.lengths) / pack.width)));
  }
}

