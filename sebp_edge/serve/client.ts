// A client in TypeScript without dependencies: starts a server, and speaks with it. Node runs it as it is (22.18 or newer).
//
//   const client = await Client.start(["sebp-edge", "serve"], { folders: ["/home/me/notes"] });
//   await client.call("jobs.start", { id: "first", params: { paths: ["/home/me/notes"], name: "notes" } });
//   for await (const event of client.events("first")) console.log(event.progress, event.event.event);
//   console.log(await client.call("generate", { prompt: "Dear Ada,", adapter: "notes" }));
//   await client.close();

import { spawn, type ChildProcess } from "node:child_process";
import { once } from "node:events";

import type { InitializeParams, Job, JobEvent, Methods } from "./messages.js";

export type * from "./messages.js"; // messages.ts, which only a compiler reads
export type Params = Record<string, unknown>;
interface Message {
  id?: number | null;
  result?: Params;
  error?: { message: string; data: Params };
  method?: string;
  params?: Params;
}
interface Waiting {
  resolve: (result: Params) => void;
  reject: (error: unknown) => void;
  onText?: (text: string) => void;
}

const PROTOCOL = 1;
const LAST_STATES = new Set(["paused", "done", "refused", "interrupted", "failed"]);
const MILLISECONDS_TO_END = 3000;
const MAX_REQUEST = 2 ** 23; // bytes, of the server
const MAX_ANSWER = 2 ** 27; // characters; a server that writes a longer line is broken, and is killed

export class ServerError extends Error {
  readonly code: string;
  readonly hint: string;
  readonly retry: boolean;

  constructor(message: string, data: Params) {
    super(message);
    this.code = String(data.code ?? "");
    this.hint = String(data.hint ?? "");
    this.retry = Boolean(data.retry);
  }
}

const refusal = (code: string, message: string, hint: string, retry = false) =>
  new ServerError(message, { code, hint, retry });
const serverEnded = () => refusal("server_ended", "The server has ended.", "Start another one.", true);
const badMessage = () =>
  refusal("bad_message", "The server wrote a line that is no message; an answer may be lost.", "Ask again.", true);
const superseded = () =>
  refusal("superseded", "Another iteration follows the events of this job now.", "Follow each job in one place.");

/** Returns a request as a line; throws a ServerError if no server could read it. */
function lineOf(id: number, method: string, params: object): string {
  const finite = (key: string, value: unknown) => {
    if (typeof value === "number" && !Number.isFinite(value)) throw new TypeError(`${key} is not a finite number`);
    return value;
  };
  let line: string;
  try {
    line = JSON.stringify({ jsonrpc: "2.0", id, method, params }, finite);
  } catch (error) {
    throw refusal("invalid_params", `The parameters are no JSON: ${(error as Error).message}.`, "Give other values.");
  }
  if (Buffer.byteLength(line) > MAX_REQUEST)
    throw refusal("too_long", `The request has more than ${MAX_REQUEST / 2 ** 20} MiB.`, "Give texts as files.");
  return line + "\n";
}

export class Client {
  readonly process: ChildProcess;
  private number = 0;
  private ended = false;
  private line = "";
  private readonly waiting = new Map<number, Waiting>();
  private readonly subscribers = new Map<string, (event: JobEvent | ServerError) => void>();

  private constructor(process: ChildProcess) {
    this.process = process;
    process.on("error", ({ message }) => {
      if (process.pid === undefined)
        this.end(refusal("cannot_start", `The server cannot start: ${message}.`, "Check that sebp-edge is installed."));
    });
    process.stdin?.on("error", () => {}); // each write says it to its request
    process.stdout?.setEncoding("utf8").on("data", (chunk: string) => this.read(chunk));
    process.stdout?.on("error", () => {}).on("close", () => this.end());
  }

  /** Starts a server; `settings` are those of `initialize`, such as `folders`, `store` and `memory_budget`. */
  static async start(command: string[], settings: Partial<InitializeParams> = {}): Promise<Client> {
    const [program, ...rest] = command;
    const client = new Client(spawn(program, rest, { stdio: ["pipe", "pipe", "inherit"] }));
    try {
      await client.call("initialize", { protocol: PROTOCOL, parent: { pid: process.pid }, ...settings });
    } catch (error) {
      await client.close();
      throw error;
    }
    return client;
  }

  /** Returns the result of a method. `onText` receives text in chunks, and ends the request with an error that it
   * throws; `signal` cancels the request. */
  call<Method extends keyof Methods>(
    method: Method,
    params: Methods[Method] = {} as Methods[Method],
    { onText, signal }: { onText?: (text: string) => void; signal?: AbortSignal } = {},
  ): Promise<Params> {
    let cancel = () => {};
    const answer = new Promise<Params>((resolve, reject) => {
      const id = this.request(method, params, { resolve, reject, onText });
      cancel = () => this.cancel(id);
      if (signal?.aborted) cancel();
      else signal?.addEventListener("abort", cancel);
    });
    return answer.finally(() => signal?.removeEventListener("abort", cancel));
  }

