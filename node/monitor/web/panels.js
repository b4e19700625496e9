// The summary, alarms, network, trust, this node, and the log of events.

import { DASH, bytes, clock, count, duration, el, empty, fill, fixed, flops, known, percent, say, seconds, short, small, table } from "./text.js";

const LOGGED = 60;
const JOIN_STEPS = 6;
const NAMED = 4; // peers in one line
const ENDLESS = 1e6; // rounds of a run that only its operators end
const KINDS = {
  gradients: "pseudo-gradients",
  parameters: "parameters, in pairs",
  state: "state for joiners",
  control: "rounds and presence",
  dht: "directory (DHT)",
  relay: "relayed for others",
};
const REASONS = {
  malformed: "not well-formed",
  signature: "bad signature",
  contradiction: "signed two things that exclude each other",
  stale: "too old, or meant for elsewhere",
  late: "not delivered in time",
  crowded: "too many identities from one address",
  "non-finite": "not finite",
  other: "other",
};
const STRANGERS = {
  garbage: "did not speak our protocol",
  handshake: "proved no identity",
  limit: "over the limit of connections",
  request: "requests answered with an error",
};

/** Tiles that are made once and then only change their words. */
class Stats {
  constructor() {
    this.host = document.querySelector("#stats");
    this.tiles = new Map();
  }
  set(key, name, value, note = "", tone = "") {
    let tile = this.tiles.get(key);
    if (!tile) {
      tile = { name: el("dt"), value: el("dd", { class: "value" }), note: el("dd", { class: "note" }), box: null };
      tile.box = el("div", {}, tile.name, tile.value, tile.note);
      this.tiles.set(key, tile);
      this.host.append(tile.box);
    }
    tile.box.dataset.tone = tone;
    say(tile.name, name);
    say(tile.value, value);
    say(tile.note, note);
    return tile;
  }
}

export class Panels {
  constructor() {
    this.stats = new Stats();
    this.log = el("ol", { class: "log" });
    fill(document.querySelector("#log .body"), el("div", { class: "scroll tall", tabindex: 0, role: "region", "aria-label": "Newest events" }, this.log));
    this.alarmed = "";
  }

  draw(store) {
    this.summary(store);
    this.joins(store.state);
    this.alarms(store.state);
    this.agreement(store);
    this.fragments(store.state);
    this.network(store.state.network);
    this.trust(store.state);
    this.node(store);
    this.events(store);
  }

  /** How far joining has come, while it lasts. */
  joins(state) {
    const card = document.querySelector("#joining");
    card.hidden = !state.join.length || !["starting", "joining"].includes(state.status);
    if (card.hidden) return;
    const shape = JSON.stringify(state.join);
    if (shape === this.joined) return;
    this.joined = shape;
    fill(card.querySelector(".body"), el("ol", { class: "facts join-steps" }, ...state.join.map((step) => el("li", {}, el("b", {}, `${step.step}/${JOIN_STEPS} ${step.name}`), el("span", {}, `${step.ok ? "" : "▲ "}${step.text}`)))));
  }

