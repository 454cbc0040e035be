// Gives standard input to Perfetto's trace processor, and writes its answers to standard output.
//
// node trace_processor.cjs FOLDER: of a build of Perfetto's UI, whose engine_bundle.js is a worker
// that loads trace_processor.wasm at once and is then handed a port.
const fs = require("node:fs");
const path = require("node:path");

process.chdir(process.argv[2]); // it reads the .wasm from the folder it runs in
globalThis.self = {};
require(path.resolve("engine_bundle.js"));
const port = { postMessage: (answer) => fs.writeSync(1, answer) };
globalThis.self.onmessage({ data: { enginePort: port } });
setImmediate(() => port.onmessage({ data: new Uint8Array(fs.readFileSync(0)) }));
