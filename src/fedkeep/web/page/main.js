"use strict";
// What is chosen, what is known, and the drawing of it.

const state = {
  views: new Map(),
  comparison: { bases: [], rows: [], notes: [] },
  title: "",
  connection: "opening",
  group: null,
  across: "round",
  against: null,
  shown: "values",
  other: "",
  words: [],
  troubles: [],
  planned: 0,
  hidden: new Set(),
  method: null,
  key: null,
  device: null,
  sides: { left: null, right: null },
};
const snapshots = new Map();

const choose = (change) => (value) => {
  change(value);
  render();
};
const actions = {
  chooseGroup: choose((group) => Object.assign(state, { group, method: null, key: null, device: null })),
  chooseAcross: choose((across) => {
    state.across = across;
  }),
  chooseAgainst: choose((against) => {
    state.against = against;
  }),
  chooseShown: choose((shown) => {
    state.shown = shown;
  }),
  chooseOther: choose((other) => {
    state.other = other;
  }),
  toggleMethod: choose((method) => {
    if (!state.hidden.delete(method)) state.hidden.add(method);
  }),
  onlyMethod: choose((method) => {
    state.hidden = new Set(orderedMethods(groupViews()).filter((other) => other !== method));
  }),
  chooseMethod: choose((method) => Object.assign(state, { method, key: sameSeed(method) })),
  chooseSeed: choose((key) => {
    state.key = key;
  }),
  chooseDevice: choose((device) => {
    state.device = device;
  }),
};

const overview = new Overview(actions);
const panels = new Panels(actions);
const settings = new Settings(actions.chooseOther);
const matrix = new Matrix(actions.chooseDevice);
const devicePane = new DevicePane(actions.chooseDevice);
const gallery = new Gallery((side, method) => {
  state.sides[side] = method;
  render();
});
byId("settings").append(settings.node);
byId("matrix").append(matrix.node);
byId("device").append(devicePane.node);
byId("gallery-tools").append(...gallery.tools);
byId("gallery").append(gallery.node);

function groupViews() {
  return [...state.views.values()].filter((view) => groupName(view) === state.group);
}

/** The run of another method with the seed now looked at. */
function sameSeed(method) {
  const seed = state.views.get(state.key)?.seed;
  const runs = groupViews().filter((view) => view.method === method);
  return (runs.find((view) => view.seed === seed) ?? runs[0])?.key;
}

function deliver(update) {
  const known = new Map([...state.views, ...update.views.map((view) => [view.key, view])]);
  state.views = new Map(update.keys.filter((key) => known.has(key)).map((key) => [key, known.get(key)]));
  state.comparison = update.comparison;
  state.title = update.title;
  state.planned = update.planned ?? 0;
  state.words = update.words ?? [];
  state.troubles = update.troubles ?? [];
  render();
}

function tell(connection) {
  state.connection = connection;
  drawStatus();
}

/** Names of what fedkeep does where nothing is configured: the page opens on it. */
const DEFAULTS = ["default", "gist-shared", "balanced-reservoir"];

/** Keeps every choice valid as runs come and go. */
function settle() {
  const groups = [...new Set([...state.views.values()].map(groupName))].sort();
  if (!groups.includes(state.group)) state.group = groups[0] ?? null;
  const views = groupViews();
  const methods = orderedMethods(views);
  if (!methods.includes(state.against))
    state.against = state.comparison.bases.find((base) => methods.includes(base)) ?? methods[0] ?? null;
  if (!methods.includes(state.method)) state.method = DEFAULTS.find((name) => methods.includes(name)) ?? methods[0] ?? null;
  if (state.views.get(state.key)?.method !== state.method || !views.some((view) => view.key === state.key))
    state.key = sameSeed(state.method);
  const view = state.views.get(state.key);
  if (view && state.device == null && view.snapshots.length) [[state.device]] = view.snapshots;
  const pictured = orderedMethods(views.filter((other) => other.image));
  const random = pictured.filter(isRandom);
  if (!pictured.includes(state.sides.left)) state.sides.left = pictured[0] ?? null;
  if (!pictured.includes(state.sides.right))
    state.sides.right =
      random.find((method) => method === "reservoir") ?? random[0] ?? pictured[1] ?? pictured[0] ?? null;
  return { views, view, pictured };
}

