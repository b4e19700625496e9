// Requests with the key, and the stream of updates. Server-sent events are read through fetch, not
// EventSource, since only that can send the key as a header; the format and Last-Event-ID are the same.

const FIRST_WAIT_MS = 1000;
const LONGEST_WAIT_MS = 30000;
const SILENCE_MS = 15000; // an update comes every second

export class Locked extends Error {}

const slot = `atoll-key ${location.host}`;

/** The key: from the address's fragment, which is never sent, then kept for this tab. */
export function takeKey() {
  const given = new URLSearchParams(location.hash.slice(1)).get("key");
  if (given) {
    setKey(given);
    history.replaceState(null, "", location.pathname);
  }
}

export function setKey(key) {
  sessionStorage.setItem(slot, key);
}

function headers(more = {}) {
  const key = sessionStorage.getItem(slot);
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

async function ask(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: headers(options.headers), cache: "no-store" });
  if (answer.status === 401) throw new Locked();
  if (!answer.ok) throw new Error(`the node answers ${answer.status}`);
  return answer;
}

export async function get(path) {
  return (await ask(path)).json();
}

/** Splits a stream of text into events: {event, id, data}. */
export class Parser {
  constructor() {
    this.rest = "";
  }
  push(text) {
    this.rest += text;
    const blocks = this.rest.split("\n\n");
    this.rest = blocks.pop();
    return blocks.map((block) => {
      const found = { event: "message", id: "", data: "" };
      for (const line of block.split("\n")) {
        const at = line.indexOf(":");
        if (at > 0) found[line.slice(0, at)] = line.slice(at + 1).replace(/^ /, "");
      }
      return found;
    });
  }
}

/** Follows the node: on.update(data), on.restart(), on.state("live" | "wait" | "off", text). */
export class Stream {
  constructor(cursor, on) {
    this.cursor = cursor;
    this.on = on;
    this.failures = 0;
    this.stopped = false;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.pause() : this.wake()));
    addEventListener("online", () => this.wake());
  }

  pause() {
    this.hidden = true; // nobody looks: the node need not talk
    this.control?.abort();
  }

  wake() {
    this.hidden = document.hidden;
    this.resume?.();
  }

  async run() {
    while (!this.stopped) {
      if (this.hidden) {
        await new Promise((done) => (this.resume = done));
        continue;
      }
      try {
        await this.read();
      } catch (error) {
        if (error instanceof Locked) return this.on.locked();
      }
      if (this.hidden || this.stopped) continue;
      const wait = Math.min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** this.failures) * (0.75 + 0.5 * Math.random());
      this.failures += 1;
      this.on.state("off", `no answer, again in ${Math.ceil(wait / 1000)} s`);
      await new Promise((done) => {
        this.resume = done;
        setTimeout(done, wait);
      });
      this.on.state("wait", "connecting");
    }
  }

  async read() {
    this.control = new AbortController();
    let watchdog = 0;
    const alive = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(() => this.control.abort(), SILENCE_MS);
    };
    alive();
    try {
      const answer = await ask("/api/v1/stream", {
        signal: this.control.signal,
        headers: { Accept: "text/event-stream", "Last-Event-ID": this.cursor },
      });
      const parser = new Parser();
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return;
        alive();
        for (const { event, id, data } of parser.push(value)) {
          if (event === "restart") {
            this.stopped = true;
            return this.on.restart();
          }
          if (event !== "update") continue;
          this.cursor = id;
          this.failures = 0;
          this.on.state("live", "live");
          this.on.update(JSON.parse(data));
        }
      }
    } finally {
      clearTimeout(watchdog);
    }
  }
}
