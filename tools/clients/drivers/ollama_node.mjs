// Ollama's client for Node; it has no loop for tools of its own.

import { Ollama } from "ollama";
import * as s from "./scenarios.mjs";

const fields = (question, more = {}) => ({ model: s.MODEL, messages: s.turns(question), ...more });

class Chats {
  constructor(tiny, scripted) {
    this.tiny = new Ollama({ host: tiny });
    this.scripted = new Ollama({ host: scripted });
  }

  async plain() {
    return (await this.tiny.chat(fields(s.QUESTION))).message.content;
  }

  async *stream() {
    for await (const piece of await this.tiny.chat(fields(s.QUESTION, { stream: true }))) yield piece.message.content;
  }

  async tools() {
    const messages = s.turns(s.TOOLS_QUESTION);
    for (;;) {
      const { message } = await this.scripted.chat(fields("", { messages, tools: [s.TOOL] }));
      messages.push(message); // as it came, with the ids of its calls
      if (!message.tool_calls?.length) return message.content;
      for (const call of message.tool_calls) {
        const content = s.weather(call.function.arguments.city);
        messages.push({ role: "tool", tool_name: call.function.name, content });
      }
    }
  }

  async schema() {
    return JSON.parse((await this.tiny.chat(fields(s.REPORT_QUESTION, { format: s.REPORT_SCHEMA }))).message.content);
  }

  error() {
    // the client does not give its class out
    const kind = { isInstance: (error) => error.name === "ResponseError" && error.status_code === 400 };
    const asked = fields(s.QUESTION, { options: { temperature: s.BAD_TEMPERATURE } });
    return s.caught(Object.assign(class {}, kind), () => this.tiny.chat(asked));
  }

  async abort() {
    const stream = await this.scripted.chat(fields(s.ABORT_QUESTION, { stream: true }));
    for await (const piece of stream) if (piece.message.content) break;
    stream.abort();
  }
}

await s.main((tiny, scripted) => new Chats(tiny, scripted));
