// LangChain.js: its ChatOpenAI.

import { HumanMessage, ToolMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import * as s from "./scenarios.mjs";

const connect = (url, fields = {}) =>
  new ChatOpenAI({ model: s.MODEL, apiKey: s.KEY, maxRetries: 0, configuration: { baseURL: `${url}/v1` }, ...fields });

class LangChain {
  constructor(tiny, scripted) {
    this.tinyUrl = tiny;
    this.tiny = connect(tiny);
    this.scripted = connect(scripted);
  }

  async plain() {
    return (await this.tiny.invoke(s.QUESTION)).text;
  }

  async *stream() {
    for await (const chunk of await this.tiny.stream(s.QUESTION)) yield chunk.text;
  }

  async tools() {
    const get_weather = tool(async ({ city }) => s.weather(city), {
      name: "get_weather",
      description: s.TOOL_DESCRIPTION,
      schema: s.TOOL_SCHEMA,
    });
    const model = this.scripted.bindTools([get_weather]);
    const messages = [new HumanMessage(s.TOOLS_QUESTION)];
    for (;;) {
      const answer = await model.invoke(messages);
      if (!answer.tool_calls?.length) return answer.text;
      messages.push(answer);
      for (const call of answer.tool_calls) {
        messages.push(new ToolMessage({ content: await get_weather.invoke(call.args), tool_call_id: call.id }));
      }
    }
  }

  schema() {
    const asked = { method: "jsonSchema", strict: true, name: "report" };
    return this.tiny.withStructuredOutput(s.REPORT_SCHEMA, asked).invoke(s.REPORT_QUESTION);
  }

  async error() {
    const model = connect(this.tinyUrl, { temperature: s.BAD_TEMPERATURE });
    const error = await s.caught(Error, () => model.invoke(s.QUESTION));
    if (error.status !== 400) throw error;
    return error;
  }

  async abort() {
    const leaving = new AbortController();
    const stream = await this.scripted.stream(s.ABORT_QUESTION, { signal: leaving.signal });
    for await (const _ of stream) break;
    leaving.abort();
  }
}

await s.main((tiny, scripted) => new LangChain(tiny, scripted));
