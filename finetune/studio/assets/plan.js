// The Plan room. One plan is on its way at a time; when its answer comes and the controls have
// changed since, the newest question is asked and the old answer is not drawn. What else is asked
// while the controls rest is answered in the background, and no plan waits for it.
import { byId, colours, draw, element, gib, table, time, whole } from "./studio.js";

const form = byId("question"), isStatic = document.body.dataset.static === "yes";
const fields = form.elements;

// ---------------------------------------------------------------- asking

const post = (kind, question) => fetch(`ask/${kind}`, { method: "POST", body: JSON.stringify(question) });
let send = async (kind, question) => {
  // the server may be closing an idle connection just now: browsers do not repeat a POST by themselves
  const answer = await post(kind, question).catch(() => post(kind, question));
  return answer.json();
};
if (isStatic) {
  const worker = new Worker("assets/worker.js", { type: "module" }), waiting = [];
  worker.onmessage = ({ data }) => waiting.shift()(JSON.parse(data));
  worker.onerror = (error) => say(`The planner could not be loaded: ${error.message}`, true);
  send = (kind, question) => new Promise((done) => {
    waiting.push(done);
    worker.postMessage([kind, JSON.stringify(question)]);
  });
}

function sliderValue(slider) {
  return Number(slider.dataset.values.split(" ")[Number(slider.value)]);
}

// Models that see images: those that are shipped, and others once an answer says so.
const seeing = new Set(byId("images").dataset.seeing.split(" "));
const modelOf = () => (fields.model.value === "other" ? fields.config.value.trim() || fields.hub_id.value.trim() : fields.model.value);
function asked() {
  const optional = (name) => (fields[name].value === "" || fields[name].disabled ? null : Number(fields[name].value));
  const size = fields.micro_batch_size.value, setup = {
    model: fields.model.value, card: fields.card.value, num_cards: Number(fields.num_cards.value),
    ram_gib: optional("ram_gib"), link_gb_per_s: optional("link_gb_per_s"),
    method: fields.method.value, rank: sliderValue(fields.rank), codec: fields.codec.value,
    objective: fields.objective.value, seq_len: sliderValue(fields.seq_len),
    tokens_per_step: sliderValue(fields.tokens_per_step),
    micro_batch_size: size === "auto" ? size : Number(size),
    ...(seeing.has(modelOf()) ? { num_images: Number(fields.num_images.value), image_tokens: optional("image_tokens") } : {}),
  };
  if (setup.model === "other") {
    const config = fields.config.value.trim();
    Object.assign(setup, config ? { model: "config.json", config } : { model: fields.hub_id.value.trim() });
  }
  const work = {};
  for (const name of ["data_tokens", "price_per_hour", "power_watts", "price_per_kwh"]) work[name] = Number(fields[name].value);
  return { setup, work, run: { rows: fields.rows.value.trim(), name: fields.name.value } };
}

const REST_MS = 300;
let newest = 0, changedAt = 0, isAsking = false;

function changed() {
  newest += 1;
  changedAt = performance.now();
  for (const slider of form.querySelectorAll("input[data-values]")) {
    const value = sliderValue(slider);
    byId(`${slider.name}-shown`).textContent = whole(value);
    slider.setAttribute("aria-valuetext", value);
  }
  if (byId("other")) byId("other").hidden = fields.model.value !== "other";
  const isHere = fields.card.value === "this machine";
  fields.ram_gib.disabled = fields.link_gb_per_s.disabled = isHere;
  byId("images").hidden = byId("images").disabled = !seeing.has(modelOf());
  fields.rank.disabled = ["all", "ia3"].includes(fields.method.value);
  byId("answer").setAttribute("aria-busy", "true");
  if (!isAsking) answerNewest();
}