/** The latest snapshot that is known of a device; asks for a newer one where there is one. */
function snapshotOf(view, device) {
  const round = view.snapshots.find(([number]) => number === device)?.[1];
  if (round == null) return null;
  const name = `${view.key}/${device}`;
  const known = snapshots.get(name) ?? { round: null, value: null };
  if (known.round !== round) {
    snapshots.set(name, { ...known, round });
    source.device(view.key, device).then(
      (value) => {
        snapshots.set(name, { round, value });
        schedule();
      },
      () => snapshots.delete(name),
    );
  }
  return known.value;
}

let scheduled = false;
function schedule() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(() => {
    scheduled = false;
    render();
  });
}

function render() {
  const { views, view, pictured } = settle();
  byId("empty").hidden = Boolean(view);
  byId("content").hidden = !view;
  byId("title").textContent = state.title;
  document.title = state.title ? `${state.title} · fedkeep` : "fedkeep";
  drawStatus();
  if (!view) return;
  overview.update(state, views, methodStyles(orderedMethods([...state.views.values()])));
  drawWords();
  panels.update(views, view);
  settings.update(views, view, views.find((other) => other.key === state.other && other.key !== view.key) ?? null);
  drawMembers([...state.views.values()], view, state.troubles);
  matrix.update(view, state.device);
  devicePane.update(view, state.device, snapshotOf(view, state.device));
  drawGallery(views, view, pictured);
}

/** An advice, above all: what to do stands first, worries last. */
function drawWords() {
  byId("advice").hidden = !state.words.length;
  byId("advice-words").replaceChildren(
    ...state.words.map((line) => make("p", { class: line.startsWith("- ") ? "worry" : null }, line.replace(/^- /, ""))),
  );
}

function drawGallery(views, view, pictured) {
  byId("gallery-section").hidden = !pictured.length;
  if (!pictured.length) return;
  const pair = [state.sides.left, state.sides.right].map((method) => {
    const runs = views.filter((other) => other.method === method);
    const chosen = runs.find((other) => other.seed === view.seed) ?? runs[0];
    const devices = chosen.snapshots.slice(0, GALLERY_DEVICES).map(([device]) => snapshotOf(chosen, device));
    return { view: chosen, snapshots: devices.filter(Boolean) };
  });
  gallery.update(pictured, pair);
}

function drawStatus() {
  const node = byId("status");
  const views = [...state.views.values()];
  const going = views.filter((view) => stateOf(view) === "running").length;
  const finished = views.filter((view) => view.finished).length;
  const total = Math.max(views.length, state.planned);
  const done = finished === total && finished > 0;
  const words = {
    live: going
      ? `Live, ${going} running, ${finished} of ${plural(total, "run", "runs")} finished`
      : done
        ? `Finished, ${plural(total, "run", "runs")}`
        : views.length
          ? `Stopped, ${finished} of ${plural(total, "run", "runs")} finished`
          : "Waiting for a run",
    opening: "Connecting…",
    lost: "Reconnecting…",
    report: `Report of ${plural(views.length, "run", "runs")}`,
  }[state.connection];
  node.className = state.connection === "live" && !going && views.length ? "done" : state.connection;
  if (node.textContent !== words) node.textContent = words;
}

const THEMES = { auto: "◐ Auto", light: "☀ Light", dark: "☾ Dark" };
function applyTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = THEMES[theme];
  byId("theme").setAttribute("aria-label", `Colours: ${theme}. Change`);
  try {
    localStorage.setItem("fedkeep-theme", theme);
  } catch {
    // a page opened from a file may have no storage; the choice then lasts until it is closed
  }
}

function storedTheme() {
  try {
    const theme = localStorage.getItem("fedkeep-theme");
    return Object.hasOwn(THEMES, theme) ? theme : "auto";
  } catch {
    return "auto";
  }
}

byId("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  applyTheme(names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length]);
});
applyTheme(storedTheme());
setInterval(drawStatus, 5000);
const source = byId("snapshot")
  ? new ReportSource((update) => setTimeout(() => deliver(update)), tell)
  : new LiveSource(deliver, tell);
