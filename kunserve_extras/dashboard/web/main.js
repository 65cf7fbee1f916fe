// Ties the feed to the views.

import { Charts } from "./charts.js";
import { KeyedList, byId, element, setAttribute, setText } from "./elements.js";
import { Feed } from "./feed.js";
import { GroupCard, blockBytes } from "./groups.js";
import { History } from "./history.js";
import { InstanceCard } from "./instances.js";
import { Tiles } from "./tiles.js";
import { TransitionTable } from "./transitions.js";
import { clock } from "./units.js";

const MOST_CARDS = 64;

const history = new History();
const tiles = new Tiles(byId("tiles"));
const instances = new KeyedList(byId("instances"), (id) => new InstanceCard(id));
const groups = new KeyedList(byId("groups"), (id) => new GroupCard(id));
const table = new TransitionTable(byId("transitions-head"), byId("transitions"));
const charts = new Charts(byId("charts"), byId("spans"), history, (spanS) => feed.wantHistory(spanS));

function showStatus(kind, text) {
  setAttribute(byId("status"), "data-kind", kind);
  setText(byId("status"), text);
}

/** At most `MOST_CARDS` of a list that may have thousands; the rest is counted. */
function shorten(items, note, noun) {
  const left = items.length - MOST_CARDS;
  note.hidden = left <= 0;
  if (left > 0) setText(note, `and ${left.toLocaleString("en")} more ${noun}`);
  return items.slice(0, MOST_CARDS);
}

/** Instance id -> its group, stage and position. */
function placesIn(state) {
  const places = new Map();
  for (const group of state.groups) {
    group.stages.forEach((stage, index) => places.set(stage.instance_id, { group, stage, index }));
  }
  return places;
}

/** Group id -> the transition that it stands in. */
function busyGroups(state) {
  const busy = new Map();
  for (const transition of state.transitions) {
    if (transition.finished_s !== null) continue;
    for (const group of [...transition.groups_before, ...transition.groups_after]) {
      busy.set(group.group_id, transition);
    }
  }
  return busy;
}

function showCluster(state) {
  const places = placesIn(state);
  const shownInstances = state.instances.map((instance) => ({
    instance,
    place: places.get(instance.spec.instance_id),
  }));
  instances.update(
    shorten(shownInstances, byId("more-instances"), "instances"),
    ({ instance }) => instance.spec.instance_id,
  );
  const busy = busyGroups(state);
  const formingS = new Map(state.forming.map((one) => [one.group_id, state.now_s - one.since_s]));
  const shownGroups = state.groups.map((group) => ({
    group,
    blockBytes: blockBytes(state),
    transition: busy.get(group.group_id),
    formingS: formingS.get(group.group_id),
    bubbles: history.latest.bubbles.get(group.group_id) ?? null,
  }));
  groups.update(
    shorten(shownGroups, byId("more-groups"), "groups"),
    ({ group }) => group.group_id,
  );
}

/** What an operator should know before anything else. */
function statusOf(state) {
  const parts = ["live"];
  if (state.paused) parts.push("drops paused");
  if (state.is_scale_up_wanted) parts.push("more instances wanted");
  return parts.join(", ");
}

/** Why nothing is done about groups whose load asks for something. */
function showReasons(state) {
  const lines = state.reasons ?? [];
  byId("reasons").hidden = lines.length === 0;
  byId("reasons").replaceChildren(...lines.slice(0, MOST_CARDS).map((line) => element("li", {}, line)));
}

function showTransitions() {
  const records = history.newestTransitions();
  byId("no-transitions").hidden = records.length > 0;
  byId("transitions-table").hidden = records.length === 0;
  table.update(records, history.unixOffsetS);
}

async function showModel() {
  const models = await feed.fetch("v1/models");
  setText(byId("model"), models.data[0].id);
  document.title = `${models.data[0].id} · KunServe`;
}

const listener = {
  data({ state, timeline }) {
    byId("lost").hidden = true;
    byId("key").hidden = true;
    byId("main").hidden = false;
    document.body.classList.remove("stale");
    history.add(timeline);
    if (!history.latest) return; // the server has just started: its first sample is due
    showStatus("live", statusOf(state));
    byId("empty").hidden = history.hasTraffic;
    tiles.update(state, history, blockBytes(state));
    showCluster(state);
    showReasons(state);
    charts.update(blockBytes(state));
    showTransitions();
  },

  restarted() {
    history.clear();
    showModel().catch(() => {}); // the name is an ornament; the next run of the server asks again
  },

  lost(reason) {
    if (!byId("lost").hidden) return;
    showStatus("lost", "connection lost");
    document.body.classList.add("stale");
    const when = clock(Date.now() / 1000);
    setText(byId("lost"), `Connection lost at ${when} (${reason}). What you see is old; trying again every second.`);
    byId("lost").hidden = false;
  },

  keyNeeded(wasWrong) {
    showStatus("waiting", "API key needed");
    setText(byId("key-wrong"), wasWrong ? "That key is wrong." : "");
    byId("lost").hidden = true;
    byId("key").hidden = false;
    byId("key-text").focus();
  },
};

const feed = new Feed(listener);
byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  feed.useKey(byId("key-text").value);
});
feed.start();
