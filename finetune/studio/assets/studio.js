// What both rooms share: elements, figures as people read them, and charts in the page's colours.
export const colours = document.body.dataset.colours.split(" ");
export const byId = (id) => document.getElementById(id);

export function element(tag, text = "", attributes = {}) {
  const made = document.createElement(tag);
  if (text !== "") made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

export function pictures(addresses) {
  const made = element("span", "", { class: "images" });
  made.append(...addresses.map((src, i) => element("img", "", { src, alt: `image ${i + 1}` })));
  return made;
}

export function table(heads, rows) {
  const made = element("table"), head = element("tr"), body = element("tbody");
  const isFigure = heads.map((_, i) => i > 0 && rows.every((row) => typeof row[i] === "object"));
  heads.forEach((name, i) => head.append(element("th", name, { scope: "col", ...(isFigure[i] ? { class: "figure" } : {}) })));
  for (const row of rows) {
    const line = element("tr");
    row.forEach((cell, i) => line.append(element("td", isFigure[i] ? cell.shown : cell, isFigure[i] ? { class: "figure" } : {})));
    body.append(line);
  }
  const top = element("thead");
  top.append(head);
  made.append(top, body);
  return made;
}

export const whole = (number) => Math.round(number).toLocaleString("en");
export const figure = (value) => Math.abs(value) >= 1000 ? whole(value) : value.toPrecision(5);
export const gib = (bytes) => `${(bytes / 2 ** 30).toFixed(2)} GiB`;

export function time(seconds) {
  if (seconds >= 48 * 3600) return `${(seconds / 86400).toFixed(1)} days`;
  if (seconds >= 7200) return `${(seconds / 3600).toFixed(1)} h`;
  if (seconds >= 100) return `${(seconds / 60).toFixed(1)} min`;
  return seconds >= 1 ? `${seconds.toFixed(2)} s` : `${(seconds * 1e3).toFixed(1)} ms`;
}

// Charts are drawn one after the other, and again when the page's colours change.
const drawn = new Map();
let drawing = Promise.resolve();
export function draw(id, spec) {
  drawn.set(id, spec);
  drawing = drawing.then(() => (drawn.get(id) === spec ? drawCharts({ [id]: spec }, colours) : null));
  return drawing;
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const [id, spec] of drawn) draw(id, spec);
});
