// The Runs room: the list is read again every two seconds, and with it the run that is open.
import { byId, draw, element, figure, pictures, table, time, whole } from "./studio.js";

const EVERY_MS = 2000, HEADS = [...byId("runs").parentNode.querySelectorAll("th")].map((head) => head.textContent);
let open = new URLSearchParams(location.hash.slice(1)).get("run"), shown = "";

async function read(address) {
  const answer = await fetch(address);
  return answer.json();
}

// What is done with a run is done on the server, which says why it is not.
async function ask(what, values) {
  const post = () => fetch(what, { method: "POST", body: JSON.stringify(values) });
  byId("said").className = "";
  byId("said").textContent = `${what}: ${values.name} ...`;
  try {
    const { problem } = await (await post()).json();
    byId("said").textContent = problem ?? `${what}: ${values.name}`;
    byId("said").className = problem === null ? "good" : "bad";
    if (problem === null) open = values.name;
    await showAll();
  } catch (error) {
    byId("said").textContent = `There is no answer: ${error.message}. Is sluice studio still running?`;
    byId("said").className = "bad";
  }
}

const form = byId("start"), fields = form.elements;
const named = () => fields.recipe.value.split("/").pop().replace(/\.ya?ml$/, "");
form.addEventListener("submit", (event) => {
  event.preventDefault();
  ask("start", { recipe: fields.recipe.value, name: fields.name.value });
});
fields.recipe.addEventListener("change", () => { fields.name.value = named(); });

// The answer comes in lines of JSON: what it is a part of, and the text.
let talksWith = "";
async function say(name, said, image) {
  const asked = element("p", said, { class: "said" }), answer = element("p");
  const note = element("p", "It thinks; the first answer waits for the model.", { class: "soft" });
  byId("talk").append(asked, answer, note);
  const response = await fetch("chat", { method: "POST", body: JSON.stringify({ name, said, image }) });
  if (!response.ok) {
    note.remove();
    throw new Error((await response.json()).problem);
  }
  if (image !== null) asked.prepend(pictures([image]));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "", problem = "", noted = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const lines = (text + part.value).split("\n");
    text = lines.pop();
    for (const [kind, words] of lines.map((one) => JSON.parse(one))) {
      if (kind === "say") answer.textContent += words;
      else if (kind === "note") noted = note.textContent = words;
      else problem = words;
    }
  }
  note.remove();
  if (problem) throw new Error(problem);
  if (!answer.textContent && said.trim() !== "/reset") { // the last note says why
    asked.replaceChildren(said);
    throw new Error(noted);
  }
}

// The file that is attached, as a `data:` address.
async function attached({ files, dataset }) {
  if (!files.length) return null;
  const [file] = files, most = Number(dataset.mostBytes);
  if (!file.type.startsWith("image/")) throw new Error(`${file.name} is no image: attach a PNG or a JPEG.`);
  if (file.size > most) throw new Error(`${file.name} has ${whole(file.size)} bytes, and at most ${whole(most)} are sent: save it smaller.`);
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(file);
  });
}
byId("chat").addEventListener("submit", async (event) => {
  event.preventDefault();
  const { said, image } = byId("chat").elements, button = byId("chat").querySelector("button");
  button.disabled = true;
  try {
    await say(open, said.value, await attached(image));
    said.value = image.value = "";
  } catch (error) {
    byId("talk").append(element("p", error.message, { class: "bad" }));
  }
  button.disabled = false;
});

async function listRecipes() {
  const { recipes } = await read("recipes.json");
  form.hidden = !recipes.length;
  fields.recipe.replaceChildren(...recipes.map((one) => element("option", one)));
  fields.name.value = recipes.length ? named() : "";
}

// The loss from the first step to the last, as wide as a word.
function sparkline({ name, spark }, what = "loss") {
  const make = (tag, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };
  const low = Math.min(...spark), high = Math.max(...spark), words = `${what} of ${name}: ${spark[0].toFixed(3)}, at last ${spark.at(-1).toFixed(3)}`;
  const at = (loss, i) => `${(96 * i) / (spark.length - 1) + 2},${22 - (20 * (loss - low)) / (high - low || 1)}`;
  const drawing = make("svg", { class: "spark", viewBox: "0 0 100 24", role: "img", "aria-label": words });
  drawing.append(make("polyline", { points: spark.map(at).join(" ") }));
  return drawing;
}

