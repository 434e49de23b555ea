"use strict";
// A real fleet, first on the page: how far it is, what is wrong, who is there, and what each device holds.

const MEMBER_HEADS = ["Device", "Now", "Last seen", "Stored", "Labels", "Accuracy", "Stream", "Trouble"];
/** What stands for labels and accuracy where targets are numbers. */
const NUMBER_HEADS = { Labels: "Intervals", Accuracy: "R2" };

function drawMembers(view, troubles) {
  byId("members-section").hidden = !view.members.length && !troubles.length;
  byId("members-table").parentElement.hidden = !view.members.length;
  const online = view.members.filter((member) => member.online).length;
  byId("members-count").textContent = `${online} of ${view.members.length} online`;
  byId("members-tiles").replaceChildren(...fleetTiles(view, online, troubles));
  const all = [...troubles, ...refusedMembers(view).map((member) => `${member.name}: ${member.refused}`)];
  byId("troubles").replaceChildren(...all.map((words) => make("li", { class: "warning" }, words)));
  byId("troubles").hidden = !all.length;
  const named = (head) => (view.measure === "r2" && Object.hasOwn(NUMBER_HEADS, head) ? NUMBER_HEADS[head] : head);
  const heads = MEMBER_HEADS.map((head) => make("th", { scope: "col" }, named(head)));
  const rows = view.members.map((member) => memberRow(member, view.labels.length));
  byId("members-table").replaceChildren(
    make("table", {}, make("thead", {}, make("tr", {}, heads)), make("tbody", {}, rows)),
  );
}

function refusedMembers(view) {
  return view.members.filter((member) => member.refused != null);
}

/** What somebody looks for first: how good the model is, how far, who is there, and what is wrong. */
function fleetTiles(view, online, troubles) {
  const accuracy = view.evaluations.accuracy.filter((value) => value != null);
  const before = accuracy.length > 10 ? accuracy[accuracy.length - 11] : null;
  const change = before == null ? "so far" : `${formatPoints(last(accuracy) - before)} points over ten evaluations`;
  const wrong = troubles.length + refusedMembers(view).length;
  return [
    tile(measureName(view.measure === "r2"), formatPercent(last(accuracy)), change),
    tile("Trouble", wrong ? formatCount(wrong) : "none", wrong ? "listed below" : "all is as it should be"),
    tile("Round", formatCount(view.round), stateOf(view)),
    tile("Devices", `${online} of ${view.members.length}`, "online"),
  ];
}

/** Whether a device's stream has changed or stopped, as it last said. */
function streamOf(member) {
  if (member.silent) return "silent";
  if (member.changes == null) return NONE;
  return member.changes ? `changed ${formatCount(member.changes)} times` : "steady";
}

function memberRow(member, labels) {
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
    cells.map((cell, place) => make("td", { "data-head": MEMBER_HEADS[place + 1] }, cell)),
  );
}
