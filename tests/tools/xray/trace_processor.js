// Perfetto's trace processor as its page starts it, with a pipe in place of the page: requests come in at the
// standard input and replies leave at the standard output, both as bytes of TraceProcessorRpcStream.
// node trace_processor.js FOLDER_OF_THE_PAGE
const fs = require("fs");
const path = require("path");
const vm = require("vm");
const { stdin, stdout } = process;

const folder = process.argv[2];
globalThis.self = globalThis;
globalThis.WorkerGlobalScope = class {}; // the engine is written for a worker of the page
globalThis.process = undefined; // else its WebAssembly looks for the files of a Node program
self.location = { href: "http://page/engine_bundle.js" };
globalThis.XMLHttpRequest = class {
  open(_method, url) {
    this.response = fs.readFileSync(path.join(folder, path.basename(url)));
  }
  send() {}
};
console.log = console.warn = console.error; // the standard output is for replies
const port = {
  postMessage: (reply) => stdout.write(Buffer.from(reply)),
  set onmessage(receive) {
    stdin.on("data", (bytes) => receive({ data: new Uint8Array(bytes) })); // the engine is ready
  },
};
vm.runInThisContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"));
self.onmessage({ data: port });