// On a phone a line is stacked: each cell is below the name of its column.
function withNames(row, heads) {
  [...row.cells].forEach((cell, i) => { if (i) cell.dataset.name = heads[i]; });
  return row;
}

function line(run) {
  const row = element("tr"), name = element("td", "", { class: "name" }), button = element("button", run.name, { type: "button" });
  button.addEventListener("click", () => {
    open = run.name;
    history.replaceState(null, "", `#${new URLSearchParams({ run: open })}`);
    showOne();
  });
  name.append(button);
  const cell = (text) => element("td", text, { class: "figure" });
  const steps = cell(run.of === null ? whole(run.steps) : `${whole(run.steps)} of ${whole(run.of)}`);
  if (run.of) steps.append(element("progress", "", { max: run.of, value: run.steps, "aria-label": `progress of ${run.name}` }));
  const course = element("td");
  if (run.spark?.length > 1) course.append(sparkline(run));
  const figures = [
    steps, cell(run.loss === null ? "-" : run.loss.toFixed(4)), course, cell(run.eval_loss == null ? "-" : run.eval_loss.toFixed(4)),
    ...Object.values(run.pace).map(cell), cell(run.eta_s === null ? "-" : time(run.eta_s)),
  ];
  const state = element("td", run.state, run.state === "damaged" || run.state.startsWith("died") ? { class: "bad" } : {});
  const report = element("td");
  for (const page of run.is_begun ? ["report", "rows"] : []) {
    report.append(element("a", page, { href: `${page}?${new URLSearchParams({ name: run.name })}`, "aria-label": `${page} of ${run.name}` }), " ");
  }
  const act = element("td");
  if (run.can) {
    const button = element("button", run.can, { type: "button", "aria-label": `${run.can} ${run.name}` });
    button.addEventListener("click", () => ask(run.can, { name: run.name }));
    act.append(button);
  }
  row.append(name, state, ...figures, report, act);
  return withNames(row, HEADS);
}

// What is served, and what recipes that ran against it say of their rewards.
function showServers(servers, rewards) {
  byId("serving").hidden = !servers.length;
  byId("servers").replaceChildren(...servers.map(({ name, base, problem, facts }) => {
    const said = element("p");
    said.append(element("b", `${name}: ${base}`), `. ${facts.join("; ")}. `, element("span", problem ?? "", { class: "bad" }));
    return said;
  }));
  fill("clients", servers.flatMap((one) => one.clients));
  byId("rewarded").hidden = !rewards.length;
  fill("rewards", rewards.map((one) => [one.name, one.spark.length > 1 ? sparkline(one, "reward") : "", ...one.figures]));
}

function fill(id, lines) {
  const part = byId(`${id}-part`), heads = [...part.querySelectorAll("th")];
  part.hidden = !lines.length;
  byId(id).replaceChildren(...lines.map((line) => {
    const row = element("tr");
    line.forEach((content, i) => {
      const cell = element("td", "", { class: heads[i].className, ...(i ? { "data-name": heads[i].textContent } : {}) });
      cell.append(content);
      row.append(cell);
    });
    return row;
  }));
}

async function showAll() {
  const { folder, runs, servers, rewards } = await read("runs.json");
  byId("folder").textContent = `Runs in ${folder}, the newest first; read again every two seconds.`;
  byId("none").textContent = runs.length ? "" : "No run here yet: start a recipe above, sluice finetune RECIPE writes one, or start with another folder: sluice studio DIR.";
  const label = (one) => one?.ariaLabel ?? one?.textContent;
  const focused = label(document.activeElement), isInList = byId("runs").contains(document.activeElement);
  byId("runs").replaceChildren(...runs.map(line));
  showServers(servers, rewards);
  if (isInList) [...byId("runs").querySelectorAll("button, a")].find((one) => label(one) === focused)?.focus();
  if (open === null && runs.length) open = runs[0].name;
  if (open !== null) await showOne();
}

