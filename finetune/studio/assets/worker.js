// The planner in the browser: Python in a worker, so that the page stays responsive meanwhile.
import { loadPyodide } from "../pyodide/pyodide.mjs";

const ready = (async () => {
  const python = await loadPyodide({ indexURL: new URL("../pyodide/", import.meta.url).href });
  const wheels = await (await fetch(new URL("../python/wheels.json", import.meta.url))).json();
  await python.loadPackage(wheels.map((name) => new URL(`../python/${name}`, import.meta.url).href), { checkIntegrity: false });
  const sources = await (await fetch(new URL("../python/sluice.zip", import.meta.url))).arrayBuffer();
  python.unpackArchive(sources, "zip", { extractDir: "/home/pyodide" });
  return python.runPython("from finetune.studio.browser import answered\nanswered");
})();

self.onmessage = async ({ data: [kind, question] }) => {
  try {
    self.postMessage((await ready)(kind, question));
  } catch (error) {
    self.postMessage(JSON.stringify({ error: { what: String(error.message ?? error), limit: "", hint: "reload the page" } }));
  }
};
