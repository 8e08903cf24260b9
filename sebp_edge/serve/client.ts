// A client in TypeScript without dependencies: starts a server, and speaks with it. Node runs it as it is (22.18 or newer).
//
//   const client = await Client.start(["sebp-edge", "serve"], { folders: ["/home/me/notes"] });
//   await client.call("jobs.start", { id: "first", params: { paths: ["/home/me/notes"], name: "notes" } });
//   for await (const event of client.events("first")) console.log(event.progress, event.event.event);
//   console.log(await client.call("generate", { prompt: "Dear Ada,", adapter: "notes" }));
//   await client.close();

import { spawn, type ChildProcess } from "node:child_process";
import { once } from "node:events";
import { createInterface } from "node:readline";

import type { InitializeParams, JobEvent, Methods } from "./messages.js";

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
  reject: (error: ServerError) => void;
  onText?: (text: string) => void;
}

const PROTOCOL = 1;
const LAST_STATES = new Set(["paused", "done", "refused", "interrupted", "failed"]);
const MILLISECONDS_TO_END = 3000;

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

const serverEnded = () =>
  new ServerError("The server has ended.", { code: "server_ended", hint: "Start another one.", retry: true });

const superseded = () =>
  new ServerError("Another iteration follows the events of this job now.", {
    code: "superseded",
    hint: "Follow each job in one place.",
    retry: false,
  });

export class Client {
  readonly process: ChildProcess;
  private number = 0;
  private ended = false;
  private readonly waiting = new Map<number, Waiting>();
  private readonly subscribers = new Map<string, (event: JobEvent | ServerError) => void>();

  private constructor(process: ChildProcess) {
    this.process = process;
    process.stdin!.on("error", () => {}); // the end of its output says that it is gone
    const lines = createInterface({ input: process.stdout!, crlfDelay: Infinity });
    lines.on("line", (line) => this.receive(JSON.parse(line) as Message));
    lines.on("close", () => this.end());
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

  /** Returns the result of a method. `onText` receives text in chunks; `signal` cancels the request. */
  call<Method extends keyof Methods>(
    method: Method,
    params: Methods[Method] = {} as Methods[Method],
    { onText, signal }: { onText?: (text: string) => void; signal?: AbortSignal } = {},
  ): Promise<Params> {
    return new Promise((resolve, reject) => {
      const id = this.request(method, params, { resolve, reject, onText });
      const cancel = () => this.send(++this.number, "cancel", { request: id });
      if (signal?.aborted) cancel();
      else signal?.addEventListener("abort", cancel, { once: true });
    });
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
      await new Promise<void>((answered, reject) => {
        const resolve = () => {
          this.subscribers.get(job)?.(superseded());
          this.subscribers.set(job, receive); // what came before the answer is an earlier subscription's
          answered();
        };
        this.request("jobs.subscribe", { id: job, since }, { resolve, reject });
      });
      for (;;) {
        while (queue.length === 0) await new Promise<void>((resolve) => (wake = resolve));
        const event = queue.shift()!;
        if (event instanceof ServerError) throw event;
        yield event;
        if (event.event.event === "state" && LAST_STATES.has(event.event.state)) return;
      }
    } finally {
      if (this.subscribers.get(job) === receive) this.subscribers.delete(job); // else another one has its place
    }
  }

  /** Ends the server: it saves the state of a running job first. */
  async close(): Promise<void> {
    const { process } = this;
    process.stdin!.end();
    if (process.exitCode !== null || process.signalCode !== null || process.pid === undefined) return;
    const timer = setTimeout(() => process.kill("SIGKILL"), MILLISECONDS_TO_END);
    await once(process, "exit");
    clearTimeout(timer);
  }

  private request(method: string, params: object, waiting: Waiting): number {
    const id = ++this.number;
    if (this.ended) waiting.reject(serverEnded());
    else {
      this.waiting.set(id, waiting);
      this.send(id, method, params);
    }
    return id;
  }

  private send(id: number, method: string, params: object): void {
    this.process.stdin!.write(JSON.stringify({ jsonrpc: "2.0", id, method, params }) + "\n");
  }

  private receive({ id, result, error, method, params }: Message): void {
    if (method === "text") this.waiting.get(params!.request as number)?.onText?.(params!.text as string);
    else if (method === "job.event") this.subscribers.get(params!.job as string)?.(params as unknown as JobEvent);
    else if (typeof id === "number") {
      const waiting = this.waiting.get(id);
      this.waiting.delete(id);
      if (error) waiting?.reject(new ServerError(error.message, error.data));
      else waiting?.resolve(result!);
    }
  }

  private end(): void {
    this.ended = true;
    for (const { reject } of this.waiting.values()) reject(serverEnded());
    this.waiting.clear();
    for (const subscriber of this.subscribers.values()) subscriber(serverEnded());
  }
}