async function answerNewest() {
  isAsking = true;
  while (document.body.dataset.answered !== String(newest)) {
    const number = newest, since = changedAt, question = asked();
    const isUnnamed = question.setup.model === "", invalid = [...fields].find((one) => one.willValidate && !one.validity.valid);
    if (isUnnamed || invalid) {
      const label = () => invalid.labels[0].firstChild.textContent.trim();
      say(isUnnamed ? "Give a hub id, or the text of a config.json." : `The field "${label()}": ${invalid.validationMessage}`, true);
      byId("answer").removeAttribute("aria-busy");
      document.body.dataset.answered = number;
      break;
    }
    const isCurrent = () => number === newest;
    try {
      const answer = await send("plan", question);
      if (!isCurrent()) continue;
      show(answer, question);
      document.body.dataset.answered = number;
      byId("answer").removeAttribute("aria-busy");
      requestAnimationFrame(() => setTimeout(() => {
        document.body.dataset.ms = (performance.now() - since).toFixed(1);
        document.body.dataset.timed = number;
      }));
      if (answer.error === null) {
        showMore(answer, question, isCurrent).catch((error) => isCurrent() && sayNoMore(error.message));
      }
    } catch (error) {
      if (isCurrent()) {
        say(`There is no answer: ${error.message}. Is sluice studio still running?`, true);
        byId("answer").removeAttribute("aria-busy");
        document.body.dataset.answered = number;
      }
    }
  }
  isAsking = false;
}

// Points of the curve and other ways, each by a short question, once the controls rest.
async function showMore(answer, question, isCurrent) {
  await new Promise((done) => setTimeout(done, REST_MS));
  if (!isCurrent()) return;
  if (answer.fits) {
    const points = [], refused = [];
    for (const tokens of fields.tokens_per_step.dataset.values.split(" ").map(Number)) {
      const point = await send("rate", { ...question, setup: { ...question.setup, tokens_per_step: tokens } });
      if (!isCurrent()) return;
      if (point.error) refused.push([tokens, point.error.what]);
      if (point.tokens_per_s) points.push({ "tokens per step": point.tokens_per_step, "tokens/s": point.tokens_per_s });
    }
    const once = [...new Map(points.map((point) => [point["tokens per step"], point])).values()];
    answer.curve.layer[0].data.values = once;
    await draw("curve", answer.curve);
    if (refused.length) byId("curve-note").append(` Without ${refused.map(([tokens]) => whole(tokens)).join(", ")} tokens per step: ${refused[0][1]}.`);
  }
  const ways = await send("ways", question);
  if (!isCurrent()) return;
  if (ways.error) return sayNoMore(`${ways.error.what}. Fix: ${ways.error.hint}`);
  showWays(ways, answer);
  document.body.dataset.complete = newest;
}

// ---------------------------------------------------------------- showing

function say(words, isBad, more = "") {
  const headline = byId("headline");
  headline.className = isBad ? "bad" : "good";
  headline.replaceChildren(words);
  if (more) headline.append(element("small", more));
}

function sayNoMore(words) {
  byId("ways").replaceChildren(element("p", `Not priced: ${words}`, { class: "bad" }));
}

// A plan that fits starts as a run, where the server can start it; else the page says why not.
function showStart({ error, fits, obstacle }) {
  if (isStatic) return;
  const why = error ? "there is no plan" : fits ? obstacle : "the plan does not fit";
  byId("start-plan").disabled = why !== null;
  inform(why === null ? "" : `It is not started here: ${why}`, "soft");
}

function inform(words, className) {
  byId("said").className = className;
  byId("said").textContent = words;
}

