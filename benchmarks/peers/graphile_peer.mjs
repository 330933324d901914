// graphile-worker in the place of an endpoint, for handle_peers.py; runs on Node.
//
// `graphile_peer.mjs FOLDER fill N` makes its tables in the database of PEER_URL and adds N jobs, 1,000 a statement;
// `graphile_peer.mjs FOLDER handle N` handles them, and prints what it found as JSON: the time ends when the last job was
// handled and the table of jobs is empty. FOLDER has the node_modules.
import { createRequire } from "node:module";
import { resolve } from "node:path";

const LOOK_MS = 2;
const [folder, what, count] = process.argv.slice(2);
const n = Number(count);
const load = createRequire(resolve(folder, "package.json"));
const { Logger, makeWorkerUtils, run } = load("graphile-worker");
const { Pool } = load("pg");
const pgPool = new Pool({ connectionString: process.env.PEER_URL, max: 30 });
const fail = (error) => {
  throw error;
};
pgPool.on("error", fail);
pgPool.on("connect", (client) => client.on("error", fail));
const logger = new Logger(() => () => {});

async function fill() {
  const utils = await makeWorkerUtils({ pgPool, logger });
  await utils.migrate();
  const text = "z".repeat(170);
  for (let first = 0; first < n; first += 1000) {
    const numbers = Array.from({ length: Math.min(1000, n - first) }, (_, offset) => first + offset);
    await utils.addJobs(numbers.map((number) => ({ identifier: "ping", payload: { number, text } })));
  }
  await utils.release();
}

async function handle() {
  const times = new Array(n).fill(0);
  let handled = 0;
  const ping = async ({ number }) => {
    times[number] += 1;
    handled += 1;
  };
  const worker = {
    concurrentJobs: 24,
    localQueue: { size: 500 },
    completeJobBatchDelay: 0,
    failJobBatchDelay: 0,
    maxPoolSize: 30,
  };
  const started = performance.now();
  const before = process.cpuUsage();
  const runner = await run({ pgPool, logger, taskList: { ping }, preset: { worker } });
  const left = async () => (await pgPool.query("SELECT 1 FROM graphile_worker._private_jobs LIMIT 1")).rowCount;
  while (handled < n || (await left())) await new Promise((done) => setTimeout(done, LOOK_MS));
  const seconds = (performance.now() - started) / 1000;
  const used = process.cpuUsage(before);
  await runner.stop();
  const lost = times.filter((each) => each === 0).length;
  const duplicated = times.filter((each) => each > 1).length;
  console.log(JSON.stringify({ rate: n / seconds, lost, duplicated, cpu_s: (used.user + used.system) / 1e6 }));
}

await (what === "fill" ? fill() : handle());
await pgPool.end();
