// The page: asks for the status every other second, and shows it. A server that is gone is said so, and may come back.

const INTERVAL_MS = 2000, HIDDEN_MS = 30000, PATIENCE_MS = 5000;
const STALE_S = 5; // the server's loop turns many times a second
const LEVELS = { good: "✓", notice: "…", bad: "✕" };

const page = { status: null, receivedMs: performance.now(), error: "", timer: 0 };
const readers = new Readers(), packs = new Packs();
const plots = PLOTS.map((plot) => new Plot(byId("plots"), plot));
const fillSources = table(byId("sources"), "Sources", SOURCES);

const addressOf = (stream) => `#${encodeURIComponent(stream.name)}`;
/** The stream that the address names, or the first. */
const current = () => page.status?.streams.find((stream) => addressOf(stream) === location.hash) ?? page.status?.streams[0];
const silence = () => (performance.now() - page.receivedMs) / 1000;

/** {level, word, sentence} of what is shown: the stream's own, if the server answers and its loop turns. */
function headline(stream) {
  const { status, error } = page;
  if (error && status) return { level: "bad", word: "gone", sentence: `the server has not answered for ${duration(silence())}; it said last: ${stream?.headline.word ?? ""}` };
  if (error) return { level: "bad", word: "no status", sentence: error };
  if (!status) return { level: "notice", word: "connecting", sentence: "" };
  if (status.age_s > STALE_S) return { level: "bad", word: "stuck", sentence: `the server's loop has not turned for ${duration(status.age_s)}` };
  if (!stream) return { level: "notice", word: "starting", sentence: "no stream is there yet" };
  return stream.headline;
}

function showHeadline(stream) {
  const { level, word, sentence } = headline(stream);
  set(byId("headline"), "data-level", level);
  say(byId("sign"), LEVELS[level] ?? "");
  say(byId("word"), word);
  say(byId("sentence"), sentence);
  say(byId("age"), page.status ? `as of ${duration(page.status.age_s + silence())} ago` : "");
  document.body.classList.toggle("gone", Boolean(page.error));
  const title = `${LEVELS[level] ?? ""} ${word}${stream ? `: ${stream.name}` : ""} · Packhorse`;
  if (document.title !== title) document.title = title;
  const announced = byId("announced"); // what changes all the time is not read out all the time
  if (announced.dataset.word !== word) {
    announced.dataset.word = word;
    say(announced, `${word}: ${sentence}`);
  }
}

function showTabs(streams, shown) {
  const tabs = byId("streams");
  tabs.hidden = streams.length < 2;
  const create = () => make("button", { role: "tab", type: "button", "aria-controls": "stream" }, make("b"), make("span"));
  each(tabs, streams, create, (tab, stream) => {
    set(tab, "data-level", stream.headline.level);
    set(tab, "aria-selected", String(stream === shown));
    set(tab, "tabindex", stream === shown ? "0" : "-1");
    say(tab.children[0], stream.name);
    say(tab.children[1], ` ${LEVELS[stream.headline.level] ?? ""} ${stream.headline.word}`);
  });
}

function tiles(stream) {
  const minute = stream.history.filter((moment) => moment.age_s <= 60).map((moment) => moment.tokens_per_s ?? 0);
  const waiting = stream.readers.filter(({ state }) => state === "waiting" || state === "forming").length;
  return [
    [number(mean(minute)), "tokens/s, the last minute"],
    [percent(stream.useful_fill), `useful fill; ${percent(stream.fill)} with alignment padding`],
    [whole(stream.step), "the step that the slowest reader stands in"],
    [`${whole(stream.held)} of ${whole(stream.steps_ahead + 1)}`, "steps held, not yet taken by all"],
    [`${whole(waiting)} of ${whole(stream.readers.length)}`, "readers waiting now"],
  ];
}

function showStream(stream) {
  each(byId("tiles"), tiles(stream), () => make("section", {}, make("b"), make("span", { class: "dim" })), (tile, [value, name]) => {
    say(tile.children[0], value);
    say(tile.children[1], name);
  });
  readers.show(stream);
  for (const plot of plots) plot.show(stream.history);
  packs.show(stream.packs);
  fillSources(stream.sources);
  pairs(byId("loaders"), loaderPairs(stream.loaders));
  pairs(byId("counts"), countPairs(stream));
  pairs(byId("contract"), settings(stream.contract));
  pairs(byId("derived"), settings(stream.derived));
}

function show() {
  const { status } = page;
  const stream = current();
  showHeadline(stream);
  byId("said").hidden = !stream;
  if (!status) return;
  say(byId("server"), `${status.version} at ${status.endpoint}, up ${duration(status.uptime_s)}, ${counted(status.connections, "connection")}`);
  showTabs(status.streams, stream);
  const events = status.events.length ? status.events : [{ level: "none", text: "so far", age_s: null }];
  showEvents(events);
  if (stream) showStream(stream);
}

async function ask() {
  const response = await fetch("status.json", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
  if (!response.ok) throw new Error(`the server answers ${response.status}: ${(await response.text()).slice(0, 200)}`);
  const status = await response.json();
  if (page.status && page.status.version !== status.version) location.reload(); // its page may be another
  page.status = status;
  page.receivedMs = performance.now();
}

async function poll() {
  clearTimeout(page.timer);
  try {
    await ask();
    page.error = "";
  } catch (error) {
    page.error = error.message;
  }
  page.timer = setTimeout(poll, document.visibilityState === "hidden" ? HIDDEN_MS : INTERVAL_MS);
  show(); // the last: a status that could not be shown keeps nobody from asking for the next
}

function choose(tab) {
  history.replaceState(null, "", addressOf({ name: tab.children[0].textContent }));
  show();
  tab.focus();
}

byId("streams").addEventListener("click", (event) => {
  const tab = event.target.closest("[role=tab]");
  if (tab) choose(tab);
});
byId("streams").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const tabs = [...event.currentTarget.children];
  if (step) choose(tabs[(tabs.indexOf(event.target) + step + tabs.length) % tabs.length]);
});
document.addEventListener("visibilitychange", () => { if (document.visibilityState === "visible") poll(); });
setInterval(() => showHeadline(current()), 1000);
poll();
