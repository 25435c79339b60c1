// The Runs room: the list is read again every two seconds, and with it the run that is open.
import { byId, draw, element, table, time, whole } from "./studio.js";

const EVERY_MS = 2000;
let open = new URLSearchParams(location.hash.slice(1)).get("run"), shown = "";

async function read(address) {
  const answer = await fetch(address);
  return answer.json();
}

function line(run) {
  const row = element("tr"), name = element("td", "", { class: "name" }), button = element("button", run.name, { type: "button" });
  button.addEventListener("click", () => {
    open = run.name;
    history.replaceState(null, "", `#${new URLSearchParams({ run: open })}`);
    showOne();
  });
  name.append(button);
  const figures = [
    run.of === null ? whole(run.steps) : `${whole(run.steps)} of ${whole(run.of)}`,
    run.loss === null ? "-" : run.loss.toFixed(4), run.eval_loss == null ? "-" : run.eval_loss.toFixed(4),
    run.tokens_per_s == null ? "-" : whole(run.tokens_per_s), run.eta_s === null ? "-" : time(run.eta_s),
  ];
  const state = element("td", run.state, run.state === "damaged" || run.state.startsWith("died") ? { class: "bad" } : {});
  const report = element("td");
  report.append(element("a", "report", { href: `report?${new URLSearchParams({ name: run.name })}`, "aria-label": `report of ${run.name}` }));
  row.append(name, state, ...figures.map((text) => element("td", text, { class: "figure" })), report);
  return row;
}

async function showAll() {
  const { folder, runs } = await read("runs.json");
  byId("folder").textContent = `Runs in ${folder}, the newest first; read again every two seconds.`;
  byId("none").textContent = runs.length ? "" : "No run here yet: sluice finetune RECIPE writes one, or start with another folder: sluice studio DIR.";
  const focused = document.activeElement?.textContent, isInList = byId("runs").contains(document.activeElement);
  byId("runs").replaceChildren(...runs.map(line));
  if (isInList) [...byId("runs").querySelectorAll("button")].find((one) => one.textContent === focused)?.focus();
  if (open === null && runs.length) open = runs[0].name;
  if (open !== null) await showOne();
}

async function showOne() {
  const name = open, run = await read(`run.json?${new URLSearchParams({ name })}`);
  const text = JSON.stringify(run);
  if (name !== open || text === shown) return;
  shown = text;
  byId("one").hidden = false;
  byId("name").textContent = name;
  byId("problem").textContent = run.problem ?? "";
  const facts = [...(run.settings ?? [])];
  if (run.state?.startsWith("died")) facts.push(["why it has no curve", "it ended before its first step; its messages were on the terminal that started it"]);
  byId("settings").replaceChildren(...facts.map(([key, value]) => {
    const row = element("tr");
    row.append(element("th", key, { scope: "row" }), element("td", value));
    return row;
  }));
  const charts = Object.entries(run.charts ?? {});
  byId("curves").replaceChildren(...charts.map(([id, spec]) => {
    const figure = element("figure");
    figure.append(element("div", "", { class: "chart", id }), element("figcaption", spec.description));
    return figure;
  }));
  for (const [id, spec] of charts) await draw(id, spec);
  const samples = run.samples ?? [];
  byId("samples-part").hidden = !samples.length;
  const answers = samples.map(({ prompt, wanted, before, after }) => [prompt, wanted, before ?? "-", after ?? "-"]);
  byId("samples").replaceChildren(table(["prompt", "wanted", "before training", "after"], answers));
  document.body.dataset.shown = name;
}

async function again() {
  try {
    await showAll();
  } catch (error) {
    byId("none").textContent = `The runs cannot be read: ${error.message}. Is sluice studio still running?`;
  }
  setTimeout(again, EVERY_MS);
}
again();
