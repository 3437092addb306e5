// What the page asks of its server. Paths are relative, so that it works behind a proxy's prefix, too.

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export class Api {
  constructor(key) {
    this.key = key; // a function: the field may change
  }

  async get(path) {
    return this.#checked(await fetch(path, { headers: this.#headers(), cache: "no-store" }));
  }

  /** Events of a streamed answer, as objects, until [DONE]. */
  async *stream(path, body, signal) {
    const headers = { ...this.#headers(), "content-type": "application/json" };
    const response = await this.#checked(
      await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal }),
    );
    for await (const data of serverSentData(response.body)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(200, event.error.message);
      yield event;
    }
    throw new ApiError(200, "the connection ended before the answer did");
  }

  #headers() {
    const key = this.key();
    return key ? { authorization: `Bearer ${key}` } : {};
  }

  async #checked(response) {
    if (response.ok) return response;
    let message = `the server answers ${response.status}`;
    try {
      message = (await response.json()).error?.message ?? message;
    } catch {
      // not ours: a proxy's error is no JSON, and its status has been said
    }
    throw new ApiError(response.status, message);
  }
}

/** The data of server-sent events; ours have one line of data each. */
async function* serverSentData(body) {
  let held = "";
  for await (const text of chunks(body.pipeThrough(new TextDecoderStream()))) {
    const lines = (held + text).split("\n");
    held = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6).trimEnd();
  }
}

/** Not every browser can iterate a stream. */
async function* chunks(stream) {
  const reader = stream.getReader();
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) yield part.value;
  } finally {
    reader.cancel().catch(() => {}); // aborted by us
  }
}
