// Elements, changed in place and only where something changed. What a server says becomes text, never markup.

const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes, and children that are elements or texts. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function draw(tag, attributes = {}, text = "") {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text) element.textContent = text;
  return element;
}

function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function set(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

/** As many children as there are items, each brought up to date by ``update(child, item, index)``. */
function each(parent, items, create, update) {
  while (parent.children.length > items.length) parent.lastElementChild.remove();
  while (parent.children.length < items.length) parent.append(create());
  items.forEach((item, index) => update(parent.children[index], item, index));
}

/** A list of [name, text]. */
function pairs(list, items) {
  const flat = items.flatMap(([name, text]) => [["DT", name], ["DD", text]]);
  each(list, flat, () => make(list.children.length % 2 ? "dd" : "dt"), (child, [, text]) => say(child, text));
}

/**
 * A table inside ``place``; returns what fills it with items. Columns are {head, kind, text, show}: ``text`` tells a
 * cell's text, or ``show(cell, item)`` brings the cell up to date itself. A kind is "name", "word", "figure" or
 * "wide": narrow windows show a row as a card.
 */
function table(place, label, columns) {
  const heads = columns.map(({ head, kind = "" }) => make("th", { scope: "col", class: kind }, head));
  const body = make("tbody", { role: "rowgroup" });
  const head = make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...heads));
  place.append(make("table", { role: "table", "aria-label": label }, head, body));
  const row = () => make("tr", { role: "row" }, ...columns.map(({ head, kind = "" }) => make("td", { role: "cell", "data-label": head, class: kind })));
  return (items) => each(body, items, row, (line, item) => columns.forEach(({ text, show }, index) => {
    if (show) show(line.children[index], item);
    else say(line.children[index], text(item));
  }));
}

