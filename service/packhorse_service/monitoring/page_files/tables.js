// Sources, loaders, counts, the contract, and events.

const STALLED_BY = { slow_peer: "a slow peer", network: "the network", trainer: "the trainer" };

/** A bar as long as its share, and a mark where its weight is. */
function shareOf(cell, { share, weight }) {
  if (!cell.firstChild) cell.append(make("span", { class: "share", "aria-hidden": "true" }, make("i"), make("u")), make("span"));
  const [bar, text] = cell.children;
  bar.children[0].style.width = `${within(100 * share, 0, 100)}%`;
  bar.children[1].style.left = `${within(100 * weight, 0, 100)}%`;
  say(text, ` ${percent(share)}`);
}

function epochOf(cell, { epoch, epochs, progress }) {
  if (!cell.firstChild) cell.append(make("progress", { "aria-label": "of this epoch" }), make("span"));
  const [bar, text] = cell.children;
  bar.value = within(progress, 0, 1);
  say(text, ` ${whole(epoch + 1)}${epochs === null ? "" : ` of ${whole(epochs)}`}, ${percent(progress, 0)}`);
}

const lostOf = ({ lost_tokens, lost_samples }) =>
  `${lost_tokens ? `${number(lost_tokens)} tokens` : "0"}${lost_samples ? `, ${counted(lost_samples, "whole sample")}` : ""}`;

const SOURCES = [
  { head: "source", kind: "name", text: ({ name }) => name },
  { head: "share", show: shareOf },
  { head: "weight", kind: "figure", text: ({ weight }) => percent(weight) },
  { head: "samples", kind: "figure", text: ({ samples }) => whole(samples) },
  { head: "tokens", kind: "figure", text: ({ tokens }) => number(tokens) },
  { head: "epoch", show: epochOf },
  { head: "pending", kind: "figure", text: ({ pending }) => number(pending) },
  { head: "skipped", kind: "figure", text: ({ skipped }) => whole(skipped) },
  { head: "over length", kind: "wide", text: lostOf },
  { head: "unsupervised", kind: "figure", text: ({ unsupervised_tokens }) => number(unsupervised_tokens) },
];

function loaderPairs({ workers, busy, restarts, waits_for }) {
  const where = [["processes", workers ? whole(workers) : "none: the server loads itself"]];
  const work = workers ? [["busy", percent(busy, 0)], ["replaced", restarts ? `${whole(restarts)}, which died` : "none"]] : [];
  return [...where, ...work, ["waits for", waits_for || "nothing"]];
}

const listed = (entries, text) => entries.map(text).join(", ") || "none";

function countPairs(stream) {
  return [
    ["steps", `${whole(stream.steps)} made, ${whole(stream.delivered_steps)} taken by every reader`],
    ["micro-batches", `${whole(stream.microbatches)} made, ${whole(stream.replayed)} sent again`],
    ["tokens", `${number(stream.tokens)}, ${number(stream.loss_tokens)} of them in the loss`],
    ["slots", `${number(stream.slots)}, ${percent(stream.slots ? stream.tokens / stream.slots : null)} of them useful`],
    ["attempt", `${whole(stream.attempt)}, ${stream.phase} for ${duration(stream.phase_s)}`],
    ["reconnects", whole(stream.reconnects)],
    ["refused", listed(Object.entries(stream.rejects), ([rule, count]) => `${whole(count)} by ${rule}`)],
    ["stalled", listed(Object.entries(stream.stalled_s), ([cause, seconds]) => `${duration(seconds)} by ${STALLED_BY[cause] ?? cause}`)],
    ["snapshot", bytes(stream.snapshot_bytes)],
  ];
}

const settings = (mapping) => Object.entries(mapping).map(([name, value]) => [name, value === null ? MISSING : isNumber(value) ? figure(value) : String(value)]);

function showEvents(events) {
  const create = () => make("li", {}, make("b"), make("span"), make("span", { class: "dim" }));
  each(byId("events"), events, create, (item, { level, text, age_s }) => {
    set(item, "data-level", level.toLowerCase() === "error" ? "bad" : "notice");
    say(item.children[0], level);
    say(item.children[1], ` ${text} `);
    say(item.children[2], `${duration(age_s)} ago`);
  });
}

