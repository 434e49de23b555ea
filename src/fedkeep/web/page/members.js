"use strict";
// The devices of a real fleet: who is there, what each holds, and why one's report did not count.

const MEMBER_HEADS = ["Device", "Now", "Last seen", "Stored", "Labels", "Accuracy", "Trouble"];
/** What stands for labels and accuracy where targets are numbers. */
const NUMBER_HEADS = { Labels: "Intervals", Accuracy: "R2" };

function drawMembers(view) {
  byId("members-section").hidden = !view.members.length;
  if (!view.members.length) return;
  const online = view.members.filter((member) => member.online).length;
  byId("members-count").textContent = `${online} of ${view.members.length} online`;
  const named = (head) => (view.measure === "r2" && Object.hasOwn(NUMBER_HEADS, head) ? NUMBER_HEADS[head] : head);
  const heads = MEMBER_HEADS.map((head) => make("th", { scope: "col" }, named(head)));
  const rows = view.members.map((member) => memberRow(member, view.labels.length));
  byId("members-table").replaceChildren(
    make("table", {}, make("thead", {}, make("tr", {}, heads)), make("tbody", {}, rows)),
  );
}

function memberRow(member, labels) {
  const ago = member.seen == null ? NONE : `${formatDuration(Math.max(0, Date.now() / 1000 - member.seen))} ago`;
  const cells = [
    member.online ? "online" : "away",
    ago,
    member.stored == null ? NONE : `${formatCount(member.stored)} of ${formatCount(member.capacity)}`,
    member.labels == null ? NONE : `${member.labels} of ${labels}`,
    formatPercent(member.accuracy),
    member.refused ?? NONE,
  ];
  return make(
    "tr",
    {},
    make("th", { scope: "row" }, member.name),
    cells.map((cell) => make("td", {}, cell)),
  );
}
