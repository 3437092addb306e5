// What every driver of a client on Node does; scenarios.py says what it is, and asks the same.
//
//     node DRIVER TINY_URL SCRIPTED_URL [ARGUMENT ...]

import assert from "node:assert/strict";
import { createInterface } from "node:readline";

export const MODEL = "tiny";
export const KEY = "none";
export const QUESTION = "What is the capital of France?";
export const REPORT_QUESTION = "What is the weather in Paris?";
export const TOOLS_QUESTION = "How is the weather in Paris, Rome and Oslo? [openinfer:tools]";
export const ABORT_QUESTION = "Go on for ever. [openinfer:abort]";
export const BAD_TEMPERATURE = -1;
export const CITIES = ["Paris", "Rome", "Oslo"];
export const TOOL_DESCRIPTION = "Get the current weather of a city.";
export const TOOL_SCHEMA = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
export const TOOL = {
  type: "function",
  function: { name: "get_weather", description: TOOL_DESCRIPTION, parameters: TOOL_SCHEMA },
};
export const REPORT_SCHEMA = {
  type: "object",
  properties: {
    city: { type: "string", enum: CITIES },
    degrees: { type: "integer", minimum: -90, maximum: 60 },
  },
  required: ["city", "degrees"],
  additionalProperties: false,
};

export const turns = (question) => [{ role: "user", content: question }];

// What a call raises, which must be of the class that the client has for a bad request.
export async function caught(kind, call) {
  let answer;
  try {
    answer = await call();
  } catch (error) {
    if (error instanceof kind || kind.isInstance?.(error)) return error;
    throw error;
  }
  throw new Error(`no error was raised; the answer is ${JSON.stringify(answer)}`);
}

const asked = [];

export function weather(city) {
  asked.push(city);
  return `${city} is sunny`;
}

const JUDGES = {
  async plain(driver) {
    assert.match(await driver.plain(), /Paris/);
  },
  async stream(driver) {
    const pieces = [];
    for await (const piece of driver.stream()) if (piece) pieces.push(piece);
    assert.ok(pieces.length > 1, `came in ${pieces.length} pieces`);
    assert.match(pieces.join(""), /Paris/);
  },
  async tools(driver) {
    asked.length = 0;
    const text = await driver.tools();
    assert.deepEqual(asked, CITIES, `called for ${asked}, then said ${text}`);
    for (const city of CITIES) assert.ok(text.includes(`${city} is sunny`), `results did not come back: ${text}`);
  },
  async schema(driver) {
    const report = await driver.schema();
    assert.deepEqual(Object.keys(report).sort(), ["city", "degrees"]);
    assert.ok(CITIES.includes(report.city) && Number.isInteger(report.degrees), JSON.stringify(report));
  },
  async error(driver) {
    const error = await driver.error();
    assert.match(`${error.message} ${error.responseBody ?? ""}`, /temperature|top_p/);
  },
  async abort(driver) {
    await driver.abort();
  },
};

export async function main(make) {
  const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
  const wanted = (await lines.next()).value.split(" ");
  const driver = make(...process.argv.slice(2));
  for (const scenario of wanted) {
    let detail = "";
    try {
      await JUDGES[scenario](driver);
    } catch (error) {
      console.error(error);
      detail = `${error.name}: ${error.message}`.replace(/\s+/g, " ").slice(0, 300);
    }
    console.log(JSON.stringify({ scenario, passed: !detail, detail }));
    if (scenario === "abort") await lines.next();
  }
  process.exit(0); // clients keep connections open
}