function show(answer, question) {
  if (answer.sees && !seeing.has(modelOf())) {
    seeing.add(modelOf());
    changed(); // the same, with its images
  }
  showStart(answer);
  byId("recipe").textContent = answer.recipe ?? "";
  byId("command").textContent = answer.command ?? "";
  const parts = ["gantt-part", "curve-part", "ways-part"];
  for (const id of parts) byId(id).hidden = answer.error !== null || (id !== "ways-part" && !answer.fits);
  byId("curve-note").textContent = "";
  byId("rows").replaceChildren();
  byId("ways").replaceChildren(element("p", "Pricing other ways ...", { class: "soft" }));
  byId("figures").replaceChildren();
  byId("memory").replaceChildren();
  if (answer.error !== null) {
    say(answer.error.what, true, [answer.error.limit, answer.error.hint && `Fix: ${answer.error.hint}`].filter(Boolean).join(". "));
    return;
  }
  answer.memory.forEach(showMemory);
  if (!answer.fits) {
    const short = answer.shortages.map((one) => `${gib(one.short_bytes)} of ${one.what} (${gib(one.needed_bytes)} needed, ${gib(one.limit_bytes)} there)`);
    say(`Does not fit: short of ${short.join(" and ")}`, true);
    return;
  }
  const { predicted, schedule } = answer.figures, { work } = answer;
  say(`Fits, at ${whole(predicted.tokens_per_s)} tokens/s`, false);
  const tiles = [
    ["tokens/s", whole(predicted.tokens_per_s), "tokens_per_s", predicted.tokens_per_s],
    ["a step", time(predicted.step_s), "step_s", predicted.step_s],
    ["tokens per step", whole(schedule.tokens_per_step), "tokens_per_step", schedule.tokens_per_step],
    ...memoryTiles(answer),
    ...imageTiles(answer),
    ["my data", time(work.hours * 3600), "hours", work.hours],
    ["steps", whole(work.steps), "steps", work.steps],
    ["energy", work.kwh ? `${work.kwh.toFixed(2)} kWh` : "power not known", "kwh", work.kwh],
    ["cost", work.cost ? work.cost.toFixed(2) : "give a price", "cost", work.cost],
  ];
  for (const [name, shown, key, value] of tiles) {
    const tile = element("div");
    tile.append(element("dt", name), element("dd", shown, { "data-key": key, "data-value": value }));
    byId("figures").append(tile);
  }
  const notes = answer.notes.map((note) => element("p", note, { class: "soft" }));
  byId("rows").replaceChildren(table(["", ""], answer.rows), ...notes); // as `sluice plan` shows them
  byId("gantt").innerHTML = answer.gantt;
  byId("zoom").value = 1;
  byId("curve-note").textContent = answer.curve.description;
  byId("curve").replaceChildren();
}

// What images take before step 1, once their number is known.
function imageTiles({ figures: { images } }) {
  if (!images?.num_images) return [];
  return [
    ["images on disk", gib(images.feature_bytes), "feature_bytes", images.feature_bytes],
    ["before step 1", time(images.pass_s), "pass_s", images.pass_s],
  ];
}

// On a CPU there is one memory.
function memoryTiles({ memory, figures: { predicted } }) {
  const device = predicted.peak_vram_bytes, host = predicted.host_bytes;
  if (memory.length === 1) return [["RAM", gib(device + host), "ram_bytes", device + host]];
  const [card, all] = Number(fields.num_cards.value) > 1 ? ["VRAM of each card", "RAM of all"] : ["VRAM", "RAM"];
  return [[card, gib(device), "peak_vram_bytes", device], [all, gib(host), "host_bytes", host]];
}