  summary(store) {
    const { state, columns } = store;
    const run = state.run;
    const done = state.rounds.committed;
    const total = run?.total_rounds ?? 0;
    const ends = total > 0 && total < ENDLESS;
    say(document.querySelector("#run"), run?.label ?? "No run yet");
    const about = [state.node.name || short(state.node.peer), state.node.role, state.status, run?.parameters ? `${count(run.parameters)} parameters` : "", run ? `run ${run.id.slice(0, 12)}` : "", `atoll ${state.node.version}`];
    say(document.querySelector("#whose"), about.filter(Boolean).join(" · "));
    document.title = `${state.alarms.length ? "▲ " : ""}${ends ? `${done}/${total} · ` : ""}${run?.label ?? "Atoll"}`;
    const live = state.peers.filter((p) => p.role === "island" && ["active", "joining"].includes(p.status));
    const tile = this.stats.set("round", "Round", total ? `${done.toLocaleString("en")}` : DASH, ends ? `of ${total.toLocaleString("en")}` : total ? "until it is stopped" : "no run yet");
    if (ends) {
      if (!tile.bar) tile.box.append((tile.bar = el("dd", {}, el("progress", { max: 1, "aria-label": "Rounds done" }))));
      tile.bar.firstChild.value = Math.min(1, done / total);
    }
    this.stats.set("eta", "Time left", known(state.training.eta_s) ? duration(state.training.eta_s) : DASH, known(state.training.eta_s) ? `ends about ${new Date((state.time + state.training.eta_s) * 1000).toLocaleString("en-GB", { hour: "2-digit", minute: "2-digit", ...(state.training.eta_s > 43200 ? { day: "numeric", month: "short" } : {}) })}` : total && !ends ? "this run has no end" : done >= total && total ? "the run is over" : "known after two rounds");
    const step = state.training.step;
    const newest = store.rounds.at(-1); // columns may have older ones mixed with what they know last
    const last = (name) => columns[name].findLastIndex(known); // as after a restart
    const column = (name, tell) => (store.mixed(last(name)) ? "≈ " : "") + tell(columns[name][last(name)]);
    const validation = state.training.validation_loss ?? columns.validation_loss[last("validation_loss")];
    const shown = known(state.training.validation_loss) ? fixed(validation, 3) : column("validation_loss", (value) => fixed(value, 3));
    const begin = columns.validation_loss.findIndex(known);
    const first = columns.validation_loss[begin];
    const training = `training ${newest || step ? fixed(newest?.loss ?? step?.loss, 3) : column("loss", (value) => fixed(value, 3))}`;
    this.stats.set("loss", "Validation loss", shown, known(validation) && known(first) && first !== validation ? `from ${store.mixed(begin) ? "about " : ""}${fixed(first, 3)} · ${training}` : training);
    const speed = live.reduce((sum, p) => sum + p.tokens_per_second, 0);
    const claimed = () => state.peers.reduce((sum, p) => sum + p.total_tokens, 0); // in pairs nobody certifies any
    this.stats.set("tokens", store.ownStates ? "Claimed tokens" : "Tokens merged", count(store.ownStates ? claimed() : state.merged_tokens), `${count(speed)} tokens/s together, while computing`);
    const same = live.filter((p) => p.agrees === true).length;
    const differ = live.filter((p) => p.agrees === false).length;
    this.stats.set("peers", "Islands", `${live.length}`, `${live.filter((p) => p.status === "active").length} active, ${live.filter((p) => p.status === "joining").length} joining`);
    if (store.ownStates) this.stats.set("agree", "State agrees", DASH, "each island has its own: they meet in pairs", "");
    else this.stats.set("agree", "State agrees", live.length ? percent(same / live.length) : DASH, differ ? `✕ ${differ} at this round differ` : same === live.length ? "bit for bit, all live islands" : `${live.length - same} at another round`, differ ? "bad" : "");
    const c = state.consensus;
    const apart = last("consensus");
    if (!c && apart >= 0) this.stats.set("consensus", "Consensus", column("consensus", small), `from the mean before round${store.mixed(apart) ? "s" : ""} ${store.span(apart)}`);
    else this.stats.set("consensus", "Consensus", known(c?.before) ? small(c.before) : DASH, known(c?.before) ? `from the mean, ${small(c.after)} after the merge${known(c.contraction) ? `, ${percent(c.contraction)} of it` : ""}` : "takes two islands");
    this.stats.set("use", "Computing", newest ? percent(newest.utilisation) : column("utilisation", percent), step ? `${count(step.tokens_per_second)} tokens/s here, while computing` : state.node.role === "island" ? "no inner step yet" : "this node trains nothing");
  }

  alarms(state) {
    const unwell = state.status === "active" ? state.health.reasons.map((what) => ({ kind: "health", level: "warning", what: `This node is not healthy: ${what}.`, fix: "Its newest events are below; on its machine, node status and node doctor --no-network say more, and logs/ in its state directory has the trainer's words." })) : [];
    const all = [...state.alarms, ...unwell];
    const text = JSON.stringify(all.map((a) => [a.kind, a.level, a.peers]));
    const host = document.querySelector("#alarms");
    if (text === this.alarmed) {
      all.forEach((alarm, i) => ["what", "fix"].forEach((part) => say(host.children[i].querySelector(`.${part}`), alarm[part])));
      return;
    }
    this.alarmed = text;
    // read out when it comes, and not again with each second that its text counts
    fill(
      host,
      ...all.map((alarm) =>
        el("div", { class: `alarm ${alarm.level}` }, el("span", { class: "mark", "aria-hidden": "true" }, alarm.level === "critical" ? "✕" : "▲"), el("p", { "aria-live": "off" }, el("strong", { class: "sr" }, alarm.level === "critical" ? "Alarm: " : "Warning: "), el("strong", { class: "what" }, alarm.what), " ", el("span", { class: "fix" }, alarm.fix))),
      ),
    );
  }

