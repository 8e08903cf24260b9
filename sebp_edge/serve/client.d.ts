// The types of client.js. Those of messages are in messages.d.ts.

import type { ChildProcess } from "node:child_process";
import type { InitializeParams, JobEvent, Methods, Results } from "./messages.js";

export type * from "./messages.js";

/** The server refused a request, could not answer it, or cannot start. `code` is stable, such as "busy". */
export declare class ServerError extends Error {
  readonly code: string;
  readonly hint: string;
  readonly retry: boolean;
}

/** A running server. */
export declare class Client {
  private constructor(process: ChildProcess);
  readonly process: ChildProcess;

  /** Starts a server; `settings` are those of `initialize`, such as `folders`, `store` and `memory_budget`. */
  static start(command: string[], settings?: Partial<InitializeParams>): Promise<Client>;

  /** Returns the result of a method. `onText` receives text in chunks, and ends the request with an error that it
   * throws; `signal` cancels the request. */
  call<Method extends keyof Methods>(
    method: Method,
    params?: Methods[Method],
    options?: { onText?: (text: string) => unknown; signal?: AbortSignal },
  ): Promise<Results[Method]>;

  /** Yields the events of a job after a number, up to the one with which it is paused or has ended; throws a
   * ServerError once another iteration follows this job. */
  events(job: string, since?: number): AsyncGenerator<JobEvent, void>;

  /** Ends the server: it saves the state of a running job first. */
  close(): Promise<void>;
}