  /** Yields the events of a job after a number, up to the one with which it is paused or has ended; throws a
   * ServerError once another iteration follows this job. */
  async *events(job: string, since = 0): AsyncGenerator<JobEvent> {
    const queue: (JobEvent | ServerError)[] = [];
    let wake = () => {};
    const receive = (event: JobEvent | ServerError) => {
      queue.push(event);
      wake();
    };
    try {
      const found = await new Promise<Params>((answered, reject) => {
        const resolve = (result: Params) => {
          this.subscribers.get(job)?.(superseded());
          this.subscribers.set(job, receive); // what came before the answer is an earlier subscription's
          answered(result);
        };
        this.request("jobs.subscribe", { id: job, since }, { resolve, reject });
      });
      // Of a job that was resumed, the states of before are sent, too.
      const { last_event: last = 0, state = "queued" } = (found.job ?? {}) as Partial<Job>;
      let isOver = since === last && LAST_STATES.has(state);
      while (!isOver) {
        while (queue.length === 0) await new Promise<void>((resolve) => (wake = resolve));
        const event = queue.shift()!;
        if (event instanceof ServerError) throw event;
        yield event;
        isOver = event.number >= last && event.event.event === "state" && LAST_STATES.has(event.event.state);
      }
    } finally {
      if (this.subscribers.get(job) === receive) this.subscribers.delete(job); // else another one has its place
    }
  }

  /** Ends the server: it saves the state of a running job first. */
  async close(): Promise<void> {
    const { process } = this;
    process.stdin?.end();
    if (process.exitCode === null && process.signalCode === null && process.pid !== undefined) {
      const timer = setTimeout(() => process.kill("SIGKILL"), MILLISECONDS_TO_END);
      await new Promise((resolve) => process.once("exit", resolve));
      clearTimeout(timer);
    }
    process.stdout?.destroy(); // which a process that it has started may hold open
  }

  private request(method: string, params: object, waiting: Waiting): number {
    if (this.ended) throw serverEnded();
    const [id, line] = [this.number + 1, lineOf(this.number + 1, method, params)];
    this.number = id;
    this.waiting.set(id, waiting);
    this.process.stdin?.write(line, (error) => {
      if (error) this.settle(id)?.reject(serverEnded());
    });
    return id;
  }

  private cancel(id: number): void {
    if (!this.ended) this.request("cancel", { request: id }, { resolve: () => {}, reject: () => {} });
  }

  private settle(id: number): Waiting | undefined {
    const waiting = this.waiting.get(id);
    this.waiting.delete(id);
    return waiting;
  }

  private read(chunk: string): void {
    const [first, ...others] = chunk.split("\n");
    this.line += first;
    for (const next of others) {
      try {
        this.receive(JSON.parse(this.line) as Message);
      } catch {
        this.fail(badMessage(), this.subscribers.values()); // it may have been any answer, or the last event
      }
      this.line = next;
    }
    if (this.line.length <= MAX_ANSWER) return;
    this.process.stdout!.destroy();
    this.process.kill("SIGKILL");
  }

  private receive({ id, result, error, method, params }: Message): void {
    if (method === "text") this.tell(params!.request as number, params!.text as string);
    else if (method === "job.event") this.subscribers.get(params!.job as string)?.(params as unknown as JobEvent);
    else if (method === undefined) {
      const refused = error && new ServerError(error.message, error.data ?? {});
      if (id === null && refused) this.fail(refused); // it could not read a request, and does not know which
      else if (typeof id !== "number" || id < 1 || id > this.number || !(refused || result)) throw badMessage();
      else if (refused) this.settle(id)?.reject(refused);
      else this.settle(id)?.resolve(result!);
    }
  }

  private tell(id: number, text: string): void {
    const failed = (error: unknown) => {
      if (this.waiting.has(id)) this.cancel(id);
      this.settle(id)?.reject(error);
    };
    try {
      Promise.resolve(this.waiting.get(id)?.onText?.(text)).catch(failed); // it may be async
    } catch (error) {
      failed(error);
    }
  }

  private fail(error: ServerError, subscribers: Iterable<(event: ServerError) => void> = []): void {
    const waiting = [...this.waiting.values()];
    this.waiting.clear();
    for (const { reject } of waiting) reject(error);
    for (const subscriber of subscribers) subscriber(error);
  }

  private end(error = serverEnded()): void {
    this.ended = true;
    this.fail(error, this.subscribers.values());
  }
}