  agreement(store) {
    const host = document.querySelector("#consensus .agreement");
    const live = store.state.peers.filter((p) => p.role === "island" && ["active", "joining"].includes(p.status));
    const shape = JSON.stringify(live.map((p) => [p.peer, p.agrees, p.round]));
    if (shape === this.agreed) return;
    this.agreed = shape;
    if (store.ownStates) {
      fill(host, el("p", {}, "Islands meet in pairs, and each has a state of its own."));
      return;
    }
    const same = live.filter((p) => p.agrees === true).length;
    const marks = live.map((p) => el("li", { class: p.agrees === false ? "differs" : p.agrees ? "same" : "other", title: `${store.names.of(p.peer)}, round ${p.round}` }, p.agrees === false ? "✕" : p.agrees ? "✓" : "○", el("span", { class: "sr" }, ` ${store.names.of(p.peer)} ${p.agrees === false ? "has another state" : p.agrees ? "has the same state" : "is at another round"}`)));
    fill(host, live.length ? el("p", {}, el("b", {}, `${same} of ${live.length}`), ` live islands have this node's state, bit for bit`) : empty("No live island."), el("ul", { class: "marks" }, ...marks));
  }

  /** Where each fragment stands; a model that is merged as a whole has no such panel. */
  fragments(state) {
    const card = document.querySelector("#fragments");
    const all = state.fragments ?? [];
    card.hidden = !all.some((f) => f.fragments > 1);
    if (card.hidden) return;
    const head = Math.max(...all.map((f) => f.round));
    const age = (f) => `${duration(Math.max(0, state.time - f.time))} ago`;
    const shape = JSON.stringify(all.map((f) => [f.fragment, f.round, f.agreeing, f.live, f.outcome]));
    if (shape === this.fragmented) {
      card.querySelectorAll("td.age").forEach((cell, i) => say(cell, age(all[i])));
      return;
    }
    this.fragmented = shape;
    const rows = all.map((f) => {
      return el("tr", {},
        el("th", { scope: "row" }, `${f.fragment + 1} of ${f.fragments}`),
        el("td", { class: "num" }, `${f.round}${f.round < head ? ` (${head - f.round} behind)` : ""}`),
        el("td", { class: "num age" }, age(f)),
        el("td", {}, f.outcome),
        el("td", { class: "num" }, `${f.members} of ${f.live}`),
        el("td", { class: "num" }, seconds(f.sync_s)),
        el("td", {}, known(f.agreeing) ? `${f.agreeing >= f.live ? "✓" : "○"} ${f.agreeing} of ${f.live}` : DASH),
        el("td", {}, el("code", { title: f.state }, f.state.slice(0, 12) || DASH)));
    });
    const names = [["Fragment"], ["Round", "num"], ["Merged", "num"], ["How"], ["Islands in it", "num"], ["Time to merge", "num"], ["Same state"], ["State"]];
    fill(card.querySelector(".body"), el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of fragments" }, el("table", {}, el("caption", { class: "sr" }, "Where each fragment stands"), el("thead", {}, el("tr", {}, ...names.map(([name, kind]) => el("th", { scope: "col", class: kind }, name)))), el("tbody", {}, ...rows))));
  }

  network(network) {
    const host = document.querySelector("#network .body");
    const kinds = Object.entries(network.by_kind).sort((a, b) => b[1].sent + b[1].received - a[1].sent - a[1].received);
    if (!kinds.length) return fill(host, empty("No byte was exchanged with a peer yet."));
    const most = Math.max(...kinds.map(([, t]) => Math.max(t.sent, t.received)), 1);
    const bar = (value, way) => {
      const part = el("i", { class: way });
      part.style.width = `${(100 * value) / most}%`;
      return el("span", { class: "track", "aria-hidden": "true" }, part);
    };
    const rows = kinds.map(([kind, t]) => el("tr", {}, el("th", { scope: "row" }, KINDS[kind] ?? kind), el("td", { class: "num" }, bytes(t.sent), bar(t.sent, "sent")), el("td", { class: "num" }, bytes(t.received), bar(t.received, "received"))));
    const r = network.rounds;
    fill(
      host,
      el("table", { class: "kinds" }, el("caption", { class: "sr" }, "Bytes by kind"), el("thead", {}, el("tr", {}, ...["Kind", "Sent", "Received"].map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, ...rows)),
      el("p", { class: "words" }, known(r.compression) ? `Rounds sent ${bytes(r.sent_bytes)}, ${fixed(r.compression, 1)} times less than ${bytes(r.raw_bytes)} in fp32.` : "No round sent anything yet, so there is no compression to tell."),
    );
  }

  trust(state) {
    const { rejected, refused, strangers } = state.trust;
    const rows = [
      ...Object.entries(rejected).map(([reason, n]) => [`Rejected: ${REASONS[reason] ?? reason}`, count(n)]),
      ...Object.entries(refused).map(([code, n]) => [`Not let in: ${code}`, count(n)]),
      ...Object.entries(strangers).filter(([, n]) => n).map(([why, n]) => [`Strangers: ${STRANGERS[why] ?? why}`, count(n)]),
    ];
    const shape = JSON.stringify(rows);
    if (shape === this.trusted) return;
    this.trusted = shape;
    const host = document.querySelector("#trust .body");
    fill(host, rows.length ? table("What was turned away, by reason", ["Reason", "Times"], rows) : empty("Nothing was rejected and nobody was turned away since this node started."));
  }

  node(store) {
    const { state } = store;
    const { node, machine, training } = state;
    const step = training.step;
    const parameters = state.run?.parameters;
    const facts = [
      ["Health", state.health.healthy ? "✓ healthy" : `▲ ${state.health.reasons.join("; ")}`],
      ["Up for", duration(node.uptime_s)],
      ["Run", state.run ? `${state.run.label}, ${state.run.id.slice(0, 16)}` : "none yet"],
      ["Trains on", `${node.device || DASH}${machine.gpus.length ? ` (${machine.gpus.length} × ${machine.gpus[0].name})` : ""}, ${machine.cores} cores, load ${fixed(machine.load, 1)}`],
      ["Model", parameters ? `${count(parameters)} parameters` : "known with the run"],
      ["Inner step", step ? `${count(step.step)}, ${seconds(step.seconds)} each` : "none yet"],
      ["Waits for data", known(step?.data_s) && step.seconds ? `${percent(step.data_s / step.seconds)} of an inner step` : DASH],
      ["Micro-batch", known(step?.micro_batch) ? `${count(step.micro_batch)} sequences at a time` : DASH],
      ["Out of memory", training.out_of_memory ? `▲ ${training.out_of_memory} times since the start` : "never since the start"],
      ["Learning rate", step ? `${small(step.lr)} inner${known(store.outerRate) ? `, ${small(store.outerRate)} outer` : ""}` : DASH],
      ["Gradient norm", step ? small(step.grad_norm) : DASH],
      ["Compute used", step && parameters ? `${flops(6 * parameters * step.tokens_per_second)} (6 × parameters × tokens/s, while computing)` : DASH],
      ["MFU", known(step?.mfu) ? percent(step.mfu, 1) : "not known: this device's peak is not measured"],
      ["Checkpoint", state.checkpoint ? `round ${state.checkpoint.round}, ${duration(state.time - state.checkpoint.time)} old, ${bytes(state.checkpoint.bytes)}` : "none written since the start"],
      ["Reachable", node.reachability || `at ${node.public_addr || node.listen || DASH}`],
      ["Identity", node.peer],
    ];
    if (node.region) facts.splice(2, 0, ["Region", node.region]);
    const host = document.querySelector("#node .body");
    if (!this.facts || this.facts.size !== facts.length || facts.some(([name]) => !this.facts.has(name))) {
      this.facts = new Map();
      this.meters = el("div", { class: "meters" });
      const list = el("dl", { class: "facts" });
      for (const [name] of facts) {
        const value = el("dd");
        this.facts.set(name, value);
        list.append(el("div", {}, el("dt", {}, name), value));
      }
      this.join = el("code");
      this.copy = el("button", { type: "button", class: "plain", onclick: () => this.copyJoin() }, "Copy");
      this.hint = el("p", { class: "quiet" });
      this.joining = el("div", { class: "join" }, el("h3", {}, "Others join with"), this.join, this.copy, this.hint);
      fill(host, this.meters, list, this.joining);
    }
    for (const [name, value] of facts) say(this.facts.get(name), value);
    this.joining.hidden = !node.join_address;
    const manifest = state.run?.manifest; // in the first picture, and not in what comes after it
    if (manifest) {
      this.ofScripts = Boolean(manifest.script?.layout);
      this.ofOwnText = manifest.data?.recipe === "text";
    }
    say(this.join, this.ofScripts
      ? `node.join(model, optimizer, peers="${node.join_address}"${node.invitation_needed ? ', invitation="…"' : ""})`
      : `node start --peers ${node.join_address}${node.invitation_needed ? " --invitation …" : ""}${this.ofOwnText ? " --data …" : ""}`);
    say(this.hint, node.join_hint.join(" "));
    const meter = (name, used, total, note) => el("div", {}, el("span", {}, name), el("meter", { min: 0, max: total, high: total * 0.9, value: used, "aria-label": name }), el("span", { class: "num" }, note));
    const rows = [];
    if (known(machine.memory_total)) rows.push(meter("Memory", machine.memory_total - machine.memory_available, machine.memory_total, `${bytes(machine.memory_used)} here, ${bytes(machine.memory_available)} free`));
    if (known(machine.disk_total)) rows.push(meter("Disk", machine.disk_total - machine.disk_free, machine.disk_total, `${bytes(machine.disk_free)} free of ${bytes(machine.disk_total)}`));
    for (const gpu of machine.gpus) {
      const name = `GPU ${gpu.index}`;
      const told = [percent(gpu.utilisation), known(gpu.memory_total) ? `${bytes(gpu.memory_used)} of ${bytes(gpu.memory_total)}` : DASH, known(gpu.temperature_c) ? `${Math.round(gpu.temperature_c)} °C` : DASH, known(gpu.power_w) ? `${Math.round(gpu.power_w)} W` : DASH];
      const words = told.every((word) => word === DASH) ? "the driver does not tell what it does" : told.filter((word) => word !== DASH).join(" · ");
      rows.push(el("div", { title: gpu.name }, el("span", {}, name), el("meter", { min: 0, max: 1, value: gpu.utilisation ?? 0, "aria-label": `${name} in use` }), el("span", { class: "num" }, words)));
    }
    fill(this.meters, ...(rows.length ? rows : [empty("This system does not tell its memory and disk.")]));
  }

  async copyJoin() {
    try {
      await navigator.clipboard.writeText(this.join.textContent);
      say(this.copy, "Copied");
    } catch {
      getSelection().selectAllChildren(this.join); // over plain HTTP a page may not write there
      say(this.copy, "Selected: press Ctrl+C");
    }
    setTimeout(() => say(this.copy, "Copy"), 1500);
  }

  events(store) {
    const newest = store.events.slice(-LOGGED);
    const key = `${store.state.instance} ${newest.at(-1)?.seq}`;
    if (key === this.logged && newest.length) return;
    this.logged = key;
    if (!newest.length) return fill(this.log, el("li", {}, empty("Nothing but steps and rounds happened lately.")));
    fill(this.log, ...newest.reverse().map((event) => el("li", { class: `event ${event.kind}` }, el("time", { title: new Date(event.time * 1000).toLocaleString("en-GB") }, clock(event.time)), el("span", { class: "kind" }, event.kind.replaceAll("_", " ")), el("span", {}, tellEvent(event, store.names)))));
  }
}

function tellEvent(event, names) {
  const who = event.peer ? names.of(event.peer, event.name) : "";
  switch (event.kind) {
    case "join":
      return `${event.name}: ${event.text}`;
    case "checkpoint_skipped":
      return `round ${event.round}: ${event.reason}`;
    case "exchanges":
      return `${event.exchanges} a round from round ${event.round} on, was ${event.before}`;
    case "exchanged":
      return `round ${event.round}: ${event.outcome}${event.partner ? ` with ${names.of(event.partner)}` : ""}`;
    case "problem":
      return `${event.code} ${event.what}: ${event.why}`;
    case "validation":
      return `round ${event.round}, validation loss ${fixed(event.validation_loss, 3)}`;
    case "round_failed":
      return `round ${event.round}: ${event.reason}`;
    case "behind":
      return `${event.head - event.round} rounds behind, downloads the state${event.reason ? `: ${event.reason}` : ""}`;
    case "checkpoint":
      return `round ${event.round}, ${bytes(event.bytes)} in ${seconds(event.seconds)}`;
    case "data_awaited":
      return `step ${event.step} waits since ${clock(event.since)}: rank ${event.ranks.slice(0, NAMED).join(", ")}${event.ranks.length > NAMED ? ", …" : ""} has none yet`;
    case "data_came":
      return `step ${event.step} goes on, after ${seconds(event.seconds)}`;
    case "alarm":
      return `${event.alarm}: ${event.what}`;
    case "alarm_ended":
      return `${event.alarm} has ended${event.forgotten.length ? `; not back, but forgotten after long silence: ${event.forgotten.slice(0, NAMED).map((peer) => names.of(peer)).join(", ")}` : ""}`;
    case "knob":
      return `${event.name} is ${event.value}${event.before === null ? "" : `, was ${event.before}`}: ${event.why}`;
    case "peer_refused":
      return `${who} ${event.code} ${event.reason}`;
    case "rejected":
      return `${who}: ${event.reason}${event.detail ? `, ${event.detail}` : ""}`;
    case "started":
      return `${event.role} on ${event.device}, atoll ${event.version}`;
    default:
      return [who || event.name, event.region, event.reason ?? event.text].filter(Boolean).join(" · ");
  }
}
