// A client for Node and Electron without dependencies: starts a server, and speaks with it. client.d.ts has its types.
//
//   const client = await Client.start(["sebp-edge", "serve"], { folders: ["/home/me/notes"] });
//   await client.call("jobs.start", { id: "first", params: { paths: ["/home/me/notes"], name: "notes" } });
//   for await (const event of client.events("first")) console.log(event.progress, event.event.event);
//   console.log(await client.call("generate", { prompt: "Dear Ada,", adapter: "notes" }));
//   await client.close();

const { spawn } = require("node:child_process");

const PROTOCOL = 1;
const LAST_STATES = new Set(["paused", "done", "refused", "interrupted", "failed"]);
const MILLISECONDS_TO_END = 3000;
const MAX_REQUEST = 2 ** 23; // bytes, of the server
const MAX_ANSWER = 2 ** 27; // characters; a server that writes a longer line is broken, and is killed

class ServerError extends Error {
  constructor(message, data) {
    super(message);
    this.code = String(data.code ?? "");
    this.hint = String(data.hint ?? "");
    this.retry = Boolean(data.retry);
  }
}

const refusal = (code, message, hint, retry = false) => new ServerError(message, { code, hint, retry });
const serverEnded = () => refusal("server_ended", "The server has ended.", "Start another one.", true);
const badMessage = () =>
  refusal("bad_message", "The server wrote a line that is no message; an answer may be lost.", "Ask again.", true);
const superseded = () =>
  refusal("superseded", "Another iteration follows the events of this job now.", "Follow each job in one place.");

/** Returns a request as a line; throws a ServerError if no server could read it. */
function lineOf(id, method, params) {
  const finite = (key, value) => {
    if (typeof value === "number" && !Number.isFinite(value)) throw new TypeError(`${key} is not a finite number`);
    return value;
  };
  let line;
  try {
    line = JSON.stringify({ jsonrpc: "2.0", id, method, params }, finite);
  } catch (error) {
    throw refusal("invalid_params", `The parameters are no JSON: ${error.message}.`, "Give other values.");
  }
  if (Buffer.byteLength(line) > MAX_REQUEST)
    throw refusal("too_long", `The request has more than ${MAX_REQUEST / 2 ** 20} MiB.`, "Give texts as files.");
  return line + "\n";
}

class Client {
  #number = 0;
  #ended = false;
  #line = "";
  #waiting = new Map();
  #subscribers = new Map();

  constructor(process) {
    this.process = process;
    process.on("error", ({ message }) => {
      if (process.pid === undefined)
        this.#end(refusal("cannot_start", `The server cannot start: ${message}.`, "Check that sebp-edge is installed."));
    });
    process.stdin?.on("error", () => {}); // each write says it to its request
    process.stdout?.setEncoding("utf8").on("data", (chunk) => this.#read(chunk));
    process.stdout?.on("error", () => {}).on("close", () => this.#end());
  }

  static async start([program, ...rest], settings = {}) {
    const client = new Client(spawn(program, rest, { stdio: ["pipe", "pipe", "inherit"] }));
    try {
      await client.call("initialize", { protocol: PROTOCOL, parent: { pid: process.pid }, ...settings });
    } catch (error) {
      await client.close();
      throw error;
    }
    return client;
  }

  call(method, params = {}, { onText, signal } = {}) {
    let cancel = () => {};
    const answer = new Promise((resolve, reject) => {
      const id = this.#request(method, params, { resolve, reject, onText });
      cancel = () => this.#cancel(id);
      if (signal?.aborted) cancel();
      else signal?.addEventListener("abort", cancel);
    });
    return answer.finally(() => signal?.removeEventListener("abort", cancel));
  }

  async *events(job, since = 0) {
    const queue = [];
    let wake = () => {};
    const receive = (event) => {
      queue.push(event);
      wake();
    };
    try {
      const found = await new Promise((answered, reject) => {
        const resolve = (result) => {
          this.#subscribers.get(job)?.(superseded());
          this.#subscribers.set(job, receive); // what came before the answer is an earlier subscription's
          answered(result);
        };
        this.#request("jobs.subscribe", { id: job, since }, { resolve, reject });
      });
      // Of a job that was resumed, the states of before are sent, too.
      const { last_event: last = 0, state = "queued" } = found.job ?? {};
      let isOver = since === last && LAST_STATES.has(state);
      while (!isOver) {
        while (queue.length === 0) await new Promise((resolve) => (wake = resolve));
        const event = queue.shift();
        if (event instanceof ServerError) throw event;
        yield event;
        isOver = event.number >= last && event.event.event === "state" && LAST_STATES.has(event.event.state);
      }
    } finally {
      if (this.#subscribers.get(job) === receive) this.#subscribers.delete(job); // else another one has its place
    }
  }

  async close() {
    const { process } = this;
    process.stdin?.end();
    if (process.exitCode === null && process.signalCode === null && process.pid !== undefined) {
      const timer = setTimeout(() => process.kill("SIGKILL"), MILLISECONDS_TO_END);
      await new Promise((resolve) => process.once("exit", resolve));
      clearTimeout(timer);
    }
    process.stdout?.destroy(); // which a process that it has started may hold open
  }

  #request(method, params, waiting) {
    if (this.#ended) throw serverEnded();
    const [id, line] = [this.#number + 1, lineOf(this.#number + 1, method, params)];
    this.#number = id;
    this.#waiting.set(id, waiting);
    this.process.stdin?.write(line, (error) => {
      if (error) this.#settle(id)?.reject(serverEnded());
    });
    return id;
  }

  #cancel(id) {
    if (!this.#ended) this.#request("cancel", { request: id }, { resolve: () => {}, reject: () => {} });
  }

  #settle(id) {
    const waiting = this.#waiting.get(id);
    this.#waiting.delete(id);
    return waiting;
  }

  #read(chunk) {
    const [first, ...others] = chunk.split("\n");
    this.#line += first;
    for (const next of others) {
      try {
        this.#receive(JSON.parse(this.#line));
      } catch {
        this.#fail(badMessage(), this.#subscribers.values()); // it may have been any answer, or the last event
      }
      this.#line = next;
    }
    if (this.#line.length <= MAX_ANSWER) return;
    this.process.stdout.destroy();
    this.process.kill("SIGKILL");
  }

  #receive({ id, result, error, method, params }) {
    if (method === "text") this.#tell(params.request, params.text);
    else if (method === "job.event") this.#subscribers.get(params.job)?.(params);
    else if (method === undefined) {
      const refused = error && new ServerError(error.message, error.data ?? {});
      if (id === null && refused) this.#fail(refused); // it could not read a request, and does not know which
      else if (typeof id !== "number" || id < 1 || id > this.#number || !(refused || result)) throw badMessage();
      else if (refused) this.#settle(id)?.reject(refused);
      else this.#settle(id)?.resolve(result);
    }
  }

  #tell(id, text) {
    const failed = (error) => {
      if (this.#waiting.has(id)) this.#cancel(id);
      this.#settle(id)?.reject(error);
    };
    try {
      Promise.resolve(this.#waiting.get(id)?.onText?.(text)).catch(failed); // it may be async
    } catch (error) {
      failed(error);
    }
  }

  #fail(error, subscribers = []) {
    const waiting = [...this.#waiting.values()];
    this.#waiting.clear();
    for (const { reject } of waiting) reject(error);
    for (const subscriber of subscribers) subscriber(error);
  }

  #end(error = serverEnded()) {
    this.#ended = true;
    this.#fail(error, this.#subscribers.values());
  }
}

// So that `import` of an ES module finds these names, too.
exports.Client = Client;
exports.ServerError = ServerError;
