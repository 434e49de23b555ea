"use strict";
// A real fleet, first on the page: how far it is, what is wrong, who is there, and what each device holds.

const MEMBER_HEADS = ["Device", "Now", "Last seen", "Stored", "Labels", "Accuracy", "Stream", "Trouble"];
/** What stands for labels and accuracy where targets are numbers. */
const NUMBER_HEADS = { Labels: "Intervals", Accuracy: "R2" };

/** The run of the fleet among those shown: the one looked at if it has devices, else the first that has. */
function fleetView(views, view) {
  return view.members.length ? view : (views.find((other) => other.members.length) ?? view);
}

function drawMembers(views, looked, troubles) {
  const view = fleetView(views, looked);
  byId("members-section").hidden = !view.members.length && !troubles.length;
  byId("members-table").parentElement.hidden = !view.members.length;
  const online = view.members.filter((member) => member.online).length;
  byId("members-count").textContent = `${online} of ${view.members.length} ${onlineWords(view)}`;
  byId("members-tiles").replaceChildren(...fleetTiles(views, view, online, troubles));
  const all = [...troubles, ...refusedMembers(view).map((member) => `${member.name}: ${member.refused}`)];
  byId("troubles").replaceChildren(...all.map((words) => make("li", { class: "warning" }, words)));
  byId("troubles").hidden = !all.length;
  const named = (head) => (view.measure === "r2" && Object.hasOwn(NUMBER_HEADS, head) ? NUMBER_HEADS[head] : head);
  const heads = MEMBER_HEADS.map((head) => make("th", { scope: "col" }, named(head)));
  const rows = view.members.map((member) => memberRow(member, view.labels.length, named));
  byId("members-table").replaceChildren(
    make("table", {}, make("thead", {}, make("tr", {}, heads)), make("tbody", {}, rows)),
  );
}

function refusedMembers(view) {
  return view.members.filter((member) => member.refused != null);
}

/** What somebody looks for first: how good the model is, how far, who is there, and what is wrong. */
function fleetTiles(views, view, online, troubles) {
  const accuracy = view.evaluations.accuracy.filter((value) => value != null);
  const before = accuracy.length > 10 ? accuracy[accuracy.length - 11] : null;
  const change = before == null ? "so far" : `${formatPoints(last(accuracy) - before)} points over ten evaluations`;
  const wrong = troubles.length + refusedMembers(view).length;
  return [
    tile(measureName(view.measure === "r2"), formatPercent(last(accuracy)), change),
    ...gainTiles(views, view),
    tile("Trouble", wrong ? formatCount(wrong) : "none", wrong ? "listed below" : "all is as it should be"),
    tile("Round", formatCount(view.round), stateOf(view)),
    tile("Devices", `${online} of ${view.members.length}`, onlineWords(view)),
  ];
}

/** Whether a device's stream has changed or stopped, as it last said. */
function streamOf(member) {
  if (member.silent) return "silent";
  if (member.changes == null) return NONE;
  return member.changes ? `changed ${formatCount(member.changes)} times` : "steady";
}

/** A server that has ended knows of no device any more. */
function onlineWords(view) {
  return stateOf(view) === "running" ? "online" : "online when the server last looked";
}

const GAIN_OVER = 10;

/** How far the fleet is ahead of a run without devices that is played beside it, over the last rounds both have. */
function gainTiles(views, view) {
  const twin = views.find((other) => other !== view && other.task === view.task && !other.members.length);
  if (!twin) return [];
  const { round, accuracy } = view.evaluations;
  const gains = round
    .map((at, place) => [accuracy[place], valueAt(twin.evaluations.round, twin.evaluations.accuracy, at)])
    .filter(([ours, theirs]) => ours != null && theirs != null)
    .map(([ours, theirs]) => ours - theirs)
    .slice(-GAIN_OVER);
  if (!gains.length) return [];
  const words = `points, mean of ${plural(gains.length, "evaluation", "evaluations")}`;
  return [tile(`Against ${twin.method}`, formatPoints(mean(gains)), words)];
}

function memberRow(member, labels, named) {
  const ago = member.seen == null ? NONE : `${formatDuration(Math.max(0, Date.now() / 1000 - member.seen))} ago`;
  const cells = [
    member.online ? "online" : "away",
    ago,
    member.stored == null ? NONE : `${formatCount(member.stored)} of ${formatCount(member.capacity)}`,
    member.labels == null ? NONE : `${member.labels} of ${labels}`,
    formatPercent(member.accuracy),
    streamOf(member),
    member.refused ?? NONE,
  ];
  return make(
    "tr",
    {},
    make("th", { scope: "row" }, member.name),
    cells.map((cell, place) => make("td", { "data-head": named(MEMBER_HEADS[place + 1]) }, cell)),
  );
}
