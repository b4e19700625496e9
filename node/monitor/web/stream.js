// Requests with the key, and the stream of updates. Server-sent events are read through fetch, not
// EventSource, since only that can send the key as a header; the format and Last-Event-ID are the same.

const FIRST_WAIT_MS = 1000;
const LONGEST_WAIT_MS = 30000;
const SILENCE_MS = 15000; // an update comes every second

export class Locked extends Error {}

const slot = `atoll-key ${location.host}`;

/** The key of the address's fragment, which is never sent, is kept for this tab; whether there is one. */
export function takeKey() {
  const given = keyIn(location.href);
  if (!given) return false;
  history.replaceState(null, "", location.pathname);
  return setKey(given);
}

/** The key in an address that the node has printed; null where there is none. */
export function keyIn(address) {
  const [, hash] = address.split("#");
  return new URLSearchParams(hash).get("key");
}

let kept = ""; // where the browser keeps nothing

/** Use a key from here on; false for what cannot be one, as a header cannot have it. */
export function setKey(key) {
  if (!/^[\x21-\x7e]+$/.test(key)) return false;
  kept = key;
  remember(() => sessionStorage, slot, key);
  return true;
}

/** What a storage has under a name; null where the browser was told to allow none. */
export function recall(storage, name) {
  try {
    return storage().getItem(name);
  } catch {
    return null;
  }
}

export function remember(storage, name, value) {
  try {
    storage().setItem(name, value);
  } catch {
    // it is forgotten with the page
  }
}

function headers(more = {}) {
  const key = kept || recall(() => sessionStorage, slot);
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

async function ask(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: headers(options.headers), cache: "no-store" });
  if (answer.status === 401) throw new Locked();
  if (!answer.ok) throw new Error(`the node answers ${answer.status}`);
  return answer;
}

export async function get(path) {
  return (await ask(path, { signal: AbortSignal.timeout(SILENCE_MS) })).json();
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

/** Follows the node: on.update(data), on.restart(), on.silent(), on.state("live" | "wait", text). */
export class Stream {
  constructor(cursor, on) {
    this.cursor = cursor;
    this.on = on;
    this.failures = 0;
    this.stopped = false;
    this.hidden = document.hidden; // a tab opened in the background
    this.listening = new AbortController();
    const { signal } = this.listening;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.pause() : this.wake()), { signal });
    addEventListener("online", () => this.wake(), { signal });
  }

  /** Say nothing more: another stream takes this one's place. */
  stop() {
    this.stopped = true;
    this.listening.abort();
    this.control?.abort();
    this.resume?.();
  }

  pause() {
    this.hidden = true; // nobody looks: the node need not talk
    this.on.state("wait", "paused"); // what is shown then is no longer live
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
        if (!this.hidden && !this.stopped) this.on.state("wait", "connecting");
        continue;
      }
      try {
        await this.read();
      } catch (error) {
        if (error instanceof Locked && !this.stopped) return this.on.locked();
      }
      if (this.hidden || this.stopped) continue;
      const wait = Math.min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** this.failures) * (0.75 + 0.5 * Math.random());
      this.failures += 1;
      this.on.silent();
      await new Promise((done) => {
        this.resume = done;
        setTimeout(done, wait);
      });
      if (!this.stopped) this.on.state("wait", "connecting");
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
        if (done || this.stopped) return;
        alive();
        for (const { event, id, data } of parser.push(value)) {
          if (event === "restart") {
            return this.on.restart(); // which stops this one
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
