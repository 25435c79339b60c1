// Draws charts, given as Vega-Lite specifications by the id of their element, in the page's colours.
function chartConfig(colours) {
  const ink = getComputedStyle(document.documentElement);
  const of = (name) => ink.getPropertyValue(name).trim();
  const words = { labelColor: of("--ink"), titleColor: of("--ink") };
  return {
    background: null, view: { stroke: null }, range: { category: colours },
    axis: { ...words, labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal",
            gridColor: of("--line"), domainColor: of("--line"), tickColor: of("--line") },
    legend: { ...words, labelFontSize: 12 }, header: words,
    mark: { color: of("--mark") }, text: { color: of("--ink") }, rule: { color: of("--ink") }, tick: { color: of("--ink") },
  };
}

async function drawCharts(charts, colours) {
  const config = chartConfig(colours);
  for (const [id, spec] of Object.entries(charts)) {
    const element = document.getElementById(id);
    element.replaceChildren();
    const compiled = vegaLite.compile({ ...spec, config }).spec;
    const view = new vega.View(vega.parse(compiled, null, { ast: true }), {
      expr: vegaInterpreter.expressionInterpreter, renderer: "svg", container: element, hover: true,
    });
    await view.runAsync();
  }
  document.documentElement.dataset.drawn = "yes";
}