function showMemory(place) {
  const box = element("div", "", { class: "place" }), bar = element("div", "", { class: "bar", role: "img" });
  const list = element("ul", "", { class: "terms" });
  const sum = place.terms.reduce((total, [, bytes]) => total + bytes, 0), most = Math.max(sum, place.limit_bytes);
  const words = `${place.name}: ${gib(sum)} of ${gib(place.limit_bytes)}`;
  bar.setAttribute("aria-label", words);
  const terms = [...place.terms].sort((a, b) => b[1] - a[1]);
  terms.forEach(([name, bytes], i) => {
    const part = element("span", "", { title: `${name}: ${gib(bytes)}` });
    part.style.width = `${(100 * bytes) / most}%`;
    part.style.background = colours[Math.min(i, colours.length - 1)];
    bar.append(part);
    const item = element("li"), key = element("i");
    key.style.background = colours[Math.min(i, colours.length - 1)];
    item.append(key, name, element("b", gib(bytes)));
    list.append(item);
  });
  if (sum > place.limit_bytes) {
    const limit = element("span", "", { class: "limit" });
    limit.style.left = `${(100 * place.limit_bytes) / most}%`;
    bar.append(limit);
  }
  const line = element("p", words);
  if (sum > place.limit_bytes) line.className = "bad";
  box.append(line, bar, list);
  byId("memory").append(box);
}

const SAME = 0.005; // of a figure: a smaller change is none

function showWays(found, answer) {
  const place = byId("ways");
  if (!answer.fits) {
    place.replaceChildren(element("p", `What would fit: ${found.hint}`));
  } else if (found.other_ways === null) {
    place.replaceChildren(element("p", "Other ways are priced for one card.", { class: "soft" }));
  } else {
    const now = found.other_ways.plan;
    const change = (then, before, words) => ({
      shown: Math.abs(then - before) < SAME * before ? "=" : `${then > before ? "+" : "-"}${words(Math.abs(then - before))}`,
    });
    const sections = { "a setting": "With a setting", "in the plan": "Without what the plan does" };
    const shown = Object.entries(sections).flatMap(([standing, heading]) => {
      const rows = found.other_ways.options.filter((one) => one.standing === standing).map(({ name, how, fits, figures }) => [
        name + (fits ? "" : " (does not fit)"), change(figures.step_s, now.step_s, time),
        change(figures.vram_bytes, now.vram_bytes, gib), change(figures.ram_bytes, now.ram_bytes, gib), how.replaceAll("`", ""),
      ]);
      const heads = [heading, "a step", "VRAM", "RAM", "by"];
      if (!rows.length) return [];
      const made = table(heads, rows); // on a phone each cell has its column's name
      for (const row of made.tBodies[0].rows) heads.forEach((name, i) => { row.cells[i].dataset.name = name; });
      return [made];
    });
    const note = "Changes to this plan, all else as it is, the number of slots too; = is less than 0.5 %.";
    place.replaceChildren(...shown, element("p", note, { class: "soft" }));
  }
}

// ---------------------------------------------------------------- controls

byId("zoom").addEventListener("change", async () => {
  const number = newest, step = await send("step", { ...asked(), zoom: Number(byId("zoom").value) });
  if (number === newest && step.gantt) byId("gantt").innerHTML = step.gantt;
});
byId("copy").addEventListener("click", async () => {
  await navigator.clipboard.writeText(byId("recipe").textContent);
  inform("Copied.", "");
});
byId("start-plan")?.addEventListener("click", async () => {
  const button = byId("start-plan"), question = asked();
  if (!form.reportValidity()) return;
  button.disabled = true;
  inform("Starting ...", "");
  try {
    const answer = await fetch("start-plan", { method: "POST", body: JSON.stringify(question) });
    const { problem } = await answer.json();
    if (problem !== null) throw new Error(problem);
    location.assign(`runs#${new URLSearchParams({ run: question.run.name })}`);
  } catch (error) {
    inform(error.message, "bad");
    button.disabled = false;
  }
});
byId("config-file")?.addEventListener("change", async ({ target }) => {
  if (target.files.length) fields.config.value = await target.files[0].text();
  changed();
});
// A text is asked about when it is complete, not at each letter.
const isText = (field) => ["hub_id", "config", "rows", "name"].includes(field.name);
document.addEventListener("input", ({ target }) => target.form === form && !isText(target) && changed());
document.addEventListener("change", ({ target }) => target.form === form && isText(target) && changed());
form.addEventListener("submit", (event) => event.preventDefault());
changed();