// A curve as it is asked for: its mean over points before it, a logarithmic axis, and the point under the pointer.
function curve({ data, encoding, mark, params, ...rest }) {
  const field = encoding.y.field, num = mark.point ? 1 : 2 ** Number(byId("smooth").value);
  const points = data.values.map((point, i, all) => {
    const last = all.slice(Math.max(0, i + 1 - num), i + 1), mean = Number((last.reduce((sum, one) => sum + one[field], 0) / last.length).toPrecision(9));
    const words = `step ${whole(point.step)}: ${figure(point[field])}${num > 1 ? `, mean ${figure(mean)}` : ""}`;
    return { step: point.step, [field]: point[field], mean, words };
  });
  const isLog = byId("is-log").checked && points.every((point) => point[field] > 0);
  const y = { type: "quantitative", title: field, axis: { format: ",.4~r" }, scale: isLog ? { type: "log", nice: false } : { zero: false } };
  const raw = { x: encoding.x, y: { ...y, field } }, smooth = { x: encoding.x, y: { ...y, field: "mean" } };
  const near = { name: "near", select: { type: "point", nearest: true, encodings: ["x"], on: "pointermove", clear: "pointerout" } };
  const isNear = { condition: { param: "near", empty: false, value: 1 }, value: 0 };
  return { ...rest, data: { values: points }, layer: [
    { params, mark: { ...mark, opacity: num > 1 ? 0.3 : 1 }, encoding: raw },
    ...(num > 1 ? [{ mark, encoding: smooth }] : []),
    { params: [near], mark: { type: "point", filled: true, size: 60 }, encoding: { ...smooth, opacity: isNear } },
    { transform: [{ filter: { param: "near", empty: false } }], mark: { type: "text", align: "right", baseline: "top", fontSize: 13 },
      encoding: { x: { value: "width" }, y: { value: 2 }, text: { field: "words" } } },
  ] };
}

// Curves that grow are drawn again once that takes at most a small share of the time.
const REST = 40;
let charts = [], mayDrawAt = 0;
async function drawAll() {
  const begun = performance.now();
  for (const [id, spec] of charts) await draw(id, curve(spec));
  const ended = performance.now();
  mayDrawAt = ended + REST * (ended - begun);
}
byId("smooth").addEventListener("input", () => {
  const num = 2 ** Number(byId("smooth").value);
  byId("smooth-shown").textContent = num;
  byId("smooth").setAttribute("aria-valuetext", num);
  drawAll();
});
byId("is-log").addEventListener("change", drawAll);

async function showOne() {
  const name = open, run = await read(`run.json?${new URLSearchParams({ name })}`);
  const text = JSON.stringify(run);
  if (name !== open || text === shown) return;
  byId("one").hidden = false;
  byId("name").textContent = name;
  byId("problem").textContent = run.problem ?? "";
  const facts = [...(run.settings ?? [])];
  if (run.state?.startsWith("died")) facts.push(["why it has no curve", "it ended before its first step; its messages were on the terminal that started it, or are below"]);
  byId("chat-part").hidden = run.state !== "finished";
  byId("attach").hidden = !run.sees;
  if (talksWith !== name) {
    byId("talk").replaceChildren();
    byId("chat").reset();
  }
  talksWith = name;
  byId("log-part").hidden = !run.log;
  if (run.state?.startsWith("died")) byId("log-part").open = true;
  byId("log").textContent = run.log ?? "";
  byId("settings").replaceChildren(...facts.map(([key, value]) => {
    const row = element("tr");
    row.append(element("th", key, { scope: "row" }), element("td", value));
    return row;
  }));
  const samples = run.samples ?? [];
  byId("samples-part").hidden = !samples.length;
  const answers = samples.map(({ prompt, wanted, before, after }) => [prompt, wanted, before ?? "-", after ?? "-"]);
  const heads = ["prompt", "wanted", "before training", "after"], rows = table(heads, answers);
  rows.querySelectorAll("tbody tr").forEach((row, i) => {
    withNames(row, heads);
    if (samples[i].images.length) row.cells[0].prepend(pictures(samples[i].images));
  });
  byId("samples").replaceChildren(rows);
  if (name === document.body.dataset.shown && performance.now() < mayDrawAt) return;
  shown = text;
  charts = Object.entries(run.charts ?? {});
  byId("how").hidden = !charts.length;
  byId("curves").replaceChildren(...charts.map(([id, spec]) => {
    const figure = element("figure");
    figure.append(element("div", "", { class: "chart", id }), element("figcaption", spec.description));
    return figure;
  }));
  await drawAll();
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
listRecipes().catch((error) => { byId("said").textContent = `The recipes cannot be read: ${error.message}`; });
again();
